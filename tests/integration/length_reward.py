"""A reward that an untrained model can earn: the share of distinct characters in the response."""


def compute_score(solution_str: str) -> float:
    return len(set(solution_str)) / max(len(solution_str), 1)
