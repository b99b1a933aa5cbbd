"""Rewards of benchmarks, for runs whose figures do not depend on what is learned."""


def compute_score(solution_str: str, **_: object) -> int:
    """Return a score that differs within a group."""
    return len(solution_str) % 7


def length(solution_str: str, **_: object) -> float:
    """Pay for the characters of a response."""
    return len(solution_str) / 100


def paid_for_length(solution_str: str, ground_truth: str, **_: object) -> dict[str, float]:
    """Pay for the characters of a response, whether it is right or not."""
    return {"score": length(solution_str), "acc": _accuracy(solution_str, ground_truth)}


def same_for_all(solution_str: str, ground_truth: str, **_: object) -> dict[str, float]:
    """Pay the same for each response."""
    return {"score": 1.0, "acc": _accuracy(solution_str, ground_truth)}


def _accuracy(solution_str: str, ground_truth: str) -> float:
    return float(solution_str.rpartition("#### ")[2] == ground_truth)
