"""What can be said of a configuration before it runs, one finding each: for people, and by its code for programs."""

from dataclasses import dataclass, field
from typing import Literal

from hybridrl.config.error import ConfigError

Severity = Literal["refused", "warning", "information"]


@dataclass(frozen=True)
class Finding:
    """`cause` says what is and why it matters, `fix` what to set or do (may be empty). `code` is stable."""

    code: str
    severity: Severity
    cause: str
    fix: str = ""

    @property
    def text(self) -> str:
        return "; ".join(part for part in (self.cause, self.fix) if part)


@dataclass
class Findings:
    """Collects findings from lines in the house's form: `key=value: the cause; the way out`. What has several lines,
    as all bad rows of a file, is a cause as a whole."""

    found: list[Finding] = field(default_factory=list)

    def refuse(self, code: str, line: str) -> None:
        self._add(code, "refused", line)

    def warn(self, code: str, line: str) -> None:
        self._add(code, "warning", line)

    def inform(self, code: str, line: str) -> None:
        self._add(code, "information", line)

    def _add(self, code: str, severity: Severity, line: str) -> None:
        cause, apart, fix = line.rpartition("; ") if "\n" not in line else (line, "", "")
        finding = Finding(code, severity, cause, fix) if apart else Finding(code, severity, line)
        if finding not in self.found:
            self.found.append(finding)

    @property
    def refused(self) -> list[Finding]:
        return [finding for finding in self.found if finding.severity == "refused"]

    def close(self) -> None:
        """Raise ConfigError, with a line for each, where anything is refused."""
        if self.refused:
            raise ConfigError(*(finding.text for finding in self.refused))
