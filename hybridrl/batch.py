"""The one thing that travels: rows of different lengths, lying end to end. Knows neither Ray nor models nor rewards.

A row is one sampled answer to one prompt. Every field has one of three axes:

    row        one value a row                                       [B]
    prompt     one value a prompt token, rows end to end             [sum of prompt_lengths]
    response   one value a response token, rows end to end           [sum of response_lengths]

Example: two rows, answers of 3 and 1 tokens: `response_ids = [5, 9, 2, 7]`, `response_lengths = [3, 1]`.
A field that no station of the step has filled yet is None.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

ROW, PROMPT, RESPONSE = ({"axis": axis} for axis in ("row", "prompt", "response"))


@dataclass
class Batch:
    """Packed rows. `position` is the prompt's place in the run's seeded order, `sample` the number within its group.

    `group` tells which rows answer the same prompt; `rewards` is the scalar a scorer gave (an answer without one is no
    row), and `token_rewards` what the advantage estimator sees: the score on the last token, less any KL penalty.
    """

    prompt_lengths: Tensor = field(metadata=ROW)  # [B] int64
    response_lengths: Tensor = field(metadata=ROW)  # [B] int64
    prompt_ids: Tensor = field(metadata=PROMPT)  # int32: no vocabulary needs more
    response_ids: Tensor = field(metadata=RESPONSE)  # int32
    group: Tensor = field(metadata=ROW)  # [B] int64
    position: Tensor = field(metadata=ROW)  # [B] int64
    sample: Tensor = field(metadata=ROW)  # [B] int64
    rewards: Tensor | None = field(default=None, metadata=ROW)  # [B] float32
    reward_parts: Tensor | None = field(default=None, metadata=ROW)  # [B, K] the rewards that `rewards` is made of
    greedy_rewards: Tensor | None = field(default=None, metadata=ROW)  # [B] of the prompt's greedy answer
    truncated: Tensor | None = field(default=None, metadata=ROW)  # [B] bool: stopped by the length limit
    response_mask: Tensor | None = field(default=None, metadata=RESPONSE)  # bool: the policy wrote this token
    rollout_log_probs: Tensor | None = field(default=None, metadata=RESPONSE)
    old_log_probs: Tensor | None = field(default=None, metadata=RESPONSE)
    reference_log_probs: Tensor | None = field(default=None, metadata=RESPONSE)
    reference_kl: Tensor | None = field(default=None, metadata=RESPONSE)  # KL(policy || reference), all tokens
    entropies: Tensor | None = field(default=None, metadata=RESPONSE)
    sum_pi_squared: Tensor | None = field(default=None, metadata=RESPONSE)  # sum of squared probabilities, all tokens
    importance_weights: Tensor | None = field(default=None, metadata=RESPONSE)  # trainer over rollout, truncated
    chosen: Tensor | None = field(default=None, metadata=RESPONSE)  # bool: tokens that the loss treats apart
    values: Tensor | None = field(default=None, metadata=RESPONSE)
    token_rewards: Tensor | None = field(default=None, metadata=RESPONSE)
    advantages: Tensor | None = field(default=None, metadata=RESPONSE)
    returns: Tensor | None = field(default=None, metadata=RESPONSE)

    def __len__(self) -> int:
        return self.prompt_lengths.numel()

    @property
    def lengths(self) -> Tensor:
        """Prompt plus response tokens of each row [B]."""
        return self.prompt_lengths + self.response_lengths

    @property
    def response_row(self) -> Tensor:
        """The row that each response token belongs to."""
        rows = torch.arange(len(self), device=self.response_lengths.device)
        return torch.repeat_interleave(rows, self.response_lengths)

    @property
    def last_tokens(self) -> Tensor:
        """Index, among response tokens, of each row's last one [B]. Every row has at least one."""
        return self.response_lengths.cumsum(0) - 1

    def select(self, rows: Tensor | Sequence[int]) -> "Batch":
        """The rows named, in the order named."""
        rows = np.asarray(rows, dtype=np.int64)  # numpy: a pass holds so few rows that torch's calls would take longest
        lengths = {"prompt": self.prompt_lengths.numpy(), "response": self.response_lengths.numpy()}
        cuts = {axis: pieces(of_axis, rows) for axis, of_axis in lengths.items()}
        chosen = {
            name: value.numpy()[rows] if axis == "row" else end_to_end(value.numpy(), cuts[axis])
            for name, axis, value in self._filled()
        }
        return replace(self, **{name: torch.from_numpy(value) for name, value in chosen.items()})

    def only(self, *names: str) -> "Batch":
        """The same rows with the fields every batch has and those named; the rest does not travel."""
        dropped = {name: None for name in OPTIONAL if name not in names}
        return replace(self, **dropped)

    def to(self, device: torch.device) -> "Batch":
        """The same rows on a device."""
        return replace(self, **{name: value.to(device) for name, _, value in self._filled()})

    def padded(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Response-axis values as a right-padded rectangle [B, T]."""
        return torch.nn.utils.rnn.pad_sequence(
            values.split(self.response_lengths.tolist()), batch_first=True, padding_value=fill
        )

    def per_row(self, values: Tensor) -> Tensor:
        """Sum of response-axis values over each row [B]."""
        return values.new_zeros(len(self)).index_add_(0, self.response_row, values)

    def written_mean(self, values: Tensor) -> Tensor:
        """Mean of response-axis values over the tokens of each row that the policy wrote [B]; 0 where it wrote none."""
        mask = self.response_mask.to(values.dtype)
        return self.per_row(values * mask) / self.per_row(mask).clamp(min=1)

    def __getstate__(self) -> dict[str, np.ndarray]:
        """As arrays, which Ray lays into shared memory by one copy and reads there without any."""
        return {name: value.numpy() for name, _, value in self._filled()}

    def __setstate__(self, state: dict[str, np.ndarray]) -> None:
        vars(self).update(dict.fromkeys(OPTIONAL) | {name: as_tensor(value) for name, value in state.items()})

    def _filled(self) -> Iterable[tuple[str, str, Tensor]]:
        for item in fields(self):
            value = vars(self)[item.name]
            if value is not None:
                yield item.name, item.metadata["axis"], value

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """Rows of several batches end to end; all must have the same fields filled."""
        names = [name for name, _, _ in batches[0]._filled()]
        return replace(batches[0], **{name: torch.cat([vars(batch)[name] for batch in batches]) for name in names})


OPTIONAL = tuple(item.name for item in fields(Batch) if item.default is None)


def as_tensor(values: np.ndarray) -> Tensor:
    """The values of an array, not copied: those of an array that came through Ray may not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch knows no tensors that are only read
        return torch.from_numpy(values)


def places(starts: Tensor, lengths: Tensor) -> Tensor:
    """Indices starts[i], starts[i] + 1, ..., lengths[i] of them, for all rows end to end; on the CPU."""
    starts, lengths = starts.numpy(), lengths.numpy()  # numpy repeats several times as fast as torch
    index = np.repeat(starts - (lengths.cumsum() - lengths), lengths)
    index += np.arange(len(index))
    return torch.from_numpy(index)


def spans(lengths: Tensor, rows: Tensor) -> Tensor:
    """Indices of the elements of the rows named, where rows of these lengths lie end to end."""
    return places((lengths.cumsum(0) - lengths)[rows], lengths[rows])


def pieces(lengths: np.ndarray, rows: np.ndarray) -> list[slice]:
    """Where the rows named are, where rows of these lengths lie end to end."""
    ends = lengths.cumsum()[rows]
    return list(map(slice, (ends - lengths[rows]).tolist(), ends.tolist()))


def end_to_end(values: np.ndarray, cuts: Sequence[slice]) -> np.ndarray:
    """These pieces of the values: long rows are copied in half the time that single tokens are picked in."""
    return np.concatenate([values[:0], *map(values.__getitem__, cuts)])


def pack(rows: Sequence[Sequence[int]] | Sequence[np.ndarray], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows as flat values and lengths [B]."""
    flat = torch.from_numpy(np.concatenate(rows)) if rows else torch.empty(0)
    return flat.to(dtype), torch.tensor([len(row) for row in rows], dtype=torch.int64)
