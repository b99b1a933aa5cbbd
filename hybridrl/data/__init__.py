"""Rows of files, hub datasets or custom classes -> token ids, in a reproducible order."""

PROMPT_NAMES = ("question", "problem", "query", "instruction", "input", "messages", "text")  # in other datasets
TRUTH_NAMES = ("ground_truth", "answer", "label", "target", "solution")  # likewise
TRUTHS = ("reward_model", "reward_spec")  # verl's and SkyRL's columns of the ground truth
