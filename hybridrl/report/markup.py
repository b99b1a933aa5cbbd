"""Parts of a page. Small pieces of HTML: every text from a run is escaped by `text`. And the chosen samples as data for
the page's script: plain JSON, with texts shortened to a budget."""

import base64
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from html import escape
from statistics import fmean, stdev
from typing import Any

from hybridrl.report.samples import Shown, grading_fault, is_number, length_of, scores_of, tokens_of
from hybridrl.tracking.records import SampleRecord, as_text, content_text
from hybridrl.tracking.secrets import mask_text

CONTROLS = {number: chr(0x2400 + number) for number in range(32) if chr(number) not in "\n\t"} | {127: "\u2421"}
# Direction marks, unusual line ends, invisible characters, and surrogates.
INVISIBLE = re.compile("[\u0080-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def text(value: object) -> str:
    """Escape a text, and make invisible and reordering characters visible."""
    visible = INVISIBLE.sub(lambda match: f"\u27e6U+{ord(match[0]):04X}\u27e7", str(value).translate(CONTROLS))
    return escape(visible)


def code(name: str) -> str:
    """A key, a path or a value as code, with line breaks allowed between its words."""
    return f"<code>{re.sub('[./_,=]', lambda match: match[0] + '<wbr>', text(name))}</code>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    """A table of HTML cells; a column with a title that begins with > is aligned to the right."""
    sides = [' class="num"' if column.startswith(">") else "" for column in columns]
    head = "".join(f"<th{side}>{column.lstrip('>')}</th>" for side, column in zip(sides, columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{side}>{cell}</td>" for side, cell in zip(sides, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def command(line: str) -> str:
    """A command with a button that copies it."""
    return f'<div class="command"><code>{text(line)}</code><button class="copy" type="button">Copy</button></div>'


def folded(title: str, inside: str) -> str:
    return f"<details><summary>{title}</summary>{inside}</details>"


def section(name: str, title: str, inside: str, about: str = "") -> str:
    note = f'<p class="about">{about}</p>' if about else ""
    return f'<section id="{name}"><h2>{title}</h2>{note}{inside}</section>'


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


TEXT_BUDGET = 3_000_000  # characters of all samples together
LEAST = 1_500  # shorter texts are never cut
TOKENS, WITH_TOKENS = 1_500, 40  # most tokens per sample; most samples with tokens
TOKEN_KEYS = ("log_probs", "train_log_probs", "entropies", "advantages", "sampled")
OF_SAMPLE, OF_PAGE, PICTURE_BYTES = 4, 40, 1 << 16  # most pictures, and bytes of one
TRUTH, RESULT = 2_000, 4_000  # characters of a ground truth, and of a result of a tool


class SamplePool:
    """The samples of all runs; shared texts are stored once."""

    def __init__(self) -> None:
        self.prompts: dict[str, int] = {}
        self.groups: dict[int, int] = {}  # identity of a group -> its number
        self.group_data: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._held: list[Any] = []  # references to the groups keep their ids unique
        self._with_tokens = 0
        self._pictures: dict[str, str] = {}  # by digest, as data URI

    def add(self, run: int, shown: Iterable[Shown]) -> None:
        self.samples += [self._sample(run, sample) for sample in shown]

    def _sample(self, run: int, shown: Shown) -> dict[str, Any]:
        record, episode = shown.record, shown.record.episode
        tokens = tokens_of(record) if self._with_tokens < WITH_TOKENS else None
        self._with_tokens += tokens is not None
        sample = {
            "run": run,
            "kind": shown.kind,
            "step": record.step,
            "prompt": self.prompts.setdefault(record.prompt, len(self.prompts)),
            "group": self._group(shown),
            "source": as_text(episode.get("data_source", "")),
            "score": finite_number(record.score),
            "advantage": finite_number(shown.advantage),
            "stored": isinstance(episode.get("advantage"), int | float),
            "trained": episode.get("trained") is not False,
            "length": length_of(record),
            "unit": "tokens" if isinstance(episode.get("sampled_tokens"), int) else "characters",
            "stop": as_text(episode.get("stop", "")),
            "fault": grading_fault(record),
            "detail": mask_text(as_text(episode.get("detail", "")))[:TRUTH],
            "row": finite_number(episode.get("row")),
            "number": finite_number(episode.get("sample")),
            "why": shown.why,
            "images": self._images(record),
            "output": record.response,
            "truth": as_text(record.truth)[:TRUTH],
            "teacher": as_text(episode.get("teacher_reads", ""))[:RESULT],
            "parts": {str(name): component_text(value) for name, value in list(record.components.items())[:40]},
            "messages": [message_of(message) for message in listed(episode.get("messages"))],
            "turns": [turn_of(turn) for turn in listed(episode.get("turns"))],
            "tokens": token_data(tokens) if tokens else None,
        }
        return {name: value for name, value in sample.items() if value not in (None, "", [], {})}

    def _images(self, record: SampleRecord) -> list[str]:
        """Return the names of a sample's pictures for which the page has a place."""
        images = [image for image in record.episode.get("images", ()) if image.get("file")]
        files = [record.folder / image["file"] for image in images[:OF_SAMPLE]]
        for path in files:
            if path.stem not in self._pictures and len(self._pictures) < OF_PAGE and path.is_file():
                with suppress(OSError), path.open("rb") as file:
                    data = base64.b64encode(file.read(PICTURE_BYTES)).decode()
                    self._pictures[path.stem] = f"data:image/jpeg;base64,{data}"
        return [path.stem for path in files if path.stem in self._pictures]

    def _group(self, shown: Shown) -> int:
        number = self.groups.get(id(shown.group))
        if number is None:
            number = self.groups[id(shown.group)] = len(self.group_data)
            self._held.append(shown.group)
            scores = scores_of(shown.group)
            self.group_data.append(
                {
                    "size": len(shown.group),
                    "mean": finite_number(fmean(scores)) if scores else None,
                    "deviation": finite_number(stdev(scores)) if len(scores) > 1 else None,
                    "scores": [finite_number(score) for score in scores[:64]],
                }
            )
        return number

    def data(self) -> dict[str, Any]:
        """Return the data, with texts shortened to the budget."""
        texts = [sample["output"] for sample in self.samples if "output" in sample] + list(self.prompts)
        contents = [message for sample in self.samples for message in sample.get("messages", ())]
        texts += [message["text"] for message in contents]
        limit = limit_of([len(text) for text in texts])
        for sample in self.samples:
            if "output" in sample:
                sample["output"] = shortened(sample["output"], limit)
        for message in contents:
            message["text"] = shortened(message["text"], limit)
        prompts = [shortened(text, limit) for text in self.prompts]
        return {"prompts": prompts, "groups": self.group_data, "samples": self.samples, "pictures": self._pictures}


def limit_of(lengths: list[int]) -> int:
    """Return the largest text length with which all texts fit the budget."""
    limit = max(lengths, default=0)
    while limit > LEAST and sum(min(length, limit) for length in lengths) > TEXT_BUDGET:
        limit = int(0.8 * limit)
    return max(limit, LEAST)


def shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    end = limit // 4
    return f"{text[: limit - end]}\n[... {len(text) - limit:,} characters are not in this page ...]\n{text[-end:]}"


def message_of(message: Any) -> dict[str, Any]:
    """Return role, text, reasoning and calls of a message of a conversation."""
    if not isinstance(message, dict):
        return {"role": "", "text": as_text(message)}
    content = message.get("content")
    parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    shown = content_text(content) if parts else as_text("" if content is None else content)
    fields = {"role": as_text(message.get("role", "")), "text": shown}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        fields["reasoning"] = as_text(reasoning)[:RESULT]
    if calls := [_called(call) for call in listed(message.get("tool_calls"))]:
        fields["calls"] = calls
    return fields


def _called(call: Any) -> list[str]:
    inner = call.get("function", call) if isinstance(call, dict) else {}
    inner = inner if isinstance(inner, dict) else {}
    return [as_text(inner.get("name", "")), as_text(inner.get("arguments", ""))[:RESULT]]


def turn_of(turn: Any) -> dict[str, Any]:
    """Return tokens, reward, calls and seconds of a turn."""
    if not isinstance(turn, dict):
        return {}
    calls = [
        {name: as_text(call.get(name, ""))[:RESULT] for name in ("name", "arguments", "result", "outcome")}
        | {"seconds": finite_number(call.get("seconds")), "reward": finite_number(call.get("reward"))}
        for call in listed(turn.get("calls"))
        if isinstance(call, dict)
    ]
    seconds = [finite_number(value) for value in listed(turn.get("seconds"))]
    fields = {name: finite_number(turn.get(name)) for name in ("observed_tokens", "sampled_tokens", "reward")}
    return fields | {"stop": as_text(turn.get("stop") or ""), "calls": calls, "seconds": seconds}


def token_data(tokens: dict[str, Any]) -> dict[str, Any]:
    """Return the lists of the first tokens by name, without lists of another length than the ids."""
    count = len(tokens["ids"])
    texts = tokens.get("texts") if isinstance(tokens.get("texts"), list) else []
    data: dict[str, Any] = {"count": count, "ids": [finite_number(number) for number in tokens["ids"][:TOKENS]]}
    data["texts"] = [as_text(text) for text in texts[:TOKENS]] if len(texts) == count else [""] * len(data["ids"])
    for name in TOKEN_KEYS:
        values = tokens.get(name)
        if isinstance(values, list) and len(values) == count:
            data[name] = [finite_number(value) for value in values[:TOKENS]]
    return data


def component_text(value: Any) -> Any:
    """A reward component: a number unchanged, other values as a short text."""
    if isinstance(value, bool):
        return value
    return finite_number(value) if isinstance(value, int | float) else as_text(value)[:TRUTH]


def finite_number(value: Any) -> float | int | None:
    """A number that JSON and JavaScript can hold, with at most six digits; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_number(value):
        return int(value) if isinstance(value, bool) else None
    return float(f"{value:.6g}") if isinstance(value, float) else value


def listed(value: Any) -> list[Any]:
    return value[:200] if isinstance(value, list) else []
