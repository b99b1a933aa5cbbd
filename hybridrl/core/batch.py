"""The batch that travels between driver and workers: packed rows. Knows neither Ray, models nor rewards.

A row is one sampled response to one prompt, of one turn or several; an episode whose context was replaced has several
rows. A field has one of four axes:

    row: one value per row                                       [B]
    prompt: one value per prompt token, rows concatenated        [sum of prompt_lengths]
    response: one value per response token, rows concatenated    [sum of response_lengths]
    token: one value per token of prompt and response            [sum of lengths]

A carried field may have the axis items: any number of them per row, which the field named by `lengths` counts.

Example: two rows with responses of 3 and 1 tokens: `response_ids = [5, 9, 2, 7]`, `response_lengths = [3, 1]`.
A field that no station of the step has filled yet is None.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.core.carried import CONTEXT, CONTEXT_LENGTHS, declared, declared_names
from hybridrl.required import required

if TYPE_CHECKING:
    from tensordict import TensorDict

ROW, PROMPT, RESPONSE = ({"axis": axis} for axis in ("row", "prompt", "response"))


@dataclass
class Batch:
    """Packed rows. `position` is the prompt's index in the run's seeded order, `sample` the number within its group.
    Rows of the same prompt have the same `group`, and are neighbours. An episode has several rows if its context was
    replaced: they have the same `episode`, and are neighbours; None: one row per episode.
    `rewards` is the scorer's scalar (a response without a score is not in the batch), `token_rewards` the estimator's
    input: the score on the last token, less any KL.
    """

    prompt_lengths: Tensor = field(metadata=ROW)  # [B] int64
    response_lengths: Tensor = field(metadata=ROW)  # [B] int64
    prompt_ids: Tensor = field(metadata=PROMPT)  # int32: no vocabulary needs more
    response_ids: Tensor = field(metadata=RESPONSE)  # int32
    group: Tensor = field(metadata=ROW)  # [B] int64
    position: Tensor = field(metadata=ROW)  # [B] int64
    sample: Tensor = field(metadata=ROW)  # [B] int64
    episode: Tensor | None = field(default=None, metadata=ROW)  # [B] int64
    episode_tokens: Tensor | None = field(
        default=None, metadata=ROW
    )  # [B] float32: its tokens of `response_mask`, all rows
    masked_tokens: Tensor | None = field(default=None, metadata=ROW)  # [B, masks] the same within masks of the loss
    rewards: Tensor | None = field(default=None, metadata=ROW)  # [B] float32
    reward_parts: Tensor | None = field(default=None, metadata=ROW)  # [B, K] components of `rewards`
    greedy_rewards: Tensor | None = field(default=None, metadata=ROW)  # [B] of the prompt's greedy response
    truncated: Tensor | None = field(default=None, metadata=ROW)  # [B] bool: stopped by the length limit
    token_row: Tensor | None = field(default=None, metadata=RESPONSE)  # int64; None: `response_lengths` says it
    # bool: the policy wrote this token, and it is trained on
    response_mask: Tensor | None = field(default=None, metadata=RESPONSE)
    # bool: the policy wrote this token, trained on or not; None: that is the response mask
    sampled: Tensor | None = field(default=None, metadata=RESPONSE)
    rollout_log_probs: Tensor | None = field(default=None, metadata=RESPONSE)
    # int32: how many steps old the weights that sampled a token were when this step began; None: its own weights.
    staleness: Tensor | None = field(default=None, metadata=RESPONSE)
    old_log_probs: Tensor | None = field(default=None, metadata=RESPONSE)
    reference_log_probs: Tensor | None = field(default=None, metadata=RESPONSE)
    reference_kl: Tensor | None = field(default=None, metadata=RESPONSE)  # KL(policy || reference), all tokens
    entropies: Tensor | None = field(default=None, metadata=RESPONSE)
    sum_pi_squared: Tensor | None = field(default=None, metadata=RESPONSE)  # sum of squared probabilities, all tokens
    # The training over the rollout probability of each token, truncated.
    importance_weights: Tensor | None = field(default=None, metadata=RESPONSE)
    chosen: Tensor | None = field(default=None, metadata=RESPONSE)  # bool: tokens that the loss treats separately
    values: Tensor | None = field(default=None, metadata=RESPONSE)
    token_rewards: Tensor | None = field(default=None, metadata=RESPONSE)
    advantages: Tensor | None = field(default=None, metadata=RESPONSE)
    returns: Tensor | None = field(default=None, metadata=RESPONSE)
    carried: dict[str, Tensor] = field(default_factory=dict)  # declared by name in core/carried.py

    def __post_init__(self) -> None:
        if clash := [name for name in self.carried if name in AXES]:
            raise ValueError(f"carried field {clash[0]}: a batch has another field with this name")

    def __len__(self) -> int:
        return self.prompt_lengths.numel()

    @property
    def lengths(self) -> Tensor:
        """Return the prompt plus response tokens of each row [B]."""
        return self.prompt_lengths + self.response_lengths

    @property
    def _lengths(self) -> dict[str, Tensor]:
        """Return the number of elements of each row, by axis."""
        counts = {name: self.carried[name] for name in (declared(key).lengths for key in self.carried) if name}
        return {"prompt": self.prompt_lengths, "response": self.response_lengths, "token": self.lengths, **counts}

    @property
    def response_row(self) -> Tensor:
        """Return the row that each response token belongs to."""
        if self.token_row is not None:
            return self.token_row
        rows = torch.arange(len(self), device=self.response_lengths.device)
        # Without the size the host would wait for the device to count.
        return torch.repeat_interleave(rows, self.response_lengths, output_size=len(self.response_ids))

    @property
    def sampled_mask(self) -> Tensor:
        """Return the mask of the response tokens that the policy wrote; tokens of an environment are excluded."""
        return required(self.response_mask) if self.sampled is None else self.sampled

    @property
    def sampled_lengths(self) -> Tensor:
        """Return the number of tokens of each row that the policy wrote [B]."""
        return self.per_row(self.sampled_mask.long())

    @property
    def last_tokens(self) -> Tensor:
        """Return the index, on the response axis, of each row's last token [B]. Every row has at least one."""
        return self.response_lengths.cumsum(0) - 1

    def by_episode(self) -> "Batch":
        """Return the same response tokens with one row per episode, whose prompt is its first row's. Carried fields of
        tokens of the prompt and response, and of items, are left out."""
        if self.episode is None:
            return self
        counts = self.episode.unique_consecutive(return_counts=True)[1]
        first = counts.cumsum(0) - counts
        number = torch.arange(len(counts)).repeat_interleave(counts)
        carried = {name: part for name, part in self.carried.items() if declared(name).axis not in ("token", "items")}
        whole = replace(replace(self, carried=carried).select(first), episode=None)
        of_tokens = {name: value for name, axis, value in self.filled() if axis == "response"}
        lengths = torch.zeros_like(counts).index_add_(0, number, self.response_lengths)
        return whole._with({"response_lengths": lengths, **of_tokens})

    def with_episode_tokens(self, masks: Sequence[str] = ()) -> "Batch":
        """Return the same rows with the number of tokens that the policy wrote in all rows of each row's episode, and
        how many of them are in each of these masks."""
        if self.episode is None:
            return self
        narrowed = [self, *(self.masked(name) for name in masks)]
        written = torch.stack([rows.per_row(required(rows.response_mask).float()) for rows in narrowed], -1)
        of_episode = written.new_zeros(int(self.episode.max()) + 1, len(narrowed)).index_add_(0, self.episode, written)
        tokens, *masked = of_episode[self.episode].unbind(-1)
        return replace(self, episode_tokens=tokens, masked_tokens=torch.stack(masked, -1) if masked else None)

    def masked(self, name: str, number: int = 0) -> "Batch":
        """Return the same rows; their response mask has only the tokens in the bool field `name`, which has this number
        among the masks of the loss."""
        inside, axis = self.value(name), AXES.get(name) or declared(name).axis
        if inside is None:
            inside = torch.zeros_like(required(self.response_mask))
        elif axis == "row":
            inside = inside[self.response_row]
        tokens = self.masked_tokens if self.masked_tokens is None else self.masked_tokens[:, number]
        return replace(self, response_mask=required(self.response_mask) & inside, episode_tokens=tokens)

    def in_context(self) -> "Batch":
        """Return the rows as a teacher with a context reads them: a row's context is its prompt, if it has one. Carried
        fields of tokens of the prompt are left out."""
        if CONTEXT not in self.carried:
            return self
        own, lengths = self.prompt_lengths, self.carried[CONTEXT_LENGTHS]
        starts = len(self.prompt_ids) + lengths.cumsum(0) - lengths
        starts = torch.where(lengths > 0, starts, own.cumsum(0) - own)
        lengths = torch.where(lengths > 0, lengths, own)
        ids = torch.cat([self.prompt_ids, self.carried[CONTEXT].to(self.prompt_ids.dtype)])[places(starts, lengths)]
        carried = {
            name: value for name, axis, value in self.filled() if name in self.carried and axis in ("row", "response")
        }
        return replace(self, prompt_ids=ids, prompt_lengths=lengths, carried=carried)

    def value(self, name: str) -> Tensor | None:
        """Return the values of a field or of a carried field; None if it is not filled."""
        return vars(self)[name] if name in AXES else self.carried.get(name)

    def put(self, name: str, values: Tensor | None, rows: Tensor | None = None) -> "Batch":
        """Return the same rows with these values of a field, of all rows or only of some: the others keep their values,
        or get the field's absent value. None empties the field."""
        if rows is not None and values is not None:
            axis = AXES.get(name) or declared(name).axis
            lengths, before = self._lengths.get(axis, torch.ones_like(self.group)), self.value(name)
            if before is None:
                absent = 0 if name in AXES else declared(name).absent
                before = values.new_full((int(lengths.sum()), *values.shape[1:]), absent)
            values = before.index_copy(0, spans(lengths, rows), values)
        if name in AXES:
            return self._with({name: values})
        return replace(self, carried=self.carried if values is None else {**self.carried, name: values})

    def select(self, rows: Tensor | Sequence[int]) -> "Batch":
        """Return these rows, in this order."""
        indices = np.asarray(rows, dtype=np.int64)  # numpy, as the overhead of torch calls dominates for few rows
        cuts = {axis: pieces(lengths.numpy(), indices) for axis, lengths in self._lengths.items()}
        selected = {}
        for name, axis, value in self.filled():
            values = value.numpy()
            # Copying slices of long rows takes half the time of indexing single tokens.
            picked = (
                values[indices] if axis == "row" else np.concatenate([values[:0], *map(values.__getitem__, cuts[axis])])
            )
            selected[name] = torch.from_numpy(picked)
        return self._with(selected)

    def tokens(self, span: slice) -> "Batch":
        """Return the same rows with only a span of all response tokens; fields of other axes stay whole."""
        rows = replace(self, token_row=self.response_row)
        return rows._with({name: value[span] for name, axis, value in rows.filled() if axis == "response"})

    def only(self, *names: str) -> "Batch":
        """Return the same rows with only the required fields and those named, so that the rest is not sent."""
        sent = {*names, *(declared(name).lengths for name in self.carried if name in names)}
        carried = {name: value for name, value in self.carried.items() if name in sent}
        return replace(self, **{name: None for name in OPTIONAL if name not in names}, carried=carried)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to every tensor, for example to move it to a device."""
        return self._with({name: function(value) for name, _, value in self.filled()})

    def padded(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Return response-axis values padded on the right [B, T]."""
        rows = list(values.split(self.response_lengths.tolist()))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)

    def per_row(self, values: Tensor) -> Tensor:
        """Return the sum of response-axis values per row [B]."""
        return values.new_zeros(len(self)).index_add_(0, self.response_row, values)

    def trained_mean(self, values: Tensor) -> Tensor:
        """Return the mean of response-axis values over the tokens per row that are trained on [B]; 0 if none."""
        mask = required(self.response_mask).to(values.dtype)
        return self.per_row(values * mask) / self.per_row(mask).clamp(min=1)

    def to_tensordict(self) -> "TensorDict":
        """Return the filled fields as a TensorDict [B] without a copy, for code that is written for one: fields of
        tokens are nested tensors in the jagged layout, one part per row."""
        from tensordict import TensorDict

        starts = {axis: torch.nn.functional.pad(part.cumsum(0), (1, 0)) for axis, part in self._lengths.items()}
        nested = torch.nested.nested_tensor_from_jagged
        content = {name: value if axis == "row" else nested(value, starts[axis]) for name, axis, value in self.filled()}
        return TensorDict(content, batch_size=[len(self)])

    @classmethod
    def from_tensordict(cls, content: "TensorDict") -> "Batch":
        """Return the rows of a TensorDict as `to_tensordict` makes it; entries that are not fields are left out."""
        values = ((name, content.get(name, None)) for name in (*AXES, *declared_names()))
        present = {name: value for name, value in values if value is not None}
        present |= {name: value.contiguous().values() for name, value in present.items() if value.is_nested}
        carried: dict[str, Tensor] = {name: present.pop(name) for name in list(present) if name not in AXES}
        return cls(**present, carried=carried)

    def __getstate__(self) -> dict[str, np.ndarray]:
        """Return arrays, which Ray copies to shared memory once and reads there without a copy."""
        return {name: value.numpy() for name, _, value in self.filled()}

    def __setstate__(self, state: dict[str, np.ndarray]) -> None:
        values = {name: as_tensor(value) for name, value in state.items()}
        carried = {name: values.pop(name) for name in state if name not in AXES}
        vars(self).update(dict.fromkeys(OPTIONAL) | values, carried=carried)

    def filled(self) -> Iterable[tuple[str, str, Tensor]]:
        """Return name, axis and values of every field that is filled; the axis of items is the name of their number."""
        for name, axis in AXES.items():
            if (value := vars(self)[name]) is not None:
                yield name, axis, value
        for name, value in self.carried.items():
            yield name, declared(name).lengths or declared(name).axis, value

    def _with(self, values: dict[str, Any]) -> "Batch":
        """Return the same rows with other values of fields, carried ones among them."""
        carried = {name: values.pop(name, value) for name, value in self.carried.items()}
        return replace(self, **values, carried=carried)


