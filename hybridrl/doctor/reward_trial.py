"""The reward on a few real rows: does an answer that gives the ground truth get more than an empty one?

The functions run in the scorer pool, as in a run: what one of them raises or how long it takes ends nothing here.
"""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridrl.config import ConfigError
from hybridrl.config.findings import Findings
from hybridrl.config.schema_reward import RewardConfig
from hybridrl.data.prompts import Prompt
from hybridrl.rewards.built_in import module_of
from hybridrl.rewards.load import uses_built_in
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Answer, Score

ROWS = 8
SECONDS = 20.0
# How an answer gives a text as its result, by the built-in scorer that reads it.
FORMS = {
    "gsm8k": "#### {}",
    "math": r"\boxed{{{}}}",
    "math_dapo": r"Answer: \boxed{{{}}}",
    "multiple_choice": r"\boxed{{{}}}",
    "search_qa": "<answer>{}</answer>",
}
# Those whose ground truth is a task or tests, of which no answer can be made.
UNANSWERED = ("code", "countdown")
# A function of one's own may read any of these.
USUAL = ("{}", FORMS["gsm8k"], FORMS["math_dapo"], FORMS["search_qa"])


@dataclass(frozen=True)
class Trial:
    """A row's answers: an empty one, and those that give its ground truth."""

    prompt: Prompt
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Tried:
    """The scores of a trial's answers, in their order; None: not there in time."""

    trial: Trial
    scores: tuple[Score | None, ...]

    @property
    def empty(self) -> float | None:
        return self.scores[0].value if self.scores[0] else None

    @property
    def right(self) -> float | None:
        """The best that the ground truth gets in any form."""
        return max((s.value for s in self.scores[1:] if s and s.value is not None), default=None)


def try_reward(
    config: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    findings: Findings,
    seconds: float = SECONDS,
) -> None:
    """`seconds`: for all answers together; opening the pool has a limit of its own."""
    trials = [Trial(prompt, _answers(prompt, uses_built_in(config))) for prompt in spread_rows(prompts, ROWS)]
    directory = Path(tempfile.mkdtemp(prefix="hybridrl-doctor-"))
    log = directory / "reward.log"
    try:
        sources = {trial.prompt.data_source for trial in trials}
        tried = _score(config, trials, tokenizer, sources, log, seconds)
        _tell_faults(tried, config, seconds, log, findings)
        for source in sorted({one.trial.prompt.data_source for one in tried}):
            _compare(source, [one for one in tried if one.trial.prompt.data_source == source], findings)
    except ConfigError as error:
        for line in error.lines:
            findings.refuse("reward.load", line)
    finally:
        if not any(str(log) in finding.text for finding in findings.found):
            shutil.rmtree(directory)


def spread_rows(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Some rows of every data source in turn, evenly from first to last."""
    by_source: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_source.setdefault(prompt.data_source, []).append(index)
    share = max(count // len(by_source), 1)
    chosen = [indices[:: -(-len(indices) // share)] for indices in by_source.values()]
    return [prompts[index] for indices in chosen for index in indices][: max(count, len(by_source))]


def _answers(prompt: Prompt, built_in: bool) -> tuple[str, ...]:
    module = module_of(prompt.data_source) if built_in else None
    if module in UNANSWERED:
        return ("",)
    forms = (FORMS[module],) if module in FORMS else USUAL
    return ("", *dict.fromkeys(form.format(_as_text(prompt.ground_truth, module)) for form in forms))


def _as_text(truth: Any, module: str | None) -> str:
    """The ground truth as an answer would give it."""
    if module == "multiple_choice" and isinstance(truth, int):
        return chr(ord("A") + truth)
    truth = truth.get("target", truth) if isinstance(truth, dict) else truth
    truth = truth[0] if isinstance(truth, list) and truth else truth
    return str(truth)


def _score(
    config: RewardConfig,
    trials: Sequence[Trial],
    tokenizer: PreTrainedTokenizerBase,
    sources: set[str],
    log: Path,
    seconds: float,
) -> list[Tried]:
    # In a process even where the run would score in the driver: there nothing ends a call.
    config = replace(config, num_workers=min(max(config.num_workers, 1), 2), retries=0)
    with ScorerPool(config, log, sources) as pool:
        began = time.monotonic()
        answers = [_answer(trial.prompt, text, tokenizer, pool) for trial in trials for text in trial.answers]
        futures = iter(pool.submit(answers))
        grouped = [(trial, [next(futures) for _ in trial.answers]) for trial in trials]
        wait([future for _, group in grouped for future in group], timeout=began + seconds - time.monotonic())
        return [Tried(trial, tuple(map(_so_far, group))) for trial, group in grouped]


def _answer(prompt: Prompt, text: str, tokenizer: PreTrainedTokenizerBase, pool: ScorerPool) -> Answer:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if pool.takes_tokens else None
    return Answer(prompt.data_source, text, prompt.ground_truth, prompt.extra_info, ids)


def _so_far(future: Future[Score]) -> Score | None:
    return future.result() if future.done() else None


def _tell_faults(tried: list[Tried], config: RewardConfig, seconds: float, log: Path, findings: Findings) -> None:
    scores = [score for one in tried for score in one.scores]
    late = sum(score is None for score in scores)
    if late:
        told = f"{late} of {len(scores)} answers had no score after {seconds:g} s, and a run ends a call only after "
        told += f"reward.timeout={config.timeout:g} seconds"
        findings.warn("reward.slow", f"{told}; where scoring takes that long, leave this out: --no-reward")
    failed = [
        (one.trial, text, score) for one in tried for text, score in zip(one.trial.answers, one.scores, strict=True)
    ]
    failed = [item for item in failed if item[2] is not None and item[2].fault is not None]
    for fault in dict.fromkeys(score.fault for _, _, score in failed):
        same = [item for item in failed if item[2].fault == fault]
        trial, text, score = same[0]
        told = f"{len(same)} of {len(scores)} answers have no score: {score.detail}, first on row {trial.prompt.row} "
        told += f"with the answer {text!r:.60}"
        way_out = f"; what it printed is in {log}" if log.stat().st_size else ""
        findings.warn(f"reward.fault.{fault.partition(':')[0]}", f"{told}{way_out}")


def _compare(source: str, tried: list[Tried], findings: Findings) -> None:
    judged = [one for one in tried if one.right is not None and one.empty is not None]
    if not judged:
        if all(len(one.trial.answers) == 1 for one in tried):
            told = f"{source}: of its ground truth no answer can be made, so only an empty one was tried"
            findings.inform("reward.tried", told)
        return
    low = [one for one in judged if one.right <= one.empty]
    pairs = Counter(f"{one.right:g} against {one.empty:g}" for one in judged)
    values = ", ".join(f"{pair} on {count} row{'s' * (count > 1)}" for pair, count in pairs.items())
    told = f"{source}: the ground truth against an empty answer: {values}"
    if not low:
        findings.inform("reward.tried", told)
        return
    one = low[0]
    more = ", ..." if len(one.trial.answers) > 4 else ""
    told = f"{source}: on {len(low)} of {len(judged)} rows the ground truth gets no more than an empty answer: row "
    told += f"{one.trial.prompt.row}, ground truth {one.trial.prompt.ground_truth!r:.60}, "
    told += f"{one.right:g} against {one.empty:g} (tried as {', '.join(map(repr, one.trial.answers[1:4]))}{more})"
    findings.warn("reward.ground-truth", f"{told}; unless it wants another form, see how it reads answer and truth")
