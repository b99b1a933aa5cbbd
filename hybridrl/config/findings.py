"""Findings: everything that can be reported about a configuration, a file or a machine before a run starts.

    findings = Findings()
    findings.error("conflict", "must be at least 1", "set 8", keys="actor_rollout_ref.rollout.n", value=0)
    findings.warn(code, cause, fix, keys=..., value=...)    # fix, keys and value are optional everywhere
    findings.info(code, cause)
    with findings.gathered("data.load"):                    # a ConfigError raised within becomes findings of this code
        load_prompts(...)
    findings.close()                                        # raise ConfigError if there is any error

`Finding.text` is the message in one piece, `key=value: cause; fix`; `Finding.statement` the same without the fix.
Messages are never taken apart again: programs read the fields.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
Keys = str | Sequence[str]


@dataclass(frozen=True)
class Finding:
    """One message, in fields.

    `code` is stable, for programs. `keys`: all keys that the message depends on, the key to blame first; `value`: its
    value in the form of a command line. `cause`: the problem and why it matters; `fix`: the setting or action.
    """

    code: str
    severity: Severity
    keys: tuple[str, ...] = ()
    value: str | None = None
    cause: str = ""
    fix: str = ""

    @property
    def statement(self) -> str:
        """`key=value: cause`, or the cause alone if it begins with the key, or names it and there is no value."""
        if not self.keys or self.cause.startswith(self.keys[0]) or (self.value is None and self.keys[0] in self.cause):
            return self.cause
        subject = self.keys[0] if self.value is None else f"{self.keys[0]}={self.value}"
        return f"{subject}{'' if self.cause.startswith('has no effect') else ':'} {self.cause}"

    @property
    def text(self) -> str:
        return f"{self.statement}; {self.fix}" if self.fix else self.statement


class ConfigError(ValueError):
    """An input that is rejected; printed without a traceback.

    Takes a cause with key and value or file, and its `fix`; or several causes or findings, a line each.
    """

    code = "rejected"

    def __init__(self, *causes: str | Finding, fix: str = "", keys: Keys = (), value: object = None) -> None:
        fixes = [""] * (len(causes) - 1) + [fix]
        self.findings = tuple(
            cause if isinstance(cause, Finding) else _finding("input", "error", cause, fix, keys, value)
            for cause, fix in zip(causes, fixes, strict=True)
        )
        self.config: Any = None  # the configuration, with shipped values for unreadable ones
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """The texts of the findings."""
        return tuple(finding.text for finding in self.findings)


@dataclass
class Findings:
    """Collects findings in their order, each once."""

    items: list[Finding] = field(default_factory=list)

    def error(self, code: str, cause: str, fix: str = "", *, keys: Keys = (), value: object = None) -> None:
        """Add an error: `close` will raise. `value` may be of any type; write None as "null" to show it."""
        self.add(_finding(code, "error", cause, fix, keys, value))

    def warn(self, code: str, cause: str, fix: str = "", *, keys: Keys = (), value: object = None) -> None:
        self.add(_finding(code, "warning", cause, fix, keys, value))

    def info(self, code: str, cause: str, fix: str = "", *, keys: Keys = (), value: object = None) -> None:
        self.add(_finding(code, "info", cause, fix, keys, value))

    def add(self, *findings: Finding) -> None:
        self.items += [finding for finding in dict.fromkeys(findings) if finding not in self.items]

    @contextmanager
    def gathered(self, code: str | None = None) -> Iterator[None]:
        """Add the findings of a ConfigError raised within and continue after the block; `code` replaces their codes."""
        try:
            yield
        except ConfigError as error:
            self.add(*(replace(finding, code=code or finding.code) for finding in error.findings))

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.items if finding.severity == "error"]

    def close(self, about: Any = None) -> None:
        """Raise ConfigError with all errors, if there are any, and the configuration (`about`)."""
        if self.errors:
            error = ConfigError(*self.errors)
            error.config = about
            raise error


@dataclass
class Checker:
    """Adds findings about keys of a configuration: `check.error(".n algorithm.adv_estimator", cause, fix)`.

    Keys are separated by spaces, or in a list; a key that begins with a dot is in the section `place`. The value of the
    first key is shown unless `valued` is false. `values`: the user's values, before derived ones are filled in.
    """

    findings: Findings
    values: Mapping[str, Any]
    place: str = ""

    def at(self, place: str) -> "Checker":
        return replace(self, place=place)

    def muted(self) -> "Checker":
        """A checker that drops its findings."""
        return replace(self, findings=Findings())

    def error(self, keys: Keys, cause: str, fix: str = "", *, valued: bool = True) -> None:
        names = self._names(keys)
        self.findings.error("conflict", cause, fix, keys=names, value=self._shown(names[0]) if valued else None)

    def warn(self, keys: Keys, cause: str, fix: str = "", *, valued: bool = True) -> None:
        names = self._names(keys)
        self.findings.warn("setting", cause, fix, keys=names, value=self._shown(names[0]) if valued else None)

    def idle(self, keys: Keys, why: str) -> None:
        """Warn that the first key has no effect, whatever its value; `why` continues the sentence."""
        name = self._names(keys)[0]
        self.warn(keys, f"{name} has no effect{'' if why.startswith(':') else ' '}{why}", valued=False)

    def _names(self, keys: Keys) -> list[str]:
        names = keys.split() if isinstance(keys, str) else keys
        return [f"{self.place}{key}" if key.startswith(".") else key for key in names]

    def _shown(self, key: str) -> str | None:
        value: Any = self.values
        for name in key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                return None
            value = value[name]
        short = f"{value:g}" if isinstance(value, float) else ""
        return short if short and float(short) == value else show(value)


def show(value: Any) -> str:
    """A value in the form of a command line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show, value))}]"
    return {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else str(value)


def nearest(key: str, valid: list[str], count: int = 3) -> list[str]:
    """The valid keys most similar to a mistyped one, best first; none if nothing is similar.

    Half of the similarity is that of the last part, half that of as many last parts as were typed (or of all parts).
    Long beginnings count little.
    """

    def ratio(text: str, other: str) -> float:
        return difflib.SequenceMatcher(None, text, other).ratio()

    score: dict[str, float] = {}
    for name in valid:
        last, typed = name.rsplit(".", 1)[-1], key.rsplit(".", 1)[-1]
        tail = ".".join(name.split(".")[-(key.count(".") + 1) :])
        alike = 0.5 * ratio(typed, last) + 0.5 * max(ratio(key, name), ratio(key, tail))
        score[name] = max(alike, 0.7 if len(typed) > 2 and typed in last else 0)
    least = max(0.6, max(score.values()) - 0.15)
    return sorted((name for name in valid if score[name] > least), key=lambda name: -score[name])[:count]


def _finding(code: str, severity: Severity, cause: str, fix: str, keys: Keys, value: object) -> Finding:
    keys = (keys,) if isinstance(keys, str) else tuple(keys)
    return Finding(code, severity, keys, None if value is None else show(value), cause, fix)
