"""What a key may hold, as types for the schema: `Positive` is an int with a range, and a `Rule` validates one value.

How values are read by these types is in read.py; what depends on several keys, or on the machine, is in checks/.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

EXPECTED = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


class Fault(NamedTuple):
    """What is wrong with a value, and the fix. `absent`: a file or directory that may exist on another machine."""

    cause: str
    fix: str = ""
    absent: bool = False


class Rule(Protocol):
    """A condition on a value of the right type, as metadata of an Annotated type."""

    def fault(self, value: Any) -> Fault | None:
        """What is wrong with the value, if anything."""


@dataclass(frozen=True)
class Range:
    """Bounds of a number: `least` and `most` belong to the range, `above` and `below` do not."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    @property
    def requirement(self) -> str:
        limits = (
            ("at least", self.least),
            ("more than", self.above),
            ("at most", self.most),
            ("less than", self.below),
        )
        return " and ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)


@dataclass(frozen=True)
class Means:
    """Texts that stand for another value, such as trainer.test_freq=false for never."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Length(Rule):
    """The number of values in a list."""

    count: int

    def fault(self, value: list[Any]) -> Fault | None:
        return None if len(value) == self.count else Fault(f"expected {self.count} values: [a, b]")


@dataclass(frozen=True)
class NameOrFunction(Rule):
    """One of the built-in names, or a custom function as path/to/file.py:function."""

    names: tuple[str, ...]

    def fault(self, value: str) -> Fault | None:
        file, colon, _ = value.rpartition(":")
        if value in self.names:
            return None
        if not colon:
            return Fault(f"choose {' | '.join(self.names)} | path/to/file.py:function")
        return None if Path(file).is_file() else Fault(f"there is no file {file}", absent=True)


Positive = Annotated[int, Range(least=1)]
Natural = Annotated[int, Range(least=0)]
NonNegative = Annotated[float, Range(least=0)]
AboveZero = Annotated[float, Range(above=0)]
Seconds = AboveZero
Share = Annotated[float, Range(least=0, most=1)]
ShareAboveZero = Annotated[float, Range(above=0, most=1)]
Decay = Annotated[float, Range(least=0, below=1)]
TopK = Annotated[int, Range(least=-1)]
Frequency = Annotated[int, Means({"false": -1})]

REWARD_MANAGERS = ("naive", "dapo", "gdpo", "prime", "remote", "batch", "rate_limited")
LOGGERS = ("console", "file", "tensorboard", "wandb")

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]
# The texts that have a meaning are SkyRL's.
ResumeMode = Annotated[
    Literal["auto", "disable", "resume_path"],
    Means({"latest": "auto", "none": "disable", "null": "disable", "from_path": "resume_path"}),
]
DType = Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"]
# A trailing + takes the gradient of k2; full sums over the whole vocabulary.
KLForm = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "full",
]  # fmt: skip
