"""Conversations of several turns as token ids: what was sampled is never encoded again.

Each message after a response is rendered behind a stand-in for that response, and what the chat template writes from
the end of the stand-in is encoded alone. This is exact for any template, without a rule per family of models.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridrl.agents.environments import Message, Schema
from hybridrl.agents.environments.template import CONTENT, KEY, RESPONSE, TOOL, ChatTemplate, response, user, with_calls
from hybridrl.config.findings import ConfigError
from hybridrl.core.carried import Encoded
from hybridrl.data.template_arguments import row_arguments

# What the templates of reasoning models read.
REASONING = ("reasoning_content", "reasoning", "thinking")
STRIPS = (
    "the chat template drops the reasoning of earlier responses after a new user message, but rows keep it "
    "(actor_rollout_ref.rollout.multi_turn.history_reasoning=keep): a deployed model would see other contexts than in "
    "training; set it to strip to start a row at each user message"
)

LONG = 50_000  # characters, of which a tokenizer takes a tenth of a second

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delta(Encoded):
    """The growth of a context after the sampled ids: `ids` are observed (mask 0) and include the generation prompt.

    `dropped` (0 or 1) trailing sampled ids leave the row, because the template has another end token in their place.
    """

    dropped: int = 0


@dataclass(frozen=True)
class _StandIn:
    """A history that ends in a response with RESPONSE, and the token with which the template ends it, "" if none."""

    opening: Sequence[Message]
    respond: Callable[[Sequence[Message]], Message]
    end: str


class Dialogue:
    """A model's chat template as token ids: how a conversation starts, and what each later message adds.

    `end_ids` are the tokens that end a response, `arguments` those of the template. `stop_ids` are further tokens that
    must stop generation where tools are used. `strips_reasoning` says whether the template drops the reasoning of
    earlier responses after a new user message. Messages of tools should have `name` and `tool_call_id`, which some
    templates write. Raises ConfigError where the template cannot render what it is given.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Collection[int],
        *,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        history_reasoning: str = "keep",
    ) -> None:
        self.history_reasoning = history_reasoning
        self.tokenizer, self._template = tokenizer, ChatTemplate(tokenizer, arguments)
        self._end_ids = end_ids
        added = tokenizer.added_tokens_decoder
        self._ends = [added[i].content if i in added else tokenizer.decode([i]) for i in sorted(end_ids)]
        self._encoded_start = lru_cache(maxsize=64)(self._template.encode)  # of the samples of a prompt, unless long
        self._others = lru_cache(maxsize=8)(self._with_arguments)
        self._stand_ins: dict[tuple[int, bool, str], _StandIn] = {}
        self.stop_ids = self._find_stop_ids(end_ids)
        self.strips_reasoning = self._drops_reasoning()

    def with_arguments(self, arguments: Mapping[str, Any]) -> "Dialogue":
        """Return the dialogue with these arguments of the template too; ConfigError if it does not read them."""
        if unread := sorted(arguments.keys() - self._template.reads(arguments)):
            raise ConfigError(f"the chat template does not read {', '.join(unread)}", fix="leave it out")
        return self._others(tuple(sorted(arguments.items())))

    def of_row(self, row: Mapping[str, Any]) -> "Dialogue":
        """Return the dialogue with the arguments that a row has and the template reads."""
        own = row_arguments(row, None)
        return self.with_arguments(own) if own and self._template.reads(own) else self

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the template."""
        return self._template.arguments

    def _with_arguments(self, arguments: tuple[tuple[str, Any], ...]) -> "Dialogue":
        options = {"arguments": {**self._template.arguments, **dict(arguments)}}
        return Dialogue(self.tokenizer, self._end_ids, **options, history_reasoning=self.history_reasoning)

    def start(
        self, messages: Sequence[Message], tools: Sequence[Schema] = (), *, trusted: Sequence[Message] | None = None
    ) -> Encoded:
        """Return the ids of a conversation's first messages, with the generation prompt.

        Text of special tokens in a message becomes those tokens in `trusted` messages only, by default all: a row may
        hold it on purpose, a message that an environment adds may not.
        """
        safe = [m if trusted is None or m in trusted else self._template.plain(m) for m in messages]
        text = self._template.text(safe, tools, prompt=True)
        return Encoded([*(self._template.encode if len(text) > LONG else self._encoded_start)(text)])

    def delta(
        self,
        messages: Sequence[Message],
        sampled: Sequence[int],
        *,
        ended: bool,
        called: bool,
        tools: Sequence[Schema] = (),
    ) -> Delta:
        """Return what new messages of users, tools or the system add behind the `sampled` ids of the last response.

        `ended` says whether these end with an end token, `called` whether the response has tool calls.
        """
        new = [self._template.plain(message) for message in messages]
        results = sum(message["role"] == "tool" for message in new)
        stand_in = self._stand_in(max(results, called), bool(tools), new[0]["role"] if new else "user")
        history = [*stand_in.opening, stand_in.respond(new), *new]
        added = self._template.text(history, [TOOL] if tools else [], prompt=True).partition(RESPONSE)[2]
        at = added.find(stand_in.end)
        if at < 0:
            cause = f"the chat template writes no {stand_in.end} before these messages, as it does before others"
            raise ConfigError(cause, fix=f"set {KEY}")
        ids = self._template.encode(added[at:])
        if not ended or not stand_in.end:
            return Delta(ids)
        # A response that is nothing but another end token stays: without it there is no token that its turn trains.
        return Delta(ids[1:]) if ids[0] == sampled[-1] else Delta(ids, dropped=int(len(sampled) > 1))

    def exceeds(self, messages: Sequence[Message], limit: int) -> bool:
        """Whether these messages have more tokens than `limit` by their length alone, whatever they are: none is longer
        than the longest of the vocabulary, once normalization has made at most two characters one byte."""
        size = characters([message.get("content") for message in messages if message["role"] != "assistant"])
        return size > LONG and size > 2 * limit * self._longest

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))

    def check(self, mode: str = "strict", *, tools: bool = True) -> list[str]:
        """Return the differences between two replayed conversations, one of them with `tools`, and the template's text.

        Reasoning that the template drops from earlier turns is none. `mode` is that of
        multi_turn.tokenization_sanity_check_mode: strict, ignore_strippable (white space is ignored) or disable.
        """
        if self.strips_reasoning and self.history_reasoning == "keep":
            logger.warning(STRIPS, extra={"code": "history-reasoning"})
        conversations = {"users": USERS} | ({"tools": TOOLS} if tools else {})
        differences = [self._difference(*item, mode) for item in conversations.items() if mode != "disable"]
        return [difference for difference in differences if difference]

    def written_call(self) -> str:
        """Return what the template writes for a call of TOOL with the argument RESPONSE; "" if it writes no calls."""
        conversation = [user("question"), with_calls(1, [])]
        try:
            written = self.tokenizer.decode(self._as_sampled(conversation, [TOOL])[0])
        except ConfigError:
            return ""
        return written if RESPONSE in written else ""

    def replay(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[list[int], list[int]]:
        """Return ids and mask of a conversation whose responses are taken as sampled, as the template writes them, with
        `arguments` of its own."""
        if arguments:
            return self.with_arguments(arguments).replay(messages, tools)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        ids = self.start(messages[: turns[0]], tools).ids
        mask = [0] * len(ids)
        for index, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            sampled, ended = self._as_sampled(messages[: index + 1], tools)
            called, new = bool(messages[index].get("tool_calls")), messages[index + 1 : following]
            follows = following < len(messages) or new  # also another response
            delta = self.delta(new, sampled, ended=ended, called=called, tools=tools) if follows else Delta([])
            sampled = sampled[: len(sampled) - delta.dropped]
            ids += sampled + delta.ids
            mask += [1] * len(sampled) + [0] * len(delta.ids)
        return ids, mask

    def _as_sampled(self, messages: Sequence[Message], tools: Sequence[Schema]) -> tuple[list[int], bool]:
        """Return the ids of the last message as a response to the others, and whether an end token ends it."""
        *history, last = *map(_without_reasoning, messages[:-1]), messages[-1]
        prompt, text = self._template.text(history, tools, prompt=True), self._template.text([*history, last], tools)
        if not text.startswith(prompt):  # a generation prompt for responses without reasoning
            text = self._template.text([*history, _without_reasoning(last)], tools)
        shared = _common(prompt, text)
        stops = [*self._ends, *self.tokenizer.convert_ids_to_tokens(list(self.stop_ids))]
        end = min((at + len(stop) for stop in stops if (at := text.find(stop, shared)) >= 0), default=0)
        context, ids = self._template.encode(prompt), self._template.encode(text[: end or None])
        if shared == len(prompt) and ids[: len(context)] != context:  # a token across both, which is never sampled
            return self._template.encode(text[shared : end or None]), end > 0
        return ids[_common(context, ids) :], end > 0

    def _compared(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Return the text of a replayed conversation, and the template's."""
        tools = [TOOL] if messages is TOOLS else []
        ids = [
            self.replay(messages, tools)[0],
            self._template.encode(self._template.text(messages, tools, prompt=True)),
        ]
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        row, text = (self.tokenizer.decode(sequence, **options) for sequence in ids)
        return row, text

    def _difference(self, name: str, messages: Sequence[Message], mode: str) -> str:
        try:
            row, text = self._compared(messages)
        except ConfigError as error:
            return f"{name}: {error}"
        place = _first_difference(row, text, but_reasoning=self.strips_reasoning)
        same = "".join(row.split()) == "".join(text.split()) if mode == "ignore_strippable" else False
        if place is None or same:
            return ""
        row, text = (repr(string[max(at - 20, 0) : at + 20]) for string, at in zip((row, text), place, strict=True))
        return f"{name}: the row has {row} where the chat template writes {text}"

    def _stand_in(self, calls: int, tools: bool, role: str) -> _StandIn:
        """Return the history for messages that begin with one of this role, after a response with that many calls."""
        key = (calls, tools, role)
        if key not in self._stand_ins:
            self._stand_ins[key] = self._find_stand_in(*key)
        return self._stand_ins[key]

    def _find_stand_in(self, calls: int, tools: bool, role: str) -> _StandIn:
        error = left_out = ConfigError(f"the chat template leaves out messages of the role {role}", fix=f"set {KEY}")
        probe = {"role": role, "content": CONTENT} | ({"name": "lookup", "tool_call_id": "call00000"} if calls else {})
        forms = [partial(with_calls, count) for count in dict.fromkeys([calls, 1])]
        for respond in [*forms, response] if calls else [response]:
            for opening in ([{"role": "system", "content": "system"}, user("question")], [user("question")]):
                history = [*opening, respond([probe])]
                try:
                    text = self._template.text([*history, probe], [TOOL] if tools else [], prompt=True)
                    alone = self._template.text(history, [TOOL] if tools else [])
                except ConfigError as rejected:
                    error = rejected
                    continue
                before, there, _ = text.partition(RESPONSE)[2].partition(CONTENT)
                end = self._end_of_turn(before, alone.partition(RESPONSE)[2], called=respond is not response)
                if there and (end or respond is response):
                    return _StandIn(opening, respond, end)
                error = left_out
        raise error

    def _end_of_turn(self, before: str, alone: str, *, called: bool) -> str:
        """Return the token that ends a response, given what the template writes `before` the next message's content and
        what it writes if no message follows."""
        if ends := {before.find(end): end for end in self._ends if end in before}:
            return ends[min(ends)]
        # A token that opens the results of tools, and that the model writes itself to wait for them.
        common = before[: _common(before, alone)].rstrip()
        if last := [match[1] for match in self._template.reserved.finditer(common) if match.end(1) == len(common)]:
            return last[-1]
        first = None if called else self._template.reserved.match(before.lstrip())
        return first[1] if first else ""

    def _find_stop_ids(self, end_ids: Collection[int]) -> tuple[int, ...]:
        try:
            end = self._stand_in(1, True, "tool").end
        except ConfigError:  # the template knows no tools
            return ()
        ids = self._template.encode(end)
        return tuple(ids) if len(ids) == 1 and ids[0] not in end_ids else ()

    def _drops_reasoning(self) -> bool:
        inline = response([]) | {"content": f"<think>\n{RESPONSE}\n</think>\n\nanswer"}
        try:
            if RESPONSE not in self._template.text([user("question"), inline, user("more")]):
                return True
            replays = (self._compared(messages) for messages in (USERS, TOOLS))
            return any(r != text and _first_difference(r, text, but_reasoning=True) is None for r, text in replays)
        except ConfigError:
            return False


