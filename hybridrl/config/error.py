"""The one error for everything that a user can mend in a command, a file or a data set."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A refusal whose message names the key or file, its value, and the way out; shown without a traceback.

    One line for each thing that is wrong.
    """

    def __init__(self, *lines: str) -> None:
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
