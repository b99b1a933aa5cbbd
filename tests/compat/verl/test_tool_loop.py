"""Loops that inherit from verl's ToolAgentLoop, or read calls with its parsers, as they are written for verl."""

import asyncio
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.agents.environments import EnvironmentSettings
from hybridrl.agents.environments.episode_loop import EpisodeLimits
from hybridrl.agents.environments.load import check_environments, provide_libraries
from hybridrl.agents.environments.worker import EpisodeSettings, EpisodeWorker
from hybridrl.compat.verl.tools import ToolParser, is_registered
from hybridrl.config import ConfigError
from hybridrl.core.experience.trajectory import Trajectory
from hybridrl.core.rollout import Completion, Request, Sampling
from tests.agents.endpoint.conftest import completion_of
from tests.agents.environments.conftest import PLAIN
from tests.agents.environments.test_worker import run
from tests.agents.sections import environments_of

TOOLS = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

class Add(BaseTool):
    released = 0

    def get_openai_tool_schema(self):
        number = {"type": "integer", "description": "a number"}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "add",
            "description": "Add.", "parameters": {"type": "object", "properties": {"a": number, "b": number}}}})

    async def create(self, instance_id=None, start=0, **kwargs):
        self.start = start
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        if parameters["a"] == 99:
            raise ValueError("99 is too much")
        seen = len(agent_data.tool_calls) if agent_data else 0
        return ToolResponse(text=str(self.start + parameters["a"] + parameters["b"])), 0.5, {"seen": seen}

    async def release(self, instance_id, **kwargs):
        Add.released += 1
"""
TALKS = """
from verl.interactions.base import BaseInteraction

class Patient(BaseInteraction):
    # Asks once more; its end takes no id, as that of verl's base class.
    made, read, finished = 0, [], 0

    def __init__(self, config):
        super().__init__(config)
        Patient.made += 1

    async def generate_response(self, instance_id, messages, **kwargs):
        Patient.read.append([(message["role"], message["content"]) for message in messages])
        return len(Patient.read) > 1, "and?", 0.5, {}

    async def finalize_interaction(self):
        Patient.finished += 1

class Careful(Patient):
    ended = []

    async def finalize_interaction(self, instance_id, **kwargs):
        Careful.ended.append((instance_id, kwargs["name"]))

class Named(Patient):
    ended = []

    async def finalize_interaction(self, **kwargs):
        Named.ended.append(kwargs["name"])
