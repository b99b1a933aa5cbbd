"""The judge's reward: fills a template with a row and a response, and reads the score from the judge's text.

It is loaded with `reward.judge.base_url` only. A response without a verdict is a fault, never a score.
"""

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hybridrl.config.findings import nearest
from hybridrl.config.judge import BEGIN, END, FIELD, PAIR, JudgeConfig, template_parts
from hybridrl.rewards.judge_client import SHOWN, CallFailed, JudgeClient
from hybridrl.rewards.score import WRITTEN, NoScore

# The replacement has characters that no marker has: what it leaves cannot join to another marker.
_MARKER, _REMOVED = re.compile(r"<<<\s*RESPONSE|RESPONSE\s*>>>", re.IGNORECASE), "[...]"
_WINS = {"a": 1.0, "b": 0.0, "tie": 0.5}  # the wins of the response that is shown first
_KEPT = 20_000  # characters of the judge's text that are kept with a sample


class Judge:
    """The reward function `judge`: a coroutine function, so that many calls of a process run at the same time."""

    def __init__(self, config: JudgeConfig, **limits: Any) -> None:
        self._parse, (self._least, self._most) = re.compile(config.verdict), config.scale
        self._pairs, self._compares = config.pairs, config.compares
        self._parts, self._client = template_parts(config.template), JudgeClient(config, self._score, **limits)
        self._per_criterion = "criterion" in FIELD.findall(" ".join(self._parts))

    async def __call__(
        self, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], prompt: Any
    ) -> dict[str, Any]:
        """Return the score from 0 to 1, the judge's text and its calls; NoScore if there is no verdict."""
        fields = extra_info | {"ground_truth": ground_truth, "response": _marked(solution_str, extra_info)}
        fields |= {"least": f"{self._least:g}", "most": f"{self._most:g}"}
        fields |= {} if prompt is None else {"prompt": _prompt_text(prompt)}
        calls: list[dict[str, Any]] = []
        try:
            if self._per_criterion:
                score, text = await self._by_criteria(_criteria(extra_info.get("rubric")), fields, calls)
            else:
                score, text = await self._verdict(fields, calls)
        except CallFailed as failure:  # equal responses share it
            raise failure.after(calls) from None
        return {"score": score, "text": text[-_KEPT:], "calls": calls}

    async def compare(
        self, solution_strs: Sequence[str], extra_infos: Sequence[dict[str, Any]], prompts: Sequence[Any]
    ) -> list[dict[str, Any] | NoScore]:
        """Return the share of comparisons that each response to a prompt wins, and the judge's texts. Each pair is
        shown in both orders, as judges prefer the first or the second; a tie is half a win. A pair with a failed call
        is left out, and a response without any pair has no score."""
        shown = list(map(_marked, solution_strs, extra_infos))
        fields = extra_infos[0] | ({} if prompts[0] is None else {"prompt": _prompt_text(prompts[0])})
        orders = [
            order
            for i, j in compared_pairs(shown, self._pairs, str(fields.get("prompt")))
            for order in ((i, j), (j, i))
        ]
        calls: list[list[dict[str, Any]]] = [[] for _ in shown]  # by the response that is shown first
        asked = [
            self._verdict(fields | dict(zip(PAIR, (shown[i], shown[j]), strict=True)), calls[i]) for i, j in orders
        ]
        verdicts = await asyncio.gather(*asked, return_exceptions=True)
        won: list[list[tuple[float, str]]] = [[] for _ in shown]
        failed: list[CallFailed | None] = [None] * len(shown)
        for number in range(0, len(orders), 2):
            both, (i, j) = verdicts[number : number + 2], orders[number]
            errors = [verdict for verdict in both if isinstance(verdict, BaseException)]
            for error in errors:
                if not isinstance(error, CallFailed):
                    raise error
                failed[i] = failed[j] = error
            if not errors:
                (of_i, text), (of_j, other) = both
                won[i] += [(of_i, text), (1 - of_j, other)]
                won[j] += [(1 - of_i, text), (of_j, other)]
        return list(map(_share, won, failed, calls))

    async def _by_criteria(
        self, criteria: Sequence[tuple[str, float]], fields: dict[str, Any], calls: list[dict[str, Any]]
    ) -> tuple[float, str]:
        """Return the weighted share of criteria that are met, and the texts; CallFailed if one has no verdict."""
        asked = [self._verdict(fields | {"criterion": name}, calls) for name, _ in criteria]
        verdicts = await asyncio.gather(*asked, return_exceptions=True)  # each is kept, though another fails
        judged = []
        for (name, weight), verdict in zip(criteria, verdicts, strict=True):
            if isinstance(verdict, BaseException):
                raise verdict
            judged.append((name, weight, *verdict))
        total = math.fsum(weight for _, weight, *_ in judged if weight > 0)
        reached = math.fsum(weight * score for _, weight, score, _ in judged)
        text = "\n\n".join(f"{name}: {text}" for name, _, _, text in judged)
        return min(max(reached / total, 0.0), 1.0), text

    async def _verdict(self, fields: Mapping[str, Any], calls: list[dict[str, Any]]) -> tuple[float, str]:
        roles = ("system", "user")[-len(self._parts) :]
        pairs = zip(roles, self._parts, strict=True)
        return await self._client.ask([{"role": role, "content": _filled(part, fields)} for role, part in pairs], calls)

    def _score(self, text: str) -> float:
        """Return the last verdict of a text, from 0 to 1."""
        verdicts = self._parse.findall(text.rpartition("</think>")[2])
        if not verdicts:
            cause = f"reward.judge.parse finds no verdict in the judge's text, which ends with {text[-SHOWN:]!r}"
            raise CallFailed("unparsed", cause)
        verdict = verdicts[-1].strip()
        if self._compares:
            if verdict.lower() in _WINS:
                return _WINS[verdict.lower()]
            raise CallFailed("unparsed", f"the verdict {verdict[:SHOWN]!r} is neither A, B nor tie")
        if verdict.lower() in ("yes", "no"):
            return float(verdict.lower() == "yes")
        with suppress(ValueError):
            if self._least <= (number := float(verdict)) <= self._most:
                return (number - self._least) / (self._most - self._least)
        scale = f"a number from {self._least:g} to {self._most:g} (reward.judge.scale)"
        raise CallFailed("unparsed", f"the verdict {verdict[:SHOWN]!r} is neither yes, no nor {scale}")


