"""What a key may hold, as types for the schema: `Positive` is an int with a rule, and a rule judges one value.

Looks at files and directories. Knows no key: what depends on several keys, or on the machine, is in checks.py.
"""

import json
from dataclasses import dataclass
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from hybridrl.config.model_directory import ADAPTER_CONFIG, adapter_settings, holds_adapter, is_sharded, resolve_model

WEIGHT_FILES = ("*.safetensors", "*.bin")


class Absent(str):
    """A fault that is this machine's: a file or directory that may be there on another."""


class Rule(Protocol):
    def fault(self, value: Any) -> str | None:
        """What is wrong with a value of the right type, and the way out; None: nothing."""


@dataclass(frozen=True)
class Range:
    """Bounds of a number: `least` and `most` belong to the range, `above` and `below` do not."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def fault(self, value: float) -> str | None:
        limits = (("at least", self.least, ge), ("more than", self.above, gt))
        limits += (("at most", self.most, le), ("less than", self.below, lt))
        stated = [(words, limit, holds) for words, limit, holds in limits if limit is not None]
        if all(holds(value, limit) for _, limit, holds in stated):
            return None
        return "must be " + " and ".join(f"{words} {limit:g}" for words, limit, _ in stated)


@dataclass(frozen=True)
class Length:
    """The number of values in a list."""

    count: int

    def fault(self, values: list[Any]) -> str | None:
        return None if len(values) == self.count else f"expected {self.count} values: [a, b]"


@dataclass(frozen=True)
class Means:
    """Texts that stand for another value: trainer.test_freq=false is never."""

    values: dict[str, Any]

    def fault(self, value: Any) -> str | None:
        return None


@dataclass(frozen=True)
class NameOrFunction:
    """One of the names that come along, or a user's own function as path/to/file.py:function."""

    names: tuple[str, ...]

    def fault(self, value: str) -> str | None:
        file, colon, _ = value.rpartition(":")
        if value in self.names:
            return None
        if not colon:
            return f"choose {' | '.join(self.names)} | path/to/file.py:function"
        return None if Path(file).is_file() else Absent(f"there is no file {file}")


class PathOrHub:
    """A local directory, or a name of the Hugging Face hub (which is not asked here)."""

    def fault(self, name: str) -> str | None:
        looks_local = name.startswith((".", "/")) or name.count("/") != 1
        if looks_local and not Path(name).is_dir():
            return Absent(f"there is no such directory{missing_parent(Path(name))}")
        return None


class ModelPath(PathOrHub):
    """A Hugging Face model: a directory with configuration and weights, a model of a saved step, or a hub name."""

    def fault(self, name: str) -> str | None:
        if not Path(name).is_dir():
            return super().fault(name)
        if holds_adapter(name):
            return (
                "it is a LoRA adapter; name its base model here and the adapter as lora_adapter_path, or merge them "
                f"first: python -m hybridrl.model_merger merge --local_dir {name} --target_dir merged"
            )
        directory = resolve_model(name)
        config = directory / "config.json"
        if not config.is_file():
            if Path(name, "actor").is_dir():
                return f"a saved step may hold several models; name the one that is meant: {Path(name, 'actor')}"
            return "the directory has no config.json, so it is no Hugging Face model"
        try:
            json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            return f"its config.json cannot be read ({error}); save the model anew"
        if not is_sharded(name) and not any(True for pattern in WEIGHT_FILES for _ in directory.glob(pattern)):
            if is_sharded(str(Path(name).parent)):
                return f"the weights lie in the folder above; name that: {Path(name).parent}"
            return f"the directory has no weights ({' or '.join(WEIGHT_FILES)}); save or download the model anew"
        return None


class AdapterPath:
    """A LoRA adapter: peft's directory, or a folder of a saved step that was trained through one."""

    def fault(self, name: str) -> str | None:
        if not Path(name).is_dir():
            return Absent(f"there is no such directory{missing_parent(Path(name))}")
        if not holds_adapter(name):
            return f"the directory has no {ADAPTER_CONFIG}, so it is no LoRA adapter"
        try:
            kind = adapter_settings(name).get("peft_type")
        except (OSError, ValueError) as error:
            return f"its {ADAPTER_CONFIG} cannot be read ({error}); save the adapter anew"
        return None if kind == "LORA" else f"it is an adapter of the type {kind}; only LORA can be trained"


class ScriptFile:
    """A .py file as a plain path or file://path, or an installed module as pkg://name."""

    def fault(self, name: str) -> str | None:
        if name.startswith("pkg://") or Path(name.removeprefix("file://")).is_file():
            return None
        return Absent("there is no such file; give the path of a .py file")


def missing_parent(path: Path) -> str:
    """The outermost directory on the way that is not there."""
    missing = [parent for parent in path.parents if not parent.exists()]
    return f" ({missing[-1]} does not exist)" if missing else ""


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

# The tables of algorithms/ in words, as this room knows no torch; a test holds them equal.
ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
)
POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "cispo",
    "sapo",
    "geo_mean",
    "gmpo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "dro",
)
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]
# The last four are SkyRL's.
ResumeMode = Annotated[
    Literal["auto", "disable", "resume_path"],
    Means({"latest": "auto", "none": "disable", "null": "disable", "from_path": "resume_path"}),
]

DType = Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"]
# A trailing + takes k2's gradient; full sums over the whole vocabulary.
KLForm = Literal[
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
    "full",
]