"""
LOOPS = '''
import json
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class Plain(ToolAgentLoop):
    """Changes nothing."""

class Changed(ToolAgentLoop):
    """One call at a time, results in brackets, a reward of its own, and an end at a result."""

    def __init__(self, *args, bracket="(", **kwargs):
        super().__init__(*args, **kwargs)
        self.bracket = bracket

    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        response, reward, more = await super()._call_tool(tool_call, tools_kwargs, agent_data)
        agent_data.extra_fields["seen"] = more.get("seen")
        response.text = self.bracket + response.text
        return response, reward, more

    async def _handle_processing_tools_state(self, agent_data):
        agent_data.tool_calls = agent_data.tool_calls[:1]
        state = await super()._handle_processing_tools_state(agent_data)
        return AgentState.TERMINATED if agent_data.messages[-1]["content"] == self.bracket + "100" else state

    @rollout_trace_op
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.reward_score = sum(output.extra_fields["tool_rewards"]) + output.extra_fields["seen"]
        return output

class Few(ToolAgentLoop):
    """Takes four arguments, and has prepared what its base class needs."""

    def __init__(self, trainer_config, server_manager, tokenizer, processor):
        super().__init__(trainer_config, server_manager, tokenizer, processor)
        assert list(self.tools) == ["add"] and self.tool_schemas[0]["function"]["name"] == "add"

class Talks(ToolAgentLoop):
    """A user answers the responses without a call, in a turn that is written as the template writes it."""

    async def _handle_generating_state(self, agent_data: AgentData, sampling_params, ignore_termination=False):
        state = await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)
        if state is not AgentState.TERMINATED or agent_data.user_turns == 1:
            return state
        agent_data.user_turns += 1
        ids = await self.apply_chat_template([{"role": "user", "content": "and?"}], remove_system_prompt=True)
        ids = self.turn_separator + ids
        agent_data.prompt_ids += ids
        agent_data.response_mask += [0] * len(ids)
        agent_data.response_logprobs += [0.0] * len(ids)
        return AgentState.GENERATING

@ToolParser.register("shouted")
class Shouted(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        name, _, number = text.partition("!")
        return "", [FunctionCall(name=name, arguments=json.dumps({"a": int(number), "b": 1}))] if number else []

class Own(ToolAgentLoop):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tool_parser = ToolParser.get_tool_parser("shouted", self.tokenizer)

class Reads(AgentLoopBase):
    """Has no tools of the configuration, and reads calls."""

    async def run(self, sampling_params, **kwargs):
        parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)
        ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(request_id="a", prompt_ids=ids, sampling_params=sampling_params)
        content, calls = await parser.extract_tool_calls(output.token_ids)
        assert content == "I add: " and calls[0].name == "add", (content, calls)
        return AgentLoopOutput(prompt_ids=ids, response_ids=output.token_ids, metrics={},
            response_mask=[1] * len(output.token_ids), reward_score=json.loads(calls[0].arguments)["a"])
'''
NAMES = ("Plain", "Few", "Changed", "Talks", "Own", "Reads")


def call(a: Any, b: Any = 1, name: str = "add") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'a': a, 'b': b}})}</tool_call>"


@dataclass
class Episodes:
    """Runs episodes of rows in a worker, with responses of these texts."""

    tokenizer: Any
    settings: EnvironmentSettings
    response: int = 600
    limits: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)

    def __call__(self, texts: Sequence[str], **row: Any) -> Trajectory:
        multi_turn: dict[str, Any] = dict.fromkeys(("max_user_turns", "max_assistant_turns", "interaction_config_path"))
        multi_turn |= {"max_parallel_calls": 4, "max_tool_response_length": 40, "tool_timeout": 5.0}
        multi_turn |= {"tool_response_truncate_side": "middle", "format": "auto"} | self.limits
        configuration = {
            "actor_rollout_ref": {"rollout": {"multi_turn": multi_turn}},
            "data": {"max_prompt_length": 300, "max_response_length": self.response},
        }
        worker = EpisodeWorker.__new__(EpisodeWorker)  # without an actor's log
        limits = EpisodeLimits(prompt=300, response=self.response, context=1200)
        end = (self.tokenizer.eos_token_id,)
        settings = EpisodeSettings(lambda: self.tokenizer, self.settings, limits, end, configuration=configuration)
        worker.begin(replace(settings, formats={"format": multi_turn["format"]}))
        left, self.prompts = list(texts), []

        def answer(request: Request) -> Completion:
            self.prompts.append(self.tokenizer.decode(request.prompt_ids))
            return completion_of(self.tokenizer, left.pop(0), request.sampling.max_tokens)

        (ended,) = run(worker, [row], answer, sampling=Sampling(self.response, end))
        assert ended.fault is None, ended.detail
        return ended


@pytest.fixture
def episodes(tmp_path: Path, tokenizer: Any) -> Episodes:
    number = abs(hash(str(tmp_path)))
    (tmp_path / f"tools_{number}.py").write_text(TOOLS)
    (tmp_path / f"loops_{number}.py").write_text(LOOPS)
    (tmp_path / "tools.yaml").write_text(f"tools: [{{class_name: tools_{number}.Add, config: {{}}}}]")
    more = {"Changed": ", bracket: '['"}
    lines = [f"- {{name: {name}, _target_: loops_{number}.{name}{more.get(name, '')}}}" for name in NAMES]
    (tmp_path / "agent.yaml").write_text("\n".join(lines))
    paths = {"tool_config_path": str(tmp_path / "tools.yaml"), "agent_loop_config_path": str(tmp_path / "agent.yaml")}
    return Episodes(tokenizer, environments_of(**paths, max_parallel_calls=4, max_tool_response_length=40))


CONVERSATIONS = {
    "no call": ["hello"],
    "one call": [call(1), "2"],
    "two calls at a time, twice": [call(1) + call(2), f"so {call(3)}", "done"],
    "a call that fails": [call(99), "sorry"],
}


@pytest.mark.parametrize("texts", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_class_that_changes_nothing_gives_the_ids_of_the_built_in_agent(episodes, texts):
    built_in = episodes(texts, agent_name="tool_agent")
    prompts = episodes.prompts
    assert len(episodes(texts, agent_name="Few").turns) == len(texts)
    own = episodes(texts, agent_name="Plain")
    if "99" in texts[0]:  # verl has a text of its own for errors
        assert "Error when executing tool: ValueError: 99 is too" in episodes.prompts[1]
        return
    assert episodes.prompts == prompts
    assert len(own.turns) == len(built_in.turns) == len(texts)
    for one, other in zip(own.turns, built_in.turns, strict=True):
        assert list(one.sampled) == list(other.sampled)
        assert list(one.observed) == list(other.observed)


def test_what_a_class_overrides_is_used(episodes):
    row = {"tools_kwargs": {"add": {"create_kwargs": {"start": 90}}, "other": None}}
    ended = episodes([call(1, 2) + call(5), call(3, 7), "never"], agent_name="Changed", **row)
    assert "[93" in episodes.prompts[1] and "[96" not in episodes.prompts[1]  # one call at a time
    assert len(ended.turns) == 2  # the episode ends at a result of 100
    assert ended.reward == 2.0  # 0.5 for each of two calls; the tool saw one call


def test_a_turn_that_a_class_adds_itself_is_not_trained_on(episodes, tokenizer):
    ended = episodes(["hello", "bye"], agent_name="Talks")
    assert tokenizer.decode(ended.turns[1].observed) == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(turn.sampled) for turn in ended.turns] == ["hello<|im_end|>", "bye<|im_end|>"]


def test_a_row_s_length_and_turns_end_the_episode(episodes, tokenizer):
    episodes.limits = {"max_assistant_turns": 1}
    assert len(episodes([call(1), "never"], agent_name="Plain").turns) == 1
    written = len(tokenizer(call(1))["input_ids"]) + 1  # with the end token
    episodes.limits, episodes.response = {}, written + 3
    ended = episodes([call(1), "never"], agent_name="Plain")
    assert [len(turn.sampled) for turn in ended.turns] == [written]  # the result does not fit
    episodes.response = written - 3
    ended = episodes([call(1), "never"], agent_name="Plain")
    assert [len(turn.sampled) for turn in ended.turns] == [written - 3]  # the response does not


def test_a_registered_parser_and_a_loop_without_tools_read_calls(episodes):
    assert len(episodes(["add!41", "fine"], agent_name="Own").turns) == 2
    assert "42" in episodes.prompts[1]
    assert episodes([f"I add: {call(7)}"], agent_name="Reads").reward == 7.0


def test_a_registered_parser_is_the_configured_format(episodes):
    episodes.limits = {"format": "shouted"}
    assert len(episodes(["add!41", "fine"], agent_name="Plain").turns) == 2
    assert "42" in episodes.prompts[1]


def test_a_loop_with_its_own_parser_needs_no_template_that_writes_calls(episodes, tokenizer_of):
    episodes.tokenizer = tokenizer_of(PLAIN)
    episodes.tokenizer.eos_token = "<|im_end|>"
    assert len(episodes(["fine"], agent_name="Own").turns) == 1
    with pytest.raises(AssertionError, match="its chat template writes no calls"):
        episodes(["fine"], agent_name="Plain")


def test_a_row_selects_among_the_tools_of_a_loop(episodes):
    episodes.settings.multi_turn.tools = ["calculator"]
    episodes(["fine"], agent_name="Plain")
    assert '"calculator"' in episodes.prompts[0] and '"add"' in episodes.prompts[0]
    ended = episodes([call(1), "fine"], agent_name="Plain", extra_info={"tool_selection": ["calculator"]})
    assert '"calculator"' in episodes.prompts[0] and '"add"' not in episodes.prompts[0]
    assert len(ended.turns) == 2 and "Error when executing tool: KeyError: 'add'" in episodes.prompts[1]
    with pytest.raises(ConfigError, match="row 0: tool_selection: there is no tool sub; the tools are calculator, add"):
        check_environments(episodes.settings, [{"agent_name": "Plain", "tool_selection": ["sub"]}])


@pytest.fixture
def talks(episodes: Episodes, tmp_path: Path) -> Any:
    """The module of interactions that the episodes then have."""
    name = f"talks_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(TALKS)
    entries = [f"{{name: {cls.lower()}, class_name: {name}.{cls}}}" for cls in ("Patient", "Careful", "Named")]
    (tmp_path / "talks.yaml").write_text(f"interaction: [{', '.join(entries)}]")
    path = str(tmp_path / "talks.yaml")
    episodes.settings.multi_turn.interaction_config_path = path
    episodes.limits = {"interaction_config_path": path}
    provide_libraries(())
    check_environments(episodes.settings, [])
    return importlib.import_module(name)


def test_an_interaction_of_verl_s_base_class_reads_whole_responses_and_is_made_once(episodes, talks):
    row = {"agent_name": "Plain", "extra_info": {"interaction_kwargs": {"name": "patient"}}}
    ended = episodes([f"so {call(1)}", "2", "yes"], **row)
    assert len(ended.turns) == 3 and "and?" in episodes.prompts[2]
    without_marks = 'so {"name": "add", "arguments": {"a": 1, "b": 1}}'  # which are special tokens here
    first = [("user", "Go."), ("assistant", without_marks), ("tool", "2"), ("assistant", "2")]
    assert talks.Patient.read == [first, [*first, ("user", "and?"), ("assistant", "yes")]]
    episodes(["again"], **row)
    assert (talks.Patient.made, talks.Patient.finished) == (3, 2)  # one for each entry; two episodes


def test_the_end_of_an_interaction_gets_what_its_method_takes(episodes, talks):
    for name in ("careful", "named"):
        talks.Patient.read.clear()
        episodes(["hello", "bye"], agent_name="Plain", interaction_kwargs={"name": name})
    ((identity, name),) = talks.Careful.ended
    assert len(identity) == 32 and name == "careful"
    assert talks.Named.ended == ["named"]


def test_a_row_without_an_interaction_s_name_has_none_and_an_unknown_name_is_rejected(episodes, talks):
    ended = episodes(["hello", "never"], agent_name="Plain", interaction_kwargs={"mood": "calm"})
    assert len(ended.turns) == 1 and not talks.Patient.read
    with pytest.raises(ConfigError, match=r"row 0: interaction_kwargs\.name=rude: .* has no such interaction; it has"):
        check_environments(episodes.settings, [{"agent_name": "Plain", "interaction_kwargs": {"name": "rude"}}])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'a<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'),
        ("qwen3_xml", "a<tool_call>\n<function=f>\n<parameter=x>\né\n</parameter>\n</function>\n</tool_call>"),
    ],
)
def test_a_parser_of_verl_s_name_reads_calls_and_leaves_out_what_it_cannot_read(tokenizer_of, name, text):
    provide_libraries(())
    ToolParser = importlib.import_module("verl.experimental.agent_loop.tool_parser").ToolParser
    tokenizer = tokenizer_of("{{ messages }}")
    parser = ToolParser.get_tool_parser(name, tokenizer)
    content, (found,) = asyncio.run(parser.extract_tool_calls(tokenizer(text)["input_ids"]))
    assert (content, found.name, json.loads(found.arguments)) == ("a", "f", {"x": "é"})
    broken = tokenizer('<tool_call>{"name": "f", "arguments": [</tool_call>')["input_ids"]
    assert asyncio.run(parser.extract_tool_calls(broken))[1] == []
    with pytest.raises(ConfigError, match="no_such_format: unknown"):
        ToolParser.get_tool_parser("no_such_format", tokenizer)


def test_a_registered_parser_that_reads_no_calls_is_rejected_where_its_file_is_loaded():
    class Silent(ToolParser):
        pass

    with pytest.raises(TypeError, match="Silent, the parser quiet, defines no extract_tool_calls"):
        ToolParser.register("quiet")(Silent)
    assert not is_registered("quiet")
