"""Values that may be absent in general, but not where they are used."""

from typing import TypeVar

T = TypeVar("T")


def required(value: T | None) -> T:
    """Return a value that has to be there."""
    assert value is not None
    return value
