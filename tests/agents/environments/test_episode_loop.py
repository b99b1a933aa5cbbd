"""One episode: the tokens of its row, every limit with its stop reason, and what its environment may do wrong."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hybridrl.agents.environments import Environment, EpisodeFault, Message, Response, Step
from hybridrl.agents.environments.episode_loop import EpisodeLimits, EpisodeRun, EpisodeTools
from hybridrl.core.carried import Encoded
from hybridrl.core.experience.trajectory import Trajectory
from hybridrl.core.rollout import Completion
from tests.agents.environments.conftest import CALLS, STRIPS

LIMITS = EpisodeLimits(prompt=200, response=400, context=600, call_timeout=0.5, timeout=5)
QUESTION = [{"role": "user", "content": "Guess."}]
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}


class Policy:
    """Responds with these texts in turn; one that ends in "..." has no end token, as at a token limit."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts, self.prompts = tokenizer, list(texts), []

    async def generate(self, prompt: Encoded, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        self.prompts.append((self.tokenizer.decode(prompt.ids), max_tokens))
        text = self.texts[len(self.prompts) - 1]
        ids = self.tokenizer(text)["input_ids"] + [self.tokenizer.eos_token_id]
        if max_tokens is not None and len(ids) > max_tokens:
            ids = ids[:max_tokens]
        cut = ids[-1] != self.tokenizer.eos_token_id
        return Completion(np.array(ids), np.full(len(ids), -0.5, np.float32), cut, 3)


class Echo(Environment):
    """Repeats what it reads; says done after "stop"."""

    def step(self, response: Response) -> Step:
        if response.text == "stop":
            return Step(reward=1.0, done=True)
        return Step([{"role": "user", "content": f"You said {response.text}"}], reward=-0.25)

    def close(self) -> dict[str, float]:
        return {"closed": 1.0}


def kit(tokenizer: PreTrainedTokenizerFast, reasoning: str = "keep", **limits: Any) -> EpisodeTools:
    bounds, end = replace(LIMITS, **limits), [tokenizer.eos_token_id]
    return EpisodeTools.of(tokenizer, end, bounds, format="hermes", history_reasoning=reasoning)


def run(
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    environment: Environment | None = None,
    messages: Sequence[Message] = QUESTION,
    **limits: Any,
) -> tuple[Trajectory, Policy]:
    policy = Policy(tokenizer, texts)
    episode = EpisodeRun(kit(tokenizer, **limits), policy, environment or Echo({}, {}))
    return asyncio.run(episode.run(messages)), policy


def test_the_row_is_the_conversation_and_only_what_was_sampled_is_trained_on(tokenizer):
    trajectory, policy = run(tokenizer, ["7", "stop"])
    (row,) = trajectory.rows()
    text = "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(row.prompt_ids) == text == policy.prompts[0][0]
    added = "\n<|im_start|>user\nYou said 7<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(row.response_ids) == f"7<|im_end|>{added}stop<|im_end|>"
    assert tokenizer.decode(row.response_ids[row.mask]) == "7<|im_end|>stop<|im_end|>"
    assert policy.prompts[1][0] == text + "7<|im_end|>" + added
    assert row.log_probs.tolist() == [-0.5 if sampled else 0.0 for sampled in row.mask]


def test_rewards_of_turns_are_added_and_stand_on_their_last_tokens(tokenizer):
    trajectory, _ = run(tokenizer, ["7", "8", "stop"])
    (row,) = trajectory.rows()
    assert (trajectory.stop, trajectory.reward, trajectory.metrics) == ("completed", 0.5, {"closed": 1.0})
    assert row.rewards[row.rewards != 0].tolist() == [-0.25, -0.25, 1.0]
    assert (row.response_ids[row.rewards != 0] == tokenizer.eos_token_id).all()


@pytest.mark.parametrize(
    ("limits", "texts", "stop"),
    [
        ({}, ["stop"], "completed"),
        ({"turns": 2}, ["1", "2", "3"], "max_turns"),
        ({"turns": 2}, ["1", "stop"], "completed"),
        ({"user_turns": 1}, ["1", "2", "3"], "max_turns"),
        ({"response": 5}, ["1234567"], "max_tokens"),
        ({"turn": 4}, ["12345"], "max_turn_tokens"),
        ({"response": 60}, ["1", "2"], "context_overflow"),
        ({"context": 100}, ["1", "2"], "context_overflow"),
    ],
)
def test_every_limit_has_its_stop_reason(tokenizer, limits, texts, stop):
    trajectory, _ = run(tokenizer, texts, **limits)
    assert (trajectory.stop, trajectory.fault) == (stop, None)
    (row,) = trajectory.rows()
    assert len(row.response_ids) <= limits.get("response", 400)
    assert len(row.prompt_ids) + len(row.response_ids) <= limits.get("context", 600)


def test_a_turn_may_have_what_the_episode_has_left(tokenizer):
    _, policy = run(tokenizer, ["7", "stop"], response=100)
    # 2 tokens were sampled, and 30 observed: bytes, but for the special tokens at both ends of a message.
    observed = ["\n", "<|im_start|>", *"user\nYou said 7", "<|im_end|>", "\n", "<|im_start|>", *"assistant\n"]
    assert [most for _, most in policy.prompts] == [100, 100 - 2 - len(observed)]


def test_reasoning_that_the_template_drops_is_kept_in_one_row_or_dropped_with_a_row_for_each_turn(tokenizer_of):
    tokenizer = tokenizer_of(STRIPS, ["<think>", "</think>"])  # no special tokens, as in released models
    tokenizer.eos_token = "<|im_end|>"
    texts = ["<think>a</think>7", "<think>b</think>8", "stop"]
    kept, policy = run(tokenizer, texts, reasoning="keep")
    assert len(kept.rows()) == 1 and "<think>a</think>7" in policy.prompts[2][0]
    stripped, policy = run(tokenizer, texts, reasoning="strip")
    user = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    first, second, third = (prompt for prompt, _ in policy.prompts)
    assert second == user.format("Guess.") + "7<|im_end|>\n" + user.format("You said <think>a</think>7")
    assert third == second + "8<|im_end|>\n" + user.format("You said <think>b</think>8")
    rows = stripped.rows()
    assert [tokenizer.decode(row.prompt_ids) for row in rows] == [first, second, third]
    assert [tokenizer.decode(row.response_ids[row.mask]) for row in rows] == [f"{text}<|im_end|>" for text in texts]
    assert sum(float(row.rewards.sum()) for row in rows) == stripped.reward == kept.reward == 0.5


class Caller(Environment):
    """Has a tool; keeps what it was given."""

    tools = (TOOL,)

    def step(self, response: Response) -> Step:
        self.seen = response
        if not response.calls:
            return Step(done=True)
        return Step([{"role": "tool", "name": "look", "content": call.error or "found"} for call in response.calls])


def test_calls_are_parsed_and_their_results_are_the_next_message(tokenizer):
    call = '<tool_call>{"name": "look", "arguments": {"word": "x"}}</tool_call>'
    trajectory, policy = run(tokenizer, [f"Let me look. {call}", "It is there."], Caller({}, {}))
    assert trajectory.stop == "completed"
    assert trajectory.messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"word": "x"}}
    assert policy.prompts[1][0].endswith("\n<|im_start|>tool\nfound<|im_end|>\n<|im_start|>assistant\n")


