"""Fields that travel with a response: a table of declarations by name, which other packages extend.

Everything that holds responses (completions, turns, rows, batches, model inputs, the spool and checkpoints) has one
mapping `carried` from names to arrays and looks the names up in the table. A further field needs a declaration, code
that fills it and code that reads it, such as `rows.carried["doubt"]` in a custom loss with `reads = ("doubt",)`:

    [project.entry-points."hybridrl.plugins"]
    "carried.doubt" = "my_package:DOUBT"

    DOUBT = Carried("response", join="concatenate")  # a number per sampled token, from an engine
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, chain
from typing import Any, Literal

import numpy as np

from hybridrl import plugins

TEACHER, TEACHER_TOP = "teacher", "teacher_top"
CONTEXT, CONTEXT_LENGTHS = "context_ids", "context_lengths"
PICTURES, PICTURE_DIGEST, PICTURE_START = "pictures", "picture_digest", "picture_start"
UNROUTED = -1  # in `routes`, of a token that the engine has not computed: the router chooses
Fields = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Carried:
    """A field: an array per response, whose first dimension has the elements of its axis.

    Turns whose context only grows are one row. With the join "last" the row has the value of the last turn that has the
    field; this value covers the whole row. Other values are concatenated: a turn has values for the tokens that it
    added to the context (axis "response": for the tokens that the policy wrote). With "places" the values are places
    of tokens, counted from the turn's first token; the row's values count from the row's first token.
    """

    axis: Literal["row", "prompt", "response", "token", "items"]  # one value per row or token; any number of items
    lengths: str = ""  # for items: the batch field that holds their number per row
    join: Literal["last", "concatenate", "places"] = "last"
    absent: float = 0  # the value of rows or tokens without the field, where others have it
    stored: bool = True  # in spool and checkpoint
    enters: bool = False  # the hidden state of a token depends on it: it is an input of the model
    identity: bool = False  # prompts with different values are different prompts
    filled_by: Literal["prompt", "engine", "episode", "batch"] = "engine"  # "batch": once the scores are known


@dataclass(frozen=True)
class Encoded:
    """A prompt, or an addition to it in a conversation: token ids, and the fields that belong to them."""

    ids: list[int]
    carried: Fields = field(default_factory=dict)


# The number of a row's teacher (-1: none), whether it has one, its log-probs of the response tokens, and the token ids
# that it reads in place of the prompt.
# The teacher's k most probable tokens in place of each: id, and the bits of the float32 log-prob [k, 2] int32.
# A scored prompt: of each token (the first: zeros), then of the k most probable ones, id, log-prob and rank [1 + k, 3].
# Routes: the experts that a mixture's routers chose [tokens, layers, experts of a token] int16, for all tokens of
# prompt and response but the last, which the engine does not compute. Layers without experts have arbitrary numbers.
# Pictures (core/pictures.py): their number in a row, digests [pictures] int64, and first tokens [pictures] int32.
FIELDS = {
    TEACHER: Carried("row", absent=-1, filled_by="prompt"),
    "taught": Carried("row", filled_by="prompt"),
    "teacher_log_probs": Carried("response", filled_by="episode"),
    TEACHER_TOP: Carried("response", filled_by="episode"),
    "prompt_log_probs": Carried("prompt", stored=False),
    CONTEXT: Carried("items", lengths=CONTEXT_LENGTHS, stored=False, enters=True, filled_by="batch"),
    CONTEXT_LENGTHS: Carried("row", stored=False, filled_by="batch"),
    "routes": Carried("token", absent=UNROUTED, enters=True),
    PICTURES: Carried("row", filled_by="prompt"),
    PICTURE_DIGEST: Carried("items", PICTURES, join="concatenate", enters=True, identity=True, filled_by="prompt"),
    PICTURE_START: Carried("items", PICTURES, join="places", enters=True, identity=True, filled_by="prompt"),
}


@cache
def declared(name: str) -> Carried:
    """Return the declaration of a field; ValueError lists those that exist."""
    if name in FIELDS:
        return FIELDS[name]
    if name not in declared_names():
        raise ValueError(f"no carried field is named {name!r:.80}; declared are {', '.join(declared_names())}")
    return plugins.load(f"carried.{name}")


def declared_names() -> list[str]:
    """Return the names of all fields, without loading what other distributions declare."""
    return [*FIELDS, *plugins.names("carried")]


def brought(row: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the fields of a row of data, from its columns `carried.NAME`; ValueError if a prompt cannot have one."""
    columns = {name.removeprefix("carried."): np.asarray(row[name]) for name in row if name.startswith("carried.")}
    fields = {name: value for name, value in columns.items() if value.size and value.tolist() is not None}
    for name, value in fields.items():
        if name in (PICTURES, PICTURE_DIGEST, PICTURE_START):
            raise ValueError(f"carried.{name} follows from the pictures of a row; leave the column out")
        if declared(name).filled_by != "prompt" or value.dtype.kind not in "biuf" or not value.ndim:
            raise ValueError(f"carried.{name} must be a list of numbers, of a field that prompts fill: {value!r:.60}")
    return fields


def identity(fields: Fields) -> bytes:
    """Return the bytes that distinguish prompts with the same ids; empty for most prompts."""
    parts = [(name, value) for name, value in sorted(fields.items()) if declared(name).identity]
    return b"".join(f"{name} {value.dtype.str} {value.shape} ".encode() + value.tobytes() for name, value in parts)


def superseded(earlier: Fields, later: Fields) -> dict[str, np.ndarray]:
    """Return the fields of a turn that its row still needs when a later turn is known."""
    return {name: value for name, value in earlier.items() if name not in later or declared(name).join != "last"}


def continued(first: Fields, second: Fields, sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the fields of a response from its two parts; `sizes` are the tokens of each part."""
    parts = [{name: part[name] for name in part if declared(name).join != "last"} for part in (first, second)]
    return {**first, **second, **joined(parts, (0, 0), sizes)}


def joined(parts: Sequence[Fields], read: Sequence[int], wrote: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the fields of a row from its turns, one value per element of an axis. Each turn added `read` tokens to the
    context (the first turn: the prompt), then the tokens that the policy `wrote`."""
    return {name: _joined(name, parts, read, wrote) for name in dict.fromkeys(chain.from_iterable(parts))}


def _joined(name: str, parts: Sequence[Fields], read: Sequence[int], wrote: Sequence[int]) -> np.ndarray:
    field, prompt = declared(name), read[0]
    *before, tokens = accumulate(map(sum, zip(read, wrote, strict=True)), initial=0)
    present = [(part[name], *counts) for part, *counts in zip(parts, before, read, strict=True) if name in part]
    if field.join == "last":
        present = [(present[-1][0], 0, prompt)]
    if field.axis == "items":
        return np.concatenate([value + start if field.join == "places" else value for value, start, _ in present])
    size = {"row": 1, "prompt": prompt, "response": tokens - prompt, "token": tokens}[field.axis]
    whole = np.full((size, *present[0][0].shape[1:]), field.absent, present[0][0].dtype)
    for value, start, observed in present:
        begin = start + observed - prompt if field.axis == "response" else start
        part = value[: max(size - begin, 0)]
        whole[begin : begin + len(part)] = part
    return whole
