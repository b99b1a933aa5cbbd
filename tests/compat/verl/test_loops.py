"""Agent loops as they are written for verl's releases, without verl."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from hybridrl.agents.environments import EpisodeFault
from hybridrl.agents.environments.load import check_environments, environment_of
from hybridrl.compat.verl.loops import VerlLoop
from hybridrl.config import ConfigError
from tests.agents.sections import environments_of

LOOPS = '''
import logging
from typing import Any
from uuid import uuid4
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer

@register("early")
class Early(AgentLoopBase):
    """The style of 0.5: class-wide preparation, messages as an argument, ids as a list."""

    @classmethod
    def init_class(cls, config, tokenizer, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.response_length = config.actor_rollout_ref.rollout.response_length

    async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:
        metrics = {}
        prompt_ids = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True))
        with simple_timer("generate_sequences", metrics):
            response_ids = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params)
        return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=response_ids[: self.response_length],
            response_mask=[1] * len(response_ids[: self.response_length]), num_turns=2, metrics=metrics)

@register("two")
class TwoTurns(AgentLoopBase):
    """The style of 0.7: a turn, an observation that is not trained on, and another turn."""

    def __init__(self, *args, mark=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.mark, self.prompt_length = mark, self.config.actor_rollout_ref.rollout.prompt_length

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]), tools=None)
        first = await self.server_manager.generate(
            request_id="a", prompt_ids=prompt_ids, sampling_params=sampling_params)
        context = prompt_ids + first.token_ids + [self.mark]
        second = await self.server_manager.generate(
            request_id="a", prompt_ids=context, sampling_params=sampling_params | {"max_tokens": 1, "stop": "x"})
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=first.token_ids + [self.mark] + second.token_ids,
            response_mask=[1] * len(first.token_ids) + [0] + [1] * len(second.token_ids),
            reward_score=float(kwargs["extra_info"]["wanted"] == second.token_ids[0]),
            num_turns=4, metrics={}, extra_fields={"turn_scores": [1.0]})

@register("helped")
class Helped(AgentLoopBase):
    """The style of 0.9: the base class merges ids."""

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        self._assert_mm_supported(bool(await self.process_multi_modal_info(messages)))
        ids = prompt_ids = await self.ct_build_initial_tokens(messages)
        mask, log_probs = [], []
        for turn in range(2):
            output = await self.server_manager.generate(
                request_id="a", prompt_ids=ids, sampling_params=dict(max_tokens=2))
            merged, mask, log_probs = await self.ct_merge_assistant_token(
                ids, output.token_ids, mask, log_probs, assistant_logprobs=output.log_probs)
            if turn == 0:
                said = [*messages, {"role": "assistant", "content": "", "tool_calls": [{}]}]
                heard = [*said, {"role": "tool", "content": "z"}]
                merged, mask, log_probs = await self.ct_merge_non_assistant_msg(
                    said, heard, merged.token_ids, mask, log_probs)
            ids = merged.token_ids
        return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=ids[len(prompt_ids):], response_mask=mask,
            response_logprobs=log_probs, metrics={})

class Wrong(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        return AgentLoopOutput(prompt_ids=[1], response_ids=[2, 3], response_mask=[1], metrics={})

class Several(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        made = dict(prompt_ids=[1], response_ids=[2], response_mask=[1], response_logprobs=[-1.0], metrics={})
        return [AgentLoopOutput(**made)] * 2

class NoRun: ...
'''
CONFIG = {
    "actor_rollout_ref": {"rollout": {"multi_turn": {}}},
    "data": {"max_prompt_length": 8, "max_response_length": 3},
}
MESSAGES = [{"role": "user", "content": "abc"}]


class Tokenizer:
    def apply_chat_template(self, messages, tools=None, add_generation_prompt=False, tokenize=True, return_dict=True):
        ids = [ord(letter) for message in messages for letter in message["content"]]
        return {"input_ids": ids} if return_dict else ids


class Policy:
    """Samples the lengths of what it has seen: four ids, or as many as may be sampled."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    async def generate(self, prompt, *, max_tokens=None, stop=()):
        prompt_ids = prompt.ids
        self.seen.append((prompt_ids, max_tokens, stop))
        count = max_tokens or 4
        ids, log_probs = np.full(count, len(prompt_ids)), -np.arange(1, count + 1) / 10
        routes = np.arange(len(prompt_ids) + count - 1).reshape(-1, 1, 1)
        return SimpleNamespace(
            token_ids=ids, log_probs=log_probs, truncated=max_tokens is not None, carried={"routes": routes}
        )