def test_calls_that_cannot_be_read_end_the_episode_after_so_many_in_a_row(tokenizer):
    broken, right = "<tool_call>{</tool_call>", '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    limits, texts = {"invalid_calls": 2, "response": 900, "context": 1000}, [broken, right, broken, broken, "no"]
    trajectory, _ = run(tokenizer, texts, Caller({}, {}), **limits)
    assert (trajectory.stop, len(trajectory.turns)) == ("invalid_calls", 4)


def test_an_environment_knows_which_response_is_the_last(tokenizer):
    environment = Caller({}, {})
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    run(tokenizer, [call, call], environment, turns=2)
    assert (environment.seen.last, environment.seen.turn) == (True, 1)


class Summary(Environment):
    """Replaces the context after the first response."""

    def step(self, response: Response) -> Step:
        if response.turn == 0:
            return Step(replace=[{"role": "user", "content": "In short: 7."}], reward=0.5)
        return Step(done=True, reward=1.0)


def test_a_replaced_context_begins_a_new_row(tokenizer):
    trajectory, _ = run(tokenizer, ["7", "8"], Summary({}, {}))
    first, second = trajectory.rows()
    assert tokenizer.decode(second.prompt_ids) == "<|im_start|>user\nIn short: 7.<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(row.response_ids) for row in (first, second)] == ["7<|im_end|>", "8<|im_end|>"]
    assert (first.rewards[-1], second.rewards[-1], trajectory.reward) == (0.5, 1.0, 1.5)


