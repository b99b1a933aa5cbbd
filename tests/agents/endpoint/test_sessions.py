"""Recorded conversations: what a request continues token by token, what forks, and the rows that are trained on."""

from dataclasses import replace

import numpy as np
import pytest
from fastapi import HTTPException

from hybridrl.agents.endpoint.messages import as_rendered
from hybridrl.agents.endpoint.sessions import Session
from hybridrl.core.carried import Encoded
from tests.agents.endpoint.conftest import completion_of

QUESTION = {"role": "user", "content": "Guess."}
MORE = {"role": "user", "content": "More."}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "look", "arguments": {"x": 1, "y": [2]}}</tool_call>'


def say(session: Session, messages, text: str, *, tools=(), message=None, called=False):
    """Sample a text for these messages, as the endpoint does; returns the turn and its message."""
    prompt = session.prompt_for(as_rendered(messages), tools)
    message = message or {"role": "assistant", "content": text}
    completion = completion_of(session.kit.tokenizer, text)
    return session.record(prompt, completion, message, called=called), message


def calling(arguments: str, **more):
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


@pytest.fixture
def session(kit_of) -> Session:
    return Session(kit_of())


def test_a_conversation_continues_the_ids_that_were_sampled(session, tokenizer):
    first, message = say(session, [QUESTION], "7")
    prompt = session.prompt_for(as_rendered([QUESTION, message, MORE]))
    assert prompt.ids[: len(first.ids())] == first.ids() and prompt.parent is first
    assert tokenizer.decode(prompt.observed.ids) == "\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n"


def test_sampled_ids_stay_although_the_text_would_be_encoded_otherwise(session):
    prompt = session.prompt_for(as_rendered([QUESTION]))
    completion = completion_of(session.kit.tokenizer, "7<|im_start|>")  # a special token, which no text becomes
    turn = session.record(prompt, completion, {"role": "assistant", "content": "7<|im_start|>"})
    following = session.prompt_for(as_rendered([QUESTION, turn.messages[-1], MORE]))
    assert following.ids[len(prompt.ids) :][: len(completion.token_ids)] == completion.token_ids.tolist()


@pytest.mark.parametrize(
    "replayed",
    [
        calling('{"y": [2], "x": 1}'),
        calling('{"x": 1, "y": [2]}', content=None, refusal=None, annotations=[], audio=None),
        calling('{ "x":1,"y":[2] }', content=[]),
        calling('{"x": 1, "y": [2]}', reasoning_content="I could look."),
    ],
    ids=["reordered keys", "null fields", "spaces", "another reasoning"],
)
def test_a_call_in_another_form_is_the_call_that_was_sampled(session, replayed):
    sampled = calling('{"x": 1, "y": [2]}')
    first, _ = say(session, [QUESTION], CALL, tools=[TOOL], message=sampled, called=True)
    result = {"role": "tool", "content": "found", "tool_call_id": "call00000"}
    prompt = session.prompt_for(as_rendered([QUESTION, replayed, result]), [TOOL])
    assert prompt.parent is first and session.forks == 0


def test_dropped_reasoning_matches_and_our_ids_keep_it(session, tokenizer):
    message = {"role": "assistant", "content": "7", "reasoning_content": "hm"}
    first, _ = say(session, [QUESTION], "<think>\nhm\n</think>\n\n7", message=message)
    for content in ("7", "<think>\nhm\n</think>\n\n7", [{"type": "text", "text": "7"}]):
        prompt = session.prompt_for(as_rendered([QUESTION, {"role": "assistant", "content": content}, MORE]))
        assert prompt.parent is first and "hm" in tokenizer.decode(prompt.ids)


@pytest.mark.parametrize("changed", [{"role": "assistant", "content": "8"}, calling("{}")])
def test_a_changed_response_is_rendered_as_a_new_conversation_and_counted(session, tokenizer, changed):
    say(session, [QUESTION], "7")
    prompt = session.prompt_for(as_rendered([QUESTION, changed, MORE]))
    assert prompt.parent is None and session.forks == 1
    assert tokenizer.decode(prompt.ids).endswith("More.<|im_end|>\n<|im_start|>assistant\n")


def test_a_changed_response_after_one_that_is_recorded_is_rendered_as_well(session):
    _, first = say(session, [QUESTION], "7")
    say(session, [QUESTION, first, MORE], "8")
    changed = {"role": "assistant", "content": "9"}
    prompt = session.prompt_for(as_rendered([QUESTION, first, MORE, changed, MORE]))
    assert prompt.parent is None and session.forks == 1


def test_other_tools_are_another_prompt_and_fork(session):
    _, message = say(session, [QUESTION], "7")
    assert session.prompt_for(as_rendered([QUESTION, message, MORE]), [TOOL]).parent is None
    assert session.forks == 1