class Dialogue:
    def delta(self, messages, sampled, *, ended, called, tools=()):
        assert (ended, called) == (True, True)
        return SimpleNamespace(ids=[ord(letter) for letter in messages[0]["content"]], dropped=1)


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "my_loops.py").write_text(LOOPS)
    entries = ["early: Early", "two: TwoTurns", "wrong: Wrong", "several: Several"]
    lines = [f"- {{name: {name}, _target_: my_loops.{cls}}}" for name, cls in (one.split(": ") for one in entries)]
    (tmp_path / "agent.yaml").write_text("\n".join(lines).replace("TwoTurns}", "TwoTurns, mark: 7}"))
    return environments_of(agent_loop_config_path=str(tmp_path / "agent.yaml"))


def run(name: str, settings, policy=None):
    row = {"agent_name": name, "extra_info": {"wanted": 8}}
    loop = environment_of(row, settings)
    assert isinstance(loop, VerlLoop)
    call = loop.run(policy or Policy(), MESSAGES, Tokenizer(), CONFIG, {"temperature": 1.0}, Dialogue())
    return asyncio.run(call)


def test_a_loop_of_the_first_releases_runs_with_lists_of_ids(settings) -> None:
    (row,) = run("early", settings)
    assert (row.prompt_ids, row.response_ids, row.response_mask) == ([97, 98, 99], [3, 3, 3], [1, 1, 1])
    assert row.response_logprobs == pytest.approx([-0.1, -0.2, -0.3])
    assert row.metrics.generate_sequences > 0


def test_a_loop_of_two_turns_gets_its_arguments_the_row_and_the_log_probs_of_what_was_sampled(settings) -> None:
    policy = Policy()
    (row,) = run("two", settings, policy)
    assert (row.response_ids, row.response_mask) == ([3, 3, 3, 3, 7, 8], [1, 1, 1, 1, 0, 1])
    assert row.response_logprobs == pytest.approx([-0.1, -0.2, -0.3, -0.4, 0.0, -0.1])
    assert (row.reward_score, row.extra_fields) == (1.0, {"turn_scores": [1.0]})
    assert policy.seen == [([97, 98, 99], None, ()), ([97, 98, 99, 3, 3, 3, 3, 7], 1, ("x",))]


@pytest.mark.parametrize(("name", "computed"), [("early", 6), ("two", 8), ("helped", 6)])
def test_a_row_has_the_experts_of_the_last_output_with_its_tokens(settings, name, computed) -> None:
    (row,) = run(name, settings)
    assert len(row.prompt_ids + row.response_ids) >= computed
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
    (trained,) = VerlLoop.trajectory([row], np.zeros(sum(row.response_mask)), tokenizer).rows()
    routes = trained.carried["routes"].flatten().tolist()
    assert len(routes) == len(trained.prompt_ids) + len(trained.response_ids)
    assert routes[:computed] == list(range(computed)) and set(routes[computed:]) <= {-1}


def test_a_loop_that_leaves_merging_to_its_base_class_gets_the_ids_that_messages_add(settings) -> None:
    (row,) = run("helped", settings)
    assert (row.response_ids, row.response_mask) == ([3, 122, 5, 5], [1, 0, 1, 1])
    assert row.response_logprobs == pytest.approx([-0.1, 0.0, -0.1, -0.2])


def test_a_list_is_several_rows_and_lengths_that_differ_are_a_fault(settings) -> None:
    assert [row.response_logprobs for row in run("several", settings)] == [[-1.0], [-1.0]]
    with pytest.raises(EpisodeFault, match="returned 2 response_ids and 1 response_mask"):
        run("wrong", settings)


@pytest.mark.parametrize("wanted", ["float('nan')", "'good'", "10.0**40"])
def test_a_reward_of_a_loop_that_is_no_finite_number_is_a_fault_with_its_class(tmp_path, wanted) -> None:
    score = 'float(kwargs["extra_info"]["wanted"] == second.token_ids[0])'
    (tmp_path / f"scored{len(wanted)}.py").write_text(LOOPS.replace(score, wanted))
    (tmp_path / "agent.yaml").write_text(f"- {{name: scored, _target_: scored{len(wanted)}.TwoTurns}}")
    settings = environments_of(agent_loop_config_path=str(tmp_path / "agent.yaml"))
    with pytest.raises(
        EpisodeFault, match=r"the reward of TwoTurns \(.*scored\d+\.py\) is not a finite number: it ret"
    ):
        run("scored", settings)


def test_an_unknown_loop_is_rejected_with_those_that_there_are(settings, tmp_path) -> None:
    check_environments(settings, [{"agent_name": "two"}])
    with pytest.raises(ConfigError, match=r"row 0: .*agent_name=mine: there is no such agent loop; it has early, two"):
        check_environments(settings, [{"agent_name": "mine"}])
    (tmp_path / "bad.yaml").write_text("- {name: bad, _target_: my_loops.NoRun}")
    with pytest.raises(ConfigError, match=r"bad\.yaml: \[0\]: NoRun has no async method run"):
        check_environments(environments_of(agent_loop_config_path=str(tmp_path / "bad.yaml")), [{"agent_name": "bad"}])