class Failing(Environment):
    def __init__(self, config: dict[str, Any], row: dict[str, Any]) -> None:
        super().__init__(config, row)
        self.closed = 0

    def reset(self, messages: list[Message]) -> list[Message]:
        if self.config["at"] == "reset":
            raise KeyError("target")
        return messages

    def step(self, response: Response) -> Step:
        match self.config["at"]:
            case "step":
                raise RuntimeError("the board is broken\nand more")
            case "fault":
                raise EpisodeFault("the server does not respond")
            case "timeout":
                raise TimeoutError("of its own")
            case "sleep":
                time.sleep(2)
            case "none":
                return None
        return Step(done=True)

    def close(self) -> dict[str, float]:
        self.closed += 1
        raise OSError("cannot close")


@pytest.mark.parametrize(
    ("at", "fault", "detail"),
    [
        ("reset", "raised:KeyError", "KeyError: 'target'"),
        ("step", "raised:RuntimeError", "RuntimeError: the board is broken"),
        ("fault", "environment", "the server does not respond"),
        ("timeout", "raised:TimeoutError", "TimeoutError: of its own"),
        ("sleep", "environment", "Failing.step: time limit of 0.5 s reached"),
        ("none", "environment", "Failing.step returned NoneType, not a Step"),
    ],
)
def test_what_an_environment_does_wrong_is_a_fault_of_the_episode(tokenizer, at, fault, detail):
    environment = Failing({"at": at}, {})
    trajectory, _ = run(tokenizer, ["7"], environment)
    assert (trajectory.stop, trajectory.fault) == ("fault", fault)
    assert trajectory.detail.startswith(detail)
    assert environment.closed == 1