def test_the_row_of_an_unbranched_session_is_its_conversation(session, tokenizer):
    _, first = say(session, [QUESTION], "7")
    say(session, [QUESTION, first, MORE], "8")
    (row,) = session.trajectory().rows()
    start = "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(row.prompt_ids) == start
    assert tokenizer.decode(row.response_ids[row.mask]) == "7<|im_end|>8<|im_end|>"
    sampled = [completion_of(tokenizer, text).log_probs for text in "78"]
    assert [*row.log_probs[row.mask]] == [*sampled[0], *sampled[1]]
    assert not row.log_probs[~row.mask].any()


def test_a_row_has_the_experts_of_its_last_turn(session, tokenizer):
    messages = [QUESTION]
    for text, number in (("7", 1), ("8", 2)):
        prompt = session.prompt_for(as_rendered(messages))
        response = completion_of(tokenizer, text)
        routes = np.full((len(prompt.ids) + len(response.token_ids) - 1, 2, 4), number, np.int16)
        said = {"role": "assistant", "content": text}
        session.record(prompt, replace(response, carried={"routes": routes}), said)
        messages += [said, MORE]
    (row,) = session.trajectory().rows()
    routes = row.carried["routes"]
    assert routes.shape == (len(row.prompt_ids) + len(row.response_ids), 2, 4)
    assert (routes[:-1] == 2).all() and (routes[-1] == -1).all()


def test_branches_are_rows_and_each_turn_is_trained_on_once(session, tokenizer):
    _, first = say(session, [QUESTION], "7")
    _, left = say(session, [QUESTION, first, MORE], "left")
    say(session, [QUESTION, first, {"role": "user", "content": "Or?"}], "right")
    say(session, [QUESTION, first, MORE, left, MORE], "end")
    rows = session.trajectory().rows()
    trained = [tokenizer.decode(row.response_ids[row.mask]) for row in rows]
    assert trained == ["7<|im_end|>right<|im_end|>", "left<|im_end|>end<|im_end|>"]
    assert tokenizer.decode(rows[1].prompt_ids).count("7<|im_end|>") == 1  # context there


def test_rewards_are_discounted_by_the_turns_before_them(session):
    first, message = say(session, [QUESTION], "7")
    say(session, [QUESTION, message, MORE], "8")
    session.set_reward(0.25, first.id)
    session.set_reward(1.0)
    assert session.trajectory().reward == 1.25
    trajectory = session.trajectory(turn_discount=0.5)
    assert trajectory.reward == 0.75 and [turn.reward for turn in trajectory.turns] == [0.25, 0.5]
    (row,) = trajectory.rows()
    assert [*row.rewards[row.rewards != 0]] == [0.25, 0.5] and row.rewards[-1] == 0.5


def test_a_session_without_a_reward_has_none(session):
    say(session, [QUESTION], "7")
    assert session.trajectory().reward is None


def test_an_end_token_that_the_template_replaces_leaves_the_row(session, tokenizer):
    """The last token of a response is another one where the next message begins."""
    first, message = say(session, [QUESTION], "7")
    prompt = session.prompt_for(as_rendered([QUESTION, message, MORE]))
    observed = Encoded([tokenizer.eos_token_id, *prompt.observed.ids])
    replaced = type(prompt)(prompt.ids, first, observed, 1, prompt.messages, (), prompt.left)
    session.record(replaced, completion_of(tokenizer, "8"), {"role": "assistant", "content": "8"})
    (row,) = session.trajectory().rows()
    assert [*row.prompt_ids, *row.response_ids] == session.turns[-1].ids()
    assert tokenizer.decode(row.response_ids[row.mask]) == "78<|im_end|>"


def test_a_prompt_that_leaves_no_room_is_rejected_with_openais_code(kit_of):
    session = Session(kit_of(context=100))
    with pytest.raises(HTTPException) as error:
        session.prompt_for(as_rendered([{"role": "user", "content": "x" * 80}]))
    assert error.value.detail["code"] == "context_length_exceeded" and "100" in error.value.detail["message"]


def test_a_response_may_have_what_the_row_has_left(kit_of):
    session = Session(kit_of(response=100))
    assert session.prompt_for(as_rendered([QUESTION])).left == 100
    _, message = say(session, [QUESTION], "7" * 20)
    prompt = session.prompt_for(as_rendered([QUESTION, message, MORE]))
    assert prompt.left == 100 - 21 - len(prompt.observed.ids)


def test_token_ids_continue_the_context_that_they_begin_with(session):
    turn, _ = say(session, [QUESTION], "7")
    prompt = session.prompt_of([*turn.ids(), 5, 6])
    assert prompt.parent is turn and prompt.observed.ids == [5, 6]
    assert session.prompt_of([1, 2]).parent is None


def test_names_of_tools_come_from_their_calls(session):
    result = {"role": "tool", "content": "found", "tool_call_id": "call00000"}
    assert as_rendered([calling("{}"), result])[1]["name"] == "look"
