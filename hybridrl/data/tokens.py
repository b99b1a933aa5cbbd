"""Rows of token ids kept small, and cut to length. Knows no text."""

from array import array
from collections.abc import Sequence

import numpy as np


class TokenRows:
    """Rows of integers end to end in one array; lists of Python integers take about nine times the memory."""

    def __init__(self) -> None:
        self._values = array("i")
        self._ends = array("q", [0])

    def append(self, row: Sequence[int]) -> None:
        self._values.extend(row)
        self._ends.append(len(self._values))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> list[int]:
        index = range(len(self))[index]
        return self._values[self._ends[index] : self._ends[index + 1]].tolist()

    @property
    def largest(self) -> int:
        """Of all tokens; -1 where there is none."""
        return max(self._values, default=-1)

    @property
    def lengths(self) -> np.ndarray:  # [rows], int64
        return np.diff(np.array(self._ends))


def cut(row: list[int], limit: int, side: str) -> list[int]:
    """The row without what is beyond `limit`: taken off on the left, the right, or in the middle."""
    if len(row) <= limit:
        return row
    kept_left = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return row[:kept_left] + row[len(row) - (limit - kept_left) :]