def characters(value: Any) -> int:
    """Return the length of all texts in a message or a part of it."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        len(value.strip()) if isinstance(value, str) else sum(map(characters, value)) if isinstance(value, list) else 0
    )


def _turn(number: int, *, call: bool = False) -> Message:
    """Return a response with reasoning, in every field that templates read it from."""
    message = {"role": "assistant", "content": "" if call else f"answer{number}"}
    calls = with_calls(1, [])["tool_calls"] if call else None
    return message | dict.fromkeys(REASONING, f"thought{number}") | ({"tool_calls": calls} if call else {})


def _without_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in REASONING}


def _result(number: int) -> Message:
    return {"role": "tool", "content": f"result{number}", "name": "lookup", "tool_call_id": "call00000"}


USERS = [user("question1"), _turn(1), user("question2"), _turn(2), user("question3")]
TOOLS = [
    user("question1"),
    _turn(1, call=True),
    _result(1),
    _turn(2, call=True),
    _result(2),
    _turn(3),
    user("question4"),
]
WORDS = re.compile(r"((?:question|answer|result)\d|" + RESPONSE + ")")


def _first_difference(row: str, text: str, *, but_reasoning: bool) -> tuple[int, int] | None:
    """Return the places in row and text at which they differ first, or None if they do not.

    With `but_reasoning` the text may lack reasoning of earlier turns, and tags of an empty one: one part between two
    contents.
    """
    row_at = text_at = 0
    for word, other in zip_longest(WORDS.split(row), WORDS.split(text), fillvalue=""):
        removed = _removed(word, other) if but_reasoning else ""
        if word != other and "thought" not in removed and "think" not in removed:
            shared = _common(word, other)
            return row_at + shared, text_at + shared
        row_at, text_at = row_at + len(word), text_at + len(other)
    return None


def _common(first: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items both begin with."""
    pairs = enumerate(zip(first, other, strict=False))
    return next((at for at, (item, twin) in pairs if item != twin), min(len(first), len(other)))


def _removed(long: str, short: str) -> str:
    """Return the one part that `long` has more than `short`; "" if they differ otherwise."""
    start, added = _common(long, short), len(long) - len(short)
    return long[start : start + added] if added > 0 and long[:start] + long[start + added :] == short else ""