def compared_pairs(responses: Sequence[str], pairs: int, prompt: str) -> list[tuple[int, int]]:
    """Return the pairs of responses to compare, by number: each with at least `pairs` others, or with all. They are
    neighbours in a circle, whose order depends on the texts and the prompt alone."""
    count = len(responses)
    circle = sorted(range(count), key=lambda at: hashlib.sha256(f"{prompt} {at} {responses[at]}".encode()).digest())
    reach = min((pairs + 1) // 2, count // 2)
    steps = [(circle[at], circle[(at + by) % count]) for by in range(1, reach + 1) for at in range(count)]
    return sorted({(min(pair), max(pair)) for pair in steps})


def _share(
    wins: Sequence[tuple[float, str]], failed: CallFailed | None, calls: list[dict[str, Any]]
) -> dict[str, Any] | NoScore:
    """Return a response's share of wins; the failure if none of its comparisons has a verdict. One that is alone with
    its prompt is worth as much as itself."""
    if not wins:
        return failed.after(calls) if failed else {"score": 0.5}
    text = "\n\n".join(text for _, text in wins)
    return {"score": math.fsum(win for win, _ in wins) / len(wins), "text": text[-_KEPT:], "calls": calls}


def _marked(solution: str, extra_info: Mapping[str, Any]) -> str:
    """Return a response between its markers, which are removed from it."""
    return f"{BEGIN}\n{_MARKER.sub(_REMOVED, extra_info.get(WRITTEN, solution))}\n{END}"


def _filled(part: str, fields: Mapping[str, Any]) -> str:
    """Replace each {{field}} once: what is inserted is not read as a template."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            hint = "".join(f"; did you mean {name}?" for name in nearest(match[1], [*fields], count=1))
            cause = f"the row has no field {match[1]} of reward.judge.template; it has {', '.join(fields)}{hint}"
            raise CallFailed("field", cause)
        return _as_text(fields[match[1]])

    return FIELD.sub(value, part)


def _prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as text: a single message without its role."""
    if isinstance(prompt, str):
        return prompt
    messages = [(message.get("role"), _as_text(message.get("content"))) for message in prompt]
    return messages[0][1] if len(messages) == 1 else "\n\n".join(f"{role}: {text}" for role, text in messages)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _criteria(rubric: Any) -> list[tuple[str, float]]:
    """Return the criteria of a row with their weights; CallFailed if these are not a rubric."""
    with suppress(ValueError, TypeError, LookupError, AttributeError):
        rubric = json.loads(rubric) if isinstance(rubric, str) else rubric
        criteria = [(str(each["criterion"]), float(each.get("weight", 1.0))) for each in rubric]
        if any(weight > 0 for _, weight in criteria) and all(math.isfinite(weight) for _, weight in criteria):
            return criteria
    cause = f"extra_info.rubric is not a list of {{criterion, weight}} with a weight above 0, but {rubric!r:.{SHOWN}}"
    raise CallFailed("rubric", cause)
