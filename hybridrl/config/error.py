"""The one error for everything that a user can mend in a command, a file or a data set."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """An input that is rejected; shown without a traceback.

    Each line names the key or file, its value and the cause; `fix`, what to set or do, ends the last line.
    """

    def __init__(self, *lines: str, fix: str = "") -> None:
        lines = (*lines[:-1], f"{lines[-1]}; {fix}") if fix else lines
        super().__init__("\n".join(lines))
        self.lines = lines


class Refusals:
    """Collects what is wrong, so that a user meets all of it in one message."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Add the lines of a ConfigError that is raised within, and go on after it."""
        try:
            yield
        except ConfigError as error:
            self.lines += [line for line in error.lines if line not in self.lines]

    def close(self) -> None:
        """Raise ConfigError where anything was added."""
        if self.lines:
            raise ConfigError(*self.lines)