class Giving(Environment):
    """Gives the reward and the metrics of its configuration."""

    def step(self, response: Response) -> Step:
        return Step(reward=self.config.get("reward"), metrics=self.config.get("step"), done=True)

    def close(self) -> Any:
        return self.config.get("close")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (float("nan"), "returned nan"),
        (-np.inf, "returned -inf"),
        (10**400, "returned inf"),
        (1e39, "returned 1e+39, more than 1e+18"),
        ("1.0", "returned '1.0' (str), which is not a number"),
        (1j, "returned 1j (complex), which is not a number"),
        (np.array([1.0, 2.0]), "returned array([1., 2.]) (ndarray)"),
        (torch.tensor([1.0, 2.0]), "returned tensor([1., 2.]) (Tensor)"),
        ([1.0], "returned [1.0] (list)"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_a_fault_with_the_class_its_file_and_the_value(tokenizer, reward, said):
    trajectory, _ = run(tokenizer, ["7"], Giving({"reward": reward}, {}))
    assert (trajectory.fault, trajectory.reward, trajectory.turns[0].reward) == ("environment", None, None)
    assert trajectory.detail.startswith(f"the reward of Giving ({__file__}) is not a finite number: it {said}")


@pytest.mark.parametrize("reward", [1, True, np.float32(1), torch.tensor(1.0), np.array(1.0)])
def test_a_reward_of_any_kind_of_number_is_taken_as_a_plain_one(tokenizer, reward):
    trajectory, _ = run(tokenizer, ["7"], Giving({"reward": reward}, {}))
    assert (trajectory.fault, trajectory.reward, type(trajectory.turns[0].reward)) == (None, 1.0, float)


def test_metrics_that_are_no_finite_numbers_are_left_out_and_said_once(tokenizer, caplog):
    no_numbers = {"text": "x", "nan": float("nan"), "none": None, "list": [1], "many": torch.ones(2), "huge": 10**400}
    returned = {"step": no_numbers | {5: np.float32(1)}, "close": {"t": 2, "u": "v"}}
    for _ in range(2):
        trajectory, _ = run(tokenizer, ["7"], Giving({"reward": 1.0} | returned, {}))
        assert (trajectory.fault, trajectory.metrics) == (None, {"5": 1.0, "t": 2.0})
    (warning,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert warning.startswith("metrics of Giving (") and warning.endswith(": text, nan, none, list, many, huge")
    for metrics in (None, 5, "text"):
        trajectory, _ = run(tokenizer, ["7"], Giving({"reward": 1.0, "step": metrics, "close": metrics}, {}))
        assert (trajectory.fault, trajectory.metrics) == (None, {})


def test_an_episode_that_takes_too_long_keeps_what_it_has(tokenizer):
    class Slow(Environment):
        async def step(self, response: Response) -> Step:
            await asyncio.sleep(0.15)
            return Step([{"role": "user", "content": "again"}], reward=1.0)

    trajectory, _ = run(tokenizer, ["7"] * 50, Slow({}, {}), timeout=0.4, response=5000, context=6000)
    assert (trajectory.stop, trajectory.fault) == ("timeout", None)
    assert trajectory.reward == len([turn for turn in trajectory.turns if turn.reward is not None]) > 0


@pytest.mark.parametrize(("held", "stop"), [(False, "timeout"), (True, "completed")])
def test_the_time_limit_does_not_count_how_long_a_policy_is_held(tokenizer, held, stop):
    class Late(Policy):
        async def generate(self, *arguments: Any, **options: Any) -> Completion:
            await asyncio.sleep(0.3)
            return await super().generate(*arguments, **options)

    episode = EpisodeRun(kit(tokenizer, timeout=0.5, held=held), Late(tokenizer, ["7", "stop"]), Echo({}, {}))
    assert asyncio.run(episode.run(QUESTION)).stop == stop


def test_the_time_limit_continues_after_the_policy_was_held(tokenizer):
    class Slow(Echo):
        async def step(self, response: Response) -> Step:
            await asyncio.sleep(0.2)
            return super().step(response)

    trajectory, _ = run(tokenizer, ["7"] * 50, Slow({}, {}), timeout=0.5, held=True, response=5000, context=6000)
    assert (trajectory.stop, len(trajectory.turns)) == ("timeout", 3)


def test_first_messages_beyond_the_prompt_limit_are_a_fault_with_the_key(tokenizer):
    trajectory, _ = run(tokenizer, ["7"], messages=[{"role": "user", "content": "long " * 100}])
    assert trajectory.fault == "environment"
    assert "data.max_prompt_length=200" in trajectory.detail


async def test_plain_functions_of_many_environments_wait_at_the_same_time(tokenizer):
    barrier = threading.Barrier(4, timeout=2)

    class Meeting(Environment):
        def step(self, response: Response) -> Step:
            barrier.wait()
            return Step(done=True)

    shared = kit(tokenizer, call_timeout=3)
    episodes = [EpisodeRun(shared, Policy(tokenizer, ["7"]), Meeting({}, {})) for _ in range(4)]
    found = await asyncio.gather(*(episode.run(QUESTION) for episode in episodes))
    assert [one.stop for one in found] == ["completed"] * 4


def test_environment_and_reward_read_tags_that_are_special_tokens(tokenizer_of):
    trajectory, _ = run(tokenizer_of(CALLS + "{# <answer> </answer> #}"), ["<answer>7</answer>", "stop"])
    assert trajectory.messages[2]["content"] == "You said <answer>7</answer>"
    assert trajectory.text == "<answer>7</answer>\nuser\nYou said <answer>7</answer>\nassistant\nstop"
