"""Tries a reward on a few rows of every data source, with correct and with wrong responses.

A run does so before it starts Ray, for a few seconds at most; the doctor allows more time.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.resume import fingerprint
from hybridrl.config.findings import Findings
from hybridrl.config.schema_parts import RewardConfig
from hybridrl.data.prompts import Prompt, PromptDataset, Prompts
from hybridrl.data.tokenizer import ResponseDecoder, as_chat
from hybridrl.required import required
from hybridrl.rewards.load import scorer_of, seconds_between_requests, uses_built_in
from hybridrl.rewards.process import ScorerDied
from hybridrl.rewards.rescoring import Rescorer, response_ids
from hybridrl.rewards.score import Score, ScoringRequest
from hybridrl.runs.settings import reward_code, reward_files
from hybridrl.runs.trials import Subject
from hybridrl.tracking.console import warn
from hybridrl.tracking.faults import count_faults, fault_kind

ROWS, MOST_ROWS = 8, 64  # rows of each data source, and of a dataset with many of them
SEARCHED = 2000  # rows among which they are chosen
SECONDS = 3.0  # limit for the trial before a run
# Formats of a response's result, by the built-in scorer that reads it.
FORMS = {
    "gsm8k": "#### {}",
    "math": r"\boxed{{{}}}",
    "math_dapo": r"Answer: \boxed{{{}}}",
    "geo3k": r"<think></think>\boxed{{{}}}",
    "multiple_choice": r"\boxed{{{}}}",
    "search_qa": "<answer>{}</answer>",
}
# Scorers with a task or tests as ground truth: no response can be made from it.
UNANSWERED = ("code", "countdown")
# A custom function may read any of these.
USUAL = ("{}", FORMS["gsm8k"], FORMS["math_dapo"], FORMS["search_qa"])
EMPTY, TRUTH, AGAIN, OTHER, ECHO, FORMAT, GUESSES, WORD = range(8)
# Responses that should score less than the ground truth on most rows.
WRONG = {
    OTHER: "the ground truth of another row",
    ECHO: "the prompt itself",
    FORMAT: "the format without a result",
    GUESSES: "every digit in the format",
    WORD: "one word 500 times",
}
_TRIED: dict[str, Findings] = {}  # findings of this process's trials without an error, by identity
Datasets = Mapping[str, PromptDataset | Prompts]


@dataclass
class TrialResponse:
    """A text of one of the kinds above, and its score once it is known."""

    kind: int
    text: str
    score: Score | None = None
    tokens: int = 0

    @property
    def value(self) -> float | None:
        return self.score.value if self.score else None


@dataclass
class TrialRow:
    """A row of the dataset that `key` names, with the responses tried on it."""

    key: str
    prompt: Prompt
    responses: list[TrialResponse]

    @property
    def group(self) -> tuple[str, str]:
        """The dataset and data source, by which findings are reported."""
        return self.key, self.prompt.data_source

    def best(self, kind: int) -> float | None:
        """The best score of the responses of a kind; None if there is none."""
        return max((response.value for response in self.of(kind) if response.value is not None), default=None)

    def of(self, kind: int) -> list[TrialResponse]:
        return [response for response in self.responses if response.kind == kind]


def try_reward(subject: Subject, findings: Findings, log: Path, seconds: float) -> int:
    """Load the reward in its own process and report how it scores a few rows of the datasets, for `seconds` at most; 0:
    it is only loaded. Texts are encoded and decoded like a run's responses; without a tokenizer a reward gets texts
    only. Returns the number of responses without a score at the end; raises ConfigError if it does not load."""
    reward, datasets = subject.config.reward, subject.datasets
    sources = {source for data in datasets.values() for source in data.data_sources}
    _report_left_out(subject, findings)
    try:
        # One that is down fails in the trial's time.
        judge = replace(reward.judge, retries=min(reward.judge.retries, 1))
        with Rescorer(replace(reward, num_workers=1, retries=0, judge=judge), sources, log) as rescorer:
            rows = _rows(datasets, reward) if seconds else []
            begun = _score_rows(rescorer, rows, subject.decoder, seconds)
    except ScorerDied as error:
        findings.warn("reward.load", f"{error}, so it was not tried")
        return 0
    planned, groups = Counter(row.group for row in rows), defaultdict[tuple[str, str], list[TrialRow]](list)
    for row in begun:
        groups[row.group].append(row)
    for group, tried in groups.items():
        place, enough = ", ".join(group), len(tried) > 1 or planned[group] == 1
        report_faults(place, tried, log, findings, rejects=enough and reward.on_error != "zero")
        _compare(place, tried, findings)
        _report_wrong(place, [row for row in tried if _learns(row)], findings)
        _report_unstable(place, tried, findings)
        _report_long(place, tried, subject.config.data.max_response_length, findings)
    return sum(response.score is None for row in begun for response in row.responses)


def _rows(datasets: Datasets, reward: RewardConfig) -> list[TrialRow]:
    """Return the rows to try, of all datasets in turn."""
    by_dataset = []
    for key, prompts in datasets.items():
        spread = spread_rows(prompts)
        by_dataset.append([TrialRow(key, prompt, make_responses(prompt, spread, reward)) for prompt in spread])
    return [row for rows in zip_longest(*by_dataset) for row in rows if row]


def _score_rows(
    rescorer: Rescorer, rows: list[TrialRow], decoder: ResponseDecoder | None, seconds: float
) -> list[TrialRow]:
    """Score one row after another, for `seconds` at most; return the rows that were started."""
    begun, end = [], time.monotonic() + seconds
    for row in rows:
        begun.append(row)
        requests = [_request(row.prompt, response, decoder) for response in row.responses]
        try:
            futures = rescorer.submit(requests)
            done, late = wait(futures, max(end - time.monotonic(), 0))
            for response, future in zip(row.responses, futures, strict=True):
                response.score = future.result() if future in done else None
        except Exception:  # the pool has ended, and the run raises the reason when it waits for the pool
            break
        if late or time.monotonic() > end:
            break
    return begun


def _request(prompt: Prompt, response: TrialResponse, decoder: ResponseDecoder | None) -> ScoringRequest:
    """Return the scoring request of a response, and set its text to the one that a run would decode."""
    ids = None
    if decoder is not None:
        ids = response_ids(response.text, decoder.tokenizer)
        response.tokens, response.text = len(ids), decoder(ids)
    truth, extra = prompt.ground_truth, prompt.extra_info
    return ScoringRequest(prompt.data_source, response.text, truth, extra, ids, prompt.messages)


def reject_failing_reward(subject: Subject, log: Path) -> None:
    """Try the reward before anything heavy starts. Prints warnings; raises ConfigError if it does not load, or scores
    no row of a data source. A reward with a limited rate of calls is only loaded. A reward that runs in the driver is
    not called, as nothing could end a call there. The trial of an earlier run in this process is not repeated."""
    reward, tried = subject.config.reward, _identity(subject)
    findings = _TRIED.get(tried)
    if findings is None:
        findings = Findings()
        if reward.num_workers:
            try_reward(subject, findings, log, 0 if seconds_between_requests(reward) else SECONDS)
        else:
            _report_left_out(subject, findings)
        if not findings.errors:
            _TRIED[tried] = findings
    for finding in findings.items:
        if finding.severity == "warning":
            warn(finding.text, finding.code)
    findings.close()


def _identity(subject: Subject) -> str:
    """Return a hash of all inputs of the findings: the reward with its files, the rows, the longest response."""
    reward, longest, decoder = subject.config.reward, subject.config.data.max_response_length, subject.decoder
    rows = {key: (sorted(prompts.data_sources), spread_rows(prompts)) for key, prompts in subject.datasets.items()}
    left_out = decoder and (decoder.tokenizer.name_or_path, decoder.left_out)
    return fingerprint(asdict(reward), reward_code(reward), rows, longest, left_out, default=str)


def spread_rows(prompts: PromptDataset | Prompts) -> list[Prompt]:
    """Select rows of every data source, evenly spaced: first one of each, then a second, and so on."""
    by_source: dict[str, list[int]] = {}
    for index in range(0, len(prompts), -(-len(prompts) // SEARCHED)):
        by_source.setdefault(prompts.without_pixels(index).data_source, []).append(index)
    for index in range(len(prompts)):  # a rare source is not among them
        if len(by_source) >= len(prompts.data_sources):
            break
        by_source.setdefault(prompts.without_pixels(index).data_source, [index])
    share = max(min(ROWS, MOST_ROWS // max(len(by_source), 1)), 1)
    chosen = [indices[:: -(-len(indices) // share)] for indices in by_source.values()]
    return [prompts.without_pixels(index) for group in zip_longest(*chosen) for index in group if index is not None]


def make_responses(prompt: Prompt, rows: Sequence[Prompt], reward: RewardConfig) -> list[TrialResponse]:
    """Make responses with the ground truth in the scorer's format, and wrong ones; `rows` have other truths."""
    scorer = scorer_of(prompt.data_source, reward.name) if uses_built_in(reward) else None
    echo = as_chat(prompt.messages)[-1]["content"]
    responses = [TrialResponse(EMPTY, ""), TrialResponse(ECHO, echo if isinstance(echo, str) else str(echo))]
    responses.append(TrialResponse(WORD, " ".join(["the"] * 500)))
    if scorer in UNANSWERED or prompt.ground_truth is None:
        return responses
    forms = (FORMS[scorer],) if scorer in FORMS else USUAL
    truth = _as_text(prompt.ground_truth, scorer)
    truths = list(dict.fromkeys(form.format(truth) for form in forms))
    responses[1:1] = [*(TrialResponse(TRUTH, text) for text in truths), TrialResponse(AGAIN, truths[0])]
    others = (row.ground_truth for row in rows if row.data_source == prompt.data_source)
    of_source = (_as_text(other, scorer) for other in others if other is not None)
    if (other := next((text for text in of_source if text != truth), None)) is not None:
        responses.append(TrialResponse(OTHER, "\n".join(form.format(other) for form in forms)))
    marked = [form for form in forms if form != "{}"]
    responses.append(TrialResponse(FORMAT, "\n".join(form.format("") for form in marked)))
    guesses = "ABCDEFGHIJ" if scorer == "multiple_choice" else "0123456789"
    responses.append(TrialResponse(GUESSES, "\n".join(" ".join(map(form.format, guesses)) for form in marked)))
    return responses


