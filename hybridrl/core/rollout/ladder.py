"""Out of memory: the engine is built again with less memory, until it works or the attempts are used up."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from hybridrl.config.schema import RolloutConfig
from hybridrl.runtime.stacks import largest_processes
from hybridrl.tracking.faults import KILLED, out_of_memory

logger = logging.getLogger(__name__)

ILLEGAL_ACCESS = "an illegal memory access"  # the error of a kernel without enough memory
# SHARE_TOO_SMALL: the engine does not fit into its share of the device, and a smaller share would not help.
SHARE_TOO_LARGE = re.compile(r"less than desired \w+ memory", re.IGNORECASE)  # others use the device
SHARE_TOO_SMALL = re.compile(r"no available memory for the cache|larger than the available KV cache", re.IGNORECASE)
ERROR = re.compile(r"[\w.]*(Error|Exception): .*")  # in a line of a log, which begins with process and time
KEY, SEQUENCES, SHARE = "actor_rollout_ref.rollout", "max_num_seqs", "gpu_memory_utilization"
LEAST_SHARE, LEAST_BYTES = 0.05, 1 << 20

Settings = dict[str, float]  # by key below `actor_rollout_ref.rollout`


class EngineOutOfMemory(RuntimeError):
    """An engine ran out of memory as it started or later. `reason`: the cause in one line; `hint`: the settings tried,
    and which ones to change."""

    code = "device-memory"

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason, hint)
        self.reason, self.hint = reason, hint

    def __str__(self) -> str:
        return f"the engine ran out of memory: {self.reason}{self.hint}"


def shortage(texts: Iterable[str]) -> str:
    """Return the first error in these texts (of exceptions or logs) that reports too little memory, in one line; empty
    if there is none."""
    for line in (line for text in texts for line in text.splitlines()):
        if " raise " not in line and (out_of_memory(line) or ILLEGAL_ACCESS in line):
            return (ERROR.search(line) or [line])[0].strip()[:300]
    return ""


def logged(log: Path, start: int) -> list[str]:
    """Return a server's log from the offset `start` on, as lines without warnings; none if on another machine."""
    with suppress(OSError), log.open(errors="replace") as file:
        file.seek(start)
        return [line for line in file if " WARNING " not in line]
    return []


def memory_settings(rollout: RolloutConfig, cache_bytes: str = "") -> Settings:
    """Return the memory settings of an engine that the ladder may lower. If the user has set the size of the cache, an
    argument of the engine with the key `cache_bytes`, it is lowered instead of the share."""
    settings: Settings = {SEQUENCES: rollout.max_num_seqs, SHARE: rollout.gpu_memory_utilization}
    arguments, _, name = cache_bytes.rpartition(".")
    size = attrgetter(arguments)(rollout).get(name) if arguments else None
    return settings | ({cache_bytes: size} if size else {})


def with_settings(rollout: RolloutConfig, settings: Settings) -> RolloutConfig:
    """Return the section with these settings."""
    changed: dict[str, Any] = {}
    for key, value in settings.items():
        name, *argument = key.split(".")
        changed[name] = value
        if argument:  # an engine's argument
            engine, kwargs = argument[0], getattr(rollout, name)
            changed[name] = replace(kwargs, **{engine: getattr(kwargs, engine) | {argument[1]: value}})
    return replace(rollout, **changed)


def one_notch_lower(settings: Settings, attempt: int, device: str, reason: str) -> Settings | None:
    """Return the settings of the next attempt, counted from 0; None at the floor.

    Requests at a time are halved first, then the memory that the engine may use is lowered (by 0.1 of a GPU; halved on
    CPU), and so on in turn.
    """
    sequences = {SEQUENCES: int(settings[SEQUENCES]) // 2} if settings[SEQUENCES] > 1 else {}
    memory = {} if SHARE_TOO_SMALL.search(reason) else _less_memory(settings, device)
    memory_first = attempt % 2 == 1 or SHARE_TOO_LARGE.search(reason)
    lower = (memory or sequences) if memory_first else (sequences or memory)
    return settings | lower if lower else None


def _less_memory(settings: Settings, device: str) -> Settings:
    for cache_bytes in settings.keys() - {SEQUENCES, SHARE}:
        size = int(settings[cache_bytes])
        return {cache_bytes: size // 2} if size >= 2 * LEAST_BYTES else {}
    share = settings[SHARE] / 2 if device == "cpu" else round(settings[SHARE] - 0.1, 3)
    return {SHARE: share} if share >= LEAST_SHARE else {}


class MemoryLadder:
    """The memory settings of a run's engines: as configured, until one of them runs out of memory.

    Lowered settings are kept for every engine built later, and in the checkpoints of the run.
    """

    def __init__(self, rollout: RolloutConfig, device: str, cache_bytes: str = "") -> None:
        self.device, self.limit = device, rollout.request_retries
        self.configured = memory_settings(rollout, cache_bytes)
        self.settings = dict(self.configured)
        self.tried: list[tuple[Settings, str]] = []  # settings that were not enough, with the reason

    def lower(self, used: Settings, reason: str, logs: Sequence[str] = ()) -> None:
        """Lower the settings after an engine with the settings `used` ran out of memory. Raises EngineOutOfMemory, with
        all tried settings, at the floor, after `request_retries` times, or once a second engine was killed for it."""
        if used != self.settings:  # another engine has lowered them since this one was built
            return
        lower = one_notch_lower(used, len(self.tried), self.device, reason)
        self.tried.append((used, reason))
        kills = sum(bool(KILLED.search(why)) for _, why in self.tried)
        if lower is None or len(self.tried) > self.limit or kills > 1:
            lines = ["", self.table(), self._hint(reason), *(largest_processes(logs) if kills else ())]
            raise EngineOutOfMemory(reason, "\n".join(lines))
        self.settings = lower
        logger.warning("%s; engines are built with %s from now on; to keep it, set %s", reason, self, self.overrides())

    def __str__(self) -> str:
        changed = {name: value for name, value in self.settings.items() if value != self.configured[name]}
        return ", ".join(f"{name.rsplit('.')[-1]}={value:g}" for name, value in changed.items())

    def _hint(self, reason: str) -> str:
        if SHARE_TOO_SMALL.search(reason):
            return f"raise {KEY}.{SHARE}, or lower {KEY}.max_model_len or {KEY}.max_num_batched_tokens"
        return f"lower {KEY}.max_num_batched_tokens, or use more devices; see hybridrl doctor"

    def overrides(self) -> str:
        """Return the overrides that start a run with the present settings."""
        changed = [name for name, value in self.settings.items() if value != self.configured[name]]
        return " ".join(f"{KEY}.{name}={self.settings[name]}" for name in changed)

    def table(self) -> str:
        """Return the tried settings, one per line; empty if there are none."""
        if not self.tried:
            return ""
        lines = (
            "  " + "  ".join(f"{name.rsplit('.')[-1]}={value:g}" for name, value in settings.items()) + f"  {reason}"
            for settings, reason in self.tried
        )
        return "\n".join(["tried without enough memory:", *lines])

    def state_dict(self) -> dict[str, Any]:
        return {"engine_memory": {"configured": self.configured, "lowered": self.settings}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use the settings that worked before, unless the configuration has changed since."""
        saved = state.get("engine_memory")
        if saved and saved["configured"] == self.configured:
            self.settings = dict(saved["lowered"])