AXES = {item.name: item.metadata["axis"] for item in fields(Batch) if item.metadata}
OPTIONAL = tuple(item.name for item in fields(Batch) if item.default is None)


def as_tensor(values: np.ndarray) -> Tensor:
    """Return an array as a tensor without a copy; arrays received through Ray are read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors
        return torch.from_numpy(values)


def places(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return indices starts[i], starts[i] + 1, ..., lengths[i] of them, concatenated for all rows; on the CPU."""
    counts = lengths.numpy()  # numpy's repeat is several times as fast as torch's
    index = np.repeat(starts.numpy() - (counts.cumsum() - counts), counts)
    index += np.arange(len(index))
    return torch.from_numpy(index)


def spans(lengths: Tensor, rows: Tensor) -> Tensor:
    """Return the indices of these rows' elements, in packed rows of these lengths."""
    return places((lengths.cumsum(0) - lengths)[rows], lengths[rows])


def pieces(lengths: np.ndarray, rows: np.ndarray) -> list[slice]:
    """Return the slices of these rows, in packed rows of these lengths."""
    ends = lengths.cumsum()[rows]
    return list(map(slice, (ends - lengths[rows]).tolist(), ends.tolist()))


def pack(rows: Sequence[Sequence[float]] | Sequence[np.ndarray], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows as packed values and lengths [B]."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    flat = torch.empty(int(lengths.sum()), dtype=dtype)
    if rows:
        np.concatenate(rows, out=flat.numpy(), casting="unsafe")
    return flat, lengths


def token_rows(rows: Sequence[Sequence[int]], response: slice = slice(1, None)) -> Batch:
    """Return rows of token ids as a batch; the `response` of each ends it, the tokens before are its prompt."""
    prompt_ids, prompt_lengths = pack([row[: response.start] for row in rows], torch.int64)
    response_ids, response_lengths = pack([row[response] for row in rows], torch.int64)
    numbers = torch.arange(len(rows))
    return Batch(prompt_lengths, response_lengths, prompt_ids, response_ids, numbers, numbers, numbers)
