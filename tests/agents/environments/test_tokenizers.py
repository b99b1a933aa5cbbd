"""Published tokenizers of five families: a dialogue has the ids of its whole text turn by turn, or is rejected."""

import logging
from typing import Any

import pytest
from jinja2 import TemplateError

from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.config.findings import ConfigError
from hybridrl.data.tokenizer import Chat, end_tokens, load_tokenizer, render
from tests.agents.environments.test_dialogue import TOOLS, result, user

Messages = list[dict[str, Any]]
TEMPLATE_LIKE = "<|im_end|>\n<|im_start|>assistant\n<end_of_turn><start_of_turn>model<|eot_id|><\uff5cAssistant\uff5c>"
ASTRONAUT = "\U0001f469\u200d\U0001f680"


def said(content: str, thought: str = "", *words: str) -> dict:
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": "look_up", "arguments": {"word": word}}}
        for n, word in enumerate(words)
    ]
    fields = {"reasoning_content": thought, "tool_calls": calls}
    return {"role": "assistant", "content": content, **{name: value for name, value in fields.items() if value}}


def talk(*contents: str, system: str = "") -> Messages:
    """Contents of the user and the assistant in turn, after one of the system."""
    turns = [said(text) if number % 2 else user(text) for number, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


CALL, LATE = said("", "", "mask"), {"role": "system", "content": "Now."}
DIALOGUES: dict[str, Messages] = {
    "one turn": talk("a", "b"),
    "three turns": talk("a", "b", "c", "d", "e", "f"),
    "system": talk("a", "b", system="Be brief."),
    "system, turns": talk("a", "b", "c", "d", system="Be brief."),
    "system of two lines": talk("a", "b", "c", "d", system="Be\n\nbrief.\n"),
    "emoji": talk(f"{ASTRONAUT}hi{ASTRONAUT}", "\U0001f642", "\U0001f44d\U0001f3fd", ASTRONAUT),
    "space before": talk(" a", " b", "  c", "  d"),
    "space after": talk("a ", "b ", "c  ", "d  "),
    "line break before": talk("\na", "b", "\n\nc", "d"),
    "line break after": talk("a\n", "b\n", "c\n\n", "d\n\n"),
    "only spaces": talk(" ", " ", "\n", "d"),
    "empty": talk("a", "", "c", "d"),
    "carriage returns": talk("a\r\n", "b\r\n", "\r\n\tc", "\td\t"),
    "other scripts": talk("\u6771\u4eac", "\u5927\u962a", "\u3002", "\u3001"),
    "combining marks": talk("e\u0301", "\u0301e", "\u0301", "n\u0303"),
    "digits": talk("12345", "678", "90", "1"),
    "code": talk("```py\nx\n```", "```\ny\n```", "    z", "    w"),
    "JSON": talk('{"a": 1}', '{"b": 2}', "[1]", "[]"),
    "template-like": talk(TEMPLATE_LIKE, "b", TEMPLATE_LIKE, "d"),
    "template-like, system": talk("a", "b", f"c{TEMPLATE_LIKE}d", "d", system=TEMPLATE_LIKE),
    "template-like tags": talk("<think>a</think>", "b", "<tool_response>c</tool_response>", "d"),
    "long": talk("word " * 2000, "b" * 500, "\u20ac " * 300, "d"),
    "thinking": [user("a"), said("b", "why")],
    "thinking dropped": [user("a"), said("b", "why"), user("c"), said("d", "so")],
    "thinking in the text": talk("a", "<think>\nwhy\n</think>\n\nb", "c", "<think>\nso\n</think>\n\nd"),
    "thinking of nothing": talk("a", "<think>\n\n</think>\n\nb", "c", "d"),
    "system later": [*talk("a", "b"), LATE, *talk("c", "d")],
    "user twice": [user("a"), *talk("b", "c")],
    "response twice": [*talk("a", "b"), said("c"), *talk("d", "e")],
    "call": [user("a"), CALL, result("r"), said("b")],
    "call, system": [*talk(system="s"), user("a"), CALL, result("r"), said("b")],
    "two calls": [user("a"), said("", "", "mask", "row"), result("r"), result("q", 1), said("b")],
    "calls in turn": [user("a"), CALL, result("r"), CALL, result("q"), said("b")],
    "call with text": [user("a"), said("Looking.", "", "mask"), result("r"), said("b")],
    "call, user": [user("a"), CALL, result("r"), said("b"), user("c"), said("d")],
    "call, user, call": [user("a"), CALL, result("r"), said("b"), user("c"), CALL, result("q"), said("d")],
    "call, thinking": [user("a"), said("", "t1", "mask"), result("r"), said("b", "t2")],
    "call, thinking dropped": [user("a"), said("", "t1", "mask"), result("r"), said("b", "t2"), user("c"), said("d")],
    "call, template-like": [user("a"), CALL, result(f"{TEMPLATE_LIKE}</tool_response>"), said("b")],
    "call, emoji": [user("a"), said("", "", f"{ASTRONAUT} "), result(f" {ASTRONAUT}\n"), said(ASTRONAUT)],
}
CALLS = [name for name in DIALOGUES if name.startswith(("call", "two calls"))]
NO_CALLS = "leaves out the calls of tools"
ALTERNATE = ("system later", "user twice", "response twice")
REJECTED = {
    "qwen3": {},
    "llama3_1": dict.fromkeys(CALLS, NO_CALLS),
    "deepseek_v3": {**dict.fromkeys(CALLS, NO_CALLS), "system later": "leaves out messages of the role system"},
    "gemma3": dict.fromkeys((*CALLS, *ALTERNATE), "roles must alternate"),
}
ENDS = {"qwen3": "<|im_end|>", "llama3_1": "<|eot_id|>", "gemma3": "<end_of_turn>"}


def turn_by_turn(dialogue: Dialogue, messages: Messages, tools: list, whole: list[int], ends: set[int]) -> list[int]:
    """Return the ids of a conversation whose responses are sampled as they are in the whole text."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    ids = dialogue.start(messages[: turns[0]], tools, trusted=[]).ids
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        end = next(at for at in range(len(ids), len(whole)) if whole[at] in ends)
        sampled, called = whole[len(ids) : end + 1], bool(messages[turn].get("tool_calls"))
        ids = ids + sampled
        if following:
            new = messages[turn + 1 : following]
            delta = dialogue.delta(new, sampled, ended=True, called=called, tools=tools)
            ids = ids[: len(ids) - delta.dropped] + delta.ids
    return ids


@pytest.mark.parametrize("name", REJECTED)
def test_a_dialogue_has_the_ids_of_its_whole_text_turn_by_turn_or_is_rejected_by_name(name, published_tokenizer):
    place = published_tokenizer(name)
    tokenizer = load_tokenizer(place)
    ends = end_tokens(place, tokenizer)
    dialogue = Dialogue(tokenizer, ends)
    assert len(DIALOGUES) == 40 and tokenizer.convert_ids_to_tokens(ends) == [ENDS.get(name, tokenizer.eos_token)]
    for about, messages in DIALOGUES.items():
        tools = TOOLS if about in CALLS else []
        whole = next(render(tokenizer, [Chat(messages, tools)], {}, add_generation_prompt=False))
        if cause := REJECTED[name].get(about):
            with pytest.raises((ConfigError, TemplateError), match=cause):
                raise whole if isinstance(whole, TemplateError) else AssertionError(dialogue.replay(messages, tools))
            continue
        if "template-like" in about:  # which a row may have on purpose, but not an environment
            whole = dialogue.start([*messages, user("more")], tools, trusted=[]).ids
        ids = turn_by_turn(dialogue, messages, tools, whole, {*ends})
        assert ids == whole[: len(ids)], about
        if "template-like" not in about:
            assert not tokenizer.decode(whole[len(ids) :]).strip(), about
            # Qwen's template writes tags of empty reasoning for the last response only.
            assert dialogue.strips_reasoning or dialogue.replay(messages, tools)[0] == ids, about


def test_a_response_that_begins_with_a_line_break_keeps_its_text_where_the_prompt_ends_with_one(published_tokenizer):
    """The whole text has one token for both."""
    tokenizer = load_tokenizer(published_tokenizer("qwen3"), custom_chat_template="chatml")
    messages = talk("a", "\nb", "c", "\n\nd", "e")
    ids, mask = Dialogue(tokenizer, [tokenizer.eos_token_id]).replay(messages)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    sampled = [token for token, one in zip(ids, mask, strict=True) if one]
    assert tokenizer.decode(sampled) == "\nb<|im_end|>\n\nd<|im_end|>"


def test_a_tokenizer_without_a_template_is_rejected_as_one(published_tokenizer):
    tokenizer = load_tokenizer(published_tokenizer("gptoss"))
    with pytest.raises(ConfigError, match=r"the model has none; set actor_rollout_ref.model.custom_chat_template"):
        Dialogue(tokenizer, [tokenizer.eos_token_id])


@pytest.mark.parametrize("name", [*REJECTED, "gptoss"])
def test_no_published_tokenizer_is_warned_about(name, published_tokenizer, tmp_path, caplog, monkeypatch):
    """With a config.json of another family than Mistral's, as saved by a version that wrote none of its own."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).symlink_to(f"{published_tokenizer(name)}/{file}")
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    for library in ("transformers", "hybridrl"):
        monkeypatch.setattr(logging.getLogger(library), "propagate", True)
    tokenizer = load_tokenizer(str(tmp_path))
    assert (
        tokenizer.decode(tokenizer.encode("spaces , and  more .", add_special_tokens=False)) == "spaces , and  more ."
    )
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
