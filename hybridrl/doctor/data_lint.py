"""What the rows of a run look like, once they are loaded: lengths, empty and repeated prompts, what both sets hold.

Rows that cannot be used at all the loader has refused by then, all at once, with file and line.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from hybridrl.config import PPOConfig
from hybridrl.config.findings import Findings
from hybridrl.data.chat import Message
from hybridrl.data.prompts import Prompt, PromptDataset

SAMPLE = 50_000  # prompts that are looked into one by one; of more of them, as many evenly spread
PERCENTILES = (50, 90, 99, 100)
Said = tuple[tuple[str, str], ...]  # role and text of each message
MESSAGES_AS_TEXT = r"""\A\s*\[\s*\{\s*["']role["']"""
TURN_MARKS = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|<[|\uff5c]User[|\uff5c]>|" + MESSAGES_AS_TEXT
)


def lint(config: PPOConfig, prompts: PromptDataset, validation: PromptDataset | None, findings: Findings) -> None:
    """Add what there is to say of the prompts, and warn of what is likely not meant."""
    limit = config.data.max_prompt_length
    seen = _look_into(prompts, "data.train_files", limit, findings)
    if validation is not None:
        asked = _look_into(validation, "data.val_files", limit, findings)
        if overlap := [said for said in asked if said in seen]:
            findings.inform(
                "data.overlap",
                f"{sum(asked[said] for said in overlap)} validation prompts{_of_a_sample(prompts, validation)} are "
                f"training prompts too, such as {_begin(overlap[0])}: of them validation measures what was learnt by "
                "heart",
            )


def _look_into(prompts: PromptDataset, key: str, limit: int, findings: Findings) -> Counter[Said]:
    """Say what there is to say of one set; how often each prompt is in it."""
    _tell_lengths(prompts, key, limit, findings)
    asked: Counter[Said] = Counter()
    empty, marked = [], []
    for place, prompt in _sample(prompts):
        said = _said(prompt.messages)
        asked[said] += 1
        text = "".join(content for role, content in said if role != "system")
        if not text.strip():
            empty.append(place)
        elif TURN_MARKS.search(text):
            marked.append(place)
    of_sample = _of_a_sample(prompts)
    if empty:
        findings.warn(
            "data.empty",
            f"{key}: {len(empty)} prompts{of_sample} say nothing, the first {empty[0]}; leave these rows out",
        )
    if marked:
        findings.warn(
            "data.template",
            f"{key}: {len(marked)} prompts{of_sample} have marks of a chat template in their text, or messages written "
            f"as text, the first {marked[0]}, and the model's own template is put around that; give the bare question, "
            "or a list of messages",
        )
    if repeated := sum(asked.values()) - len(asked):
        said, times = asked.most_common(1)[0]
        findings.inform(
            "data.duplicates",
            f"{key}: {repeated} prompts{of_sample} repeat an earlier one ({_begin(said)} is there {times} times)",
        )
    return asked


def _tell_lengths(prompts: PromptDataset, key: str, limit: int, findings: Findings) -> None:
    lengths = prompts.lengths
    values = np.percentile(lengths, PERCENTILES, method="higher").astype(int)
    told = ", ".join(f"{rank}% up to {value}" for rank, value in zip(PERCENTILES, values, strict=True))
    findings.inform("data.lengths", f"{key}: {len(prompts)} prompts, in tokens {told} (data.max_prompt_length={limit})")
    if prompts.over:
        config = prompts.config
        dropped = config.filter_overlong_prompts
        done = (
            "dropped (data.filter_overlong_prompts=true)" if dropped else f"cut (data.truncation={config.truncation})"
        )
        whole = len(prompts) + (prompts.over if dropped else 0)
        findings.warn(
            "data.long",
            f"{key}: {prompts.over} of {whole} prompts ({prompts.over / whole:.1%}) are longer than "
            f"data.max_prompt_length={limit} and are {done}; raise the limit to keep them whole",
        )


def _sample(prompts: PromptDataset) -> Iterator[tuple[str, Prompt]]:
    """Where it stands, and the prompt: of all, or of as many as are looked into."""
    count = min(len(prompts), SAMPLE)
    for number in range(count):
        index = number * len(prompts) // count
        yield prompts.rows[index].place, prompts[index]


def _of_a_sample(*datasets: PromptDataset) -> str:
    large = [dataset for dataset in datasets if len(dataset) > SAMPLE]
    return f" (of {SAMPLE} that were looked into)" if large else ""


def _said(messages: list[Message] | str) -> Said:
    """Roles and texts; of a message in parts the text of all of them."""
    if isinstance(messages, str):
        return (("user", messages),)
    return tuple((message["role"], _text_of(message["content"])) for message in messages)


def _text_of(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" if isinstance(part, dict) else str(part) for part in content)


def _begin(said: Said) -> str:
    text = " ".join(said[-1][1].split()).replace("; ", ", ")
    return f'"{text[:60]}{"..." if len(text) > 60 else ""}"'