def _as_text(truth: Any, scorer: str | None) -> str:
    if scorer == "multiple_choice" and isinstance(truth, int):
        truth = chr(ord("A") + truth)
    truth = truth.get("target", truth) if isinstance(truth, dict) else truth
    truth = truth.rpartition("#### ")[2] if scorer == "gsm8k" and isinstance(truth, str) else truth
    return str(truth[0] if isinstance(truth, list) and truth else truth)


# -- findings from the scores ------------------------------------------------------------------------------------------


def _report_left_out(subject: Subject, findings: Findings) -> None:
    """Warn of tokens in a file of the reward or in a ground truth that are left out of every response."""
    decode = subject.decoder
    texts = [(str(file), file.read_text(errors="replace")) for file in reward_files(subject.config.reward)]
    for key, prompts in subject.datasets.items():
        searched = (prompts.without_pixels(index) for index in range(0, len(prompts), 1 + len(prompts) // SEARCHED))
        texts += [(f"{key}, ground truth of row {prompt.row}", str(prompt.ground_truth)) for prompt in searched]
    for name in [decode.tokenizer.decode([token]) for token in decode.left_out] if decode else ():
        places = [place for place, text in texts if name in text]
        if places and any(map(str.isalpha, name)):  # others are in any text, such as a line break
            cause = f"{places[0]}{f' and {len(places) - 1} more' * (len(places) > 1)}: {name} is left out of what a "
            cause += "reward reads, as a token that ends a response, pads it or marks a turn"
            findings.warn("reward.left-out", cause, "do not look for it; use a tag that ends nothing")


def report_faults(place: str, trials: list[TrialRow], log: Path, findings: Findings, *, rejects: bool) -> None:
    """Report on responses without a score. `rejects`: a reward that fails on all of these rows is rejected."""
    tried = [(trial.prompt.row, response) for trial in trials for response in trial.responses if response.score]
    scores = [response.score for _, response in tried]
    rejected = rejects and all(score and score.fault and fault_kind(score.fault).rejects for score in scores)
    for fault, count, first in count_faults(scores):
        (row, response), kind = tried[first], fault_kind(fault)
        detail = f"{kind.sentence}: {required(scores[first]).detail}"
        cause = f"{place}: {count} of {len(scores)} responses have no score: {detail}, first on row {row} "
        fixes = [kind.advice, *["set reward.on_error=zero to score such responses 0"] * rejected]
        fixes += [f"see what it printed in {log}"] if log.is_file() and log.stat().st_size else []
        report, code = findings.error if rejected else findings.warn, fault.partition(":")[0]
        report(f"reward.fault.{code}", f"{cause}with the response {response.text!r:.60}", ", or ".join(fixes))


def _report_unstable(place: str, trials: list[TrialRow], findings: Findings) -> None:
    """Warn of the first row on which the same response has two scores."""
    for trial in trials:
        first, again = trial.of(TRUTH)[:1], trial.best(AGAIN)
        if again is not None and first and first[0].value not in (None, again):
            cause = f"{place}: the same response scored {first[0].value:g} and then {again:g}: row {trial.prompt.row}, "
            fix = "unless it is a model that samples, derive its random numbers from the response"
            findings.warn("reward.not-deterministic", f"{cause}{first[0].text!r:.60}", fix)
            break


def _report_long(place: str, trials: list[TrialRow], limit: int, findings: Findings) -> None:
    """Warn of rows whose ground truth alone is longer than a response may be."""
    key = "data.max_response_length"
    shortest = [(min(response.tokens for response in trial.of(TRUTH)), trial) for trial in trials if trial.of(TRUTH)]
    if long := [(tokens, trial.prompt.row) for tokens, trial in shortest if tokens > limit]:
        tokens, row = max(long)
        cause = f"{place}: the ground truth alone is longer on {len(long)} of {len(shortest)} rows: {tokens} tokens on "
        findings.warn("reward.truth-length", f"{cause}row {row}", f"set {key}={2 * tokens}", keys=key, value=limit)


def _learns(trial: TrialRow) -> bool:
    """Whether the ground truth scores more than an empty response."""
    right, empty = trial.best(TRUTH), trial.best(EMPTY)
    return right is not None and empty is not None and right > empty


def _compare(place: str, trials: list[TrialRow], findings: Findings) -> None:
    """Compare the ground truth with an empty response."""
    comparable = [trial for trial in trials if trial.best(TRUTH) is not None and trial.best(EMPTY) is not None]
    low = [trial for trial in comparable if not _learns(trial)]
    pairs = Counter(f"{trial.best(TRUTH):g} against {trial.best(EMPTY):g}" for trial in comparable)
    if low:
        trial = low[0]
        truths, truth = trial.of(TRUTH), trial.prompt.ground_truth
        cause = f"{place}: on {len(low)} of {len(comparable)} rows the ground truth scores no more than an empty "
        cause += f"response: row {trial.prompt.row}, ground truth {truth!r:.60}, {trial.best(TRUTH):g} against "
        cause += f"{trial.best(EMPTY):g} (tried as {', '.join(repr(response.text) for response in truths[:3])}"
        fix = "unless it expects another form, check how it reads response and truth"
        findings.warn("reward.ground-truth", cause + (", ...)" if len(truths) > 3 else ")"), fix)
    elif comparable:
        values = ", ".join(f"{pair} on {count} row{'s' * (count > 1)}" for pair, count in pairs.items())
        findings.info("reward.tried", f"{place}: the ground truth against an empty response: {values}")
    elif not any(trial.of(TRUTH) for trial in trials):
        cause = f"{place}: no response can be made from its ground truth, so only wrong ones were tried"
        findings.info("reward.tried", cause)


def _report_wrong(place: str, trials: list[TrialRow], findings: Findings) -> None:
    """Warn of wrong responses that score as much as the ground truth on most rows."""
    fooled = []
    for kind, name in WRONG.items():
        rows = [trial for trial in trials if (value := trial.best(kind)) is not None and value >= trial.best(TRUTH)]
        # One guess is right if all rows have the same result.
        different = kind != GUESSES or len({str(trial.prompt.ground_truth) for trial in rows}) > 1
        if 2 * len(rows) > len(trials) and different:
            fooled.append(f"{name} ({len(rows)} of {len(trials)} rows, first row {rows[0].prompt.row})")
    if fooled:
        cause = f"{place}: as much as for the ground truth is given for {', '.join(fooled)}"
        fix = "compare the response's final result with the truth: training finds the shortest way to a score"
        findings.warn("reward.satisfied", cause, fix)
