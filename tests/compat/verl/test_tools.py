"""Files of tools and interactions as they are written for verl, without verl."""

import asyncio
import pickle
import sys

import pytest

from hybridrl.agents.environments import EnvironmentSettings, EpisodeFault, Response, ToolCall
from hybridrl.agents.environments.load import check_environments, load_tools
from hybridrl.compat.verl import stand_ins
from hybridrl.config import ConfigError
from hybridrl.required import required
from tests.agents.environments.conftest import made
from tests.agents.sections import environments_of

TOOL = """
from typing import Any, Optional
from {tools}base_tool import BaseTool
from {tools}schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class Memory(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.notes = dict()

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        self.notes[instance_id] = [kwargs["create_kwargs"]["first"], self.config["mark"]]
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        self.notes[instance_id].append(parameters["note"])
        return ToolResponse(text=" ".join(self.notes[instance_id])), 0.25, dict(notes=1, by=self.name)

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(len(self.notes[instance_id]))

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.notes[instance_id]
"""
ENTRY = """
  - class_name: {name}.Memory
    config: {{type: native, mark: "!"}}
    tool_schema:
      type: function
      function:
        name: remember
        description: Keep a note.
        parameters: {{type: object, properties: {{note: {{type: string, description: a text}}}}, required: [note]}}
"""
ROW = {"extra_info": {"tools_kwargs": {"remember": {"create_kwargs": {"first": "a"}}}}}


def settings_of(tmp_path, source: str, name: str, entry: str = ENTRY) -> EnvironmentSettings:
    (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "tools.yaml").write_text(f"tools:{entry.format(name=name)}")
    return environments_of(tool_config_path=str(tmp_path / "tools.yaml"))


def episode(settings, row, *turns):
    async def run():
        environment = made(row, settings)
        await environment.reset([{"role": "user", "content": "?"}])
        steps = [await environment.step(turn) for turn in turns]
        return environment, steps, await environment.close()

    return asyncio.run(run())


@pytest.mark.parametrize("tools", ["verl.tools.", "."], ids=["absolute imports", "imports of verl's own package"])
def test_a_tool_class_of_verl_keeps_its_state_for_the_episode(tmp_path, tools) -> None:
    name = f"memory_{len(tools)}"
    settings = settings_of(tmp_path, TOOL.replace("{tools}", tools), name)
    check_environments(settings, [ROW])
    calls = [Response("", [ToolCall("remember", {"note": note})]) for note in "bc"]
    environment, steps, metrics = episode(settings, ROW, *calls)
    assert [step.messages[0]["content"] for step in steps] == ["a ! b", "a ! b c"]
    assert (steps[0].calls[0].reward, steps[0].metrics) == (0.25, {"remember/notes": 1.0})
    assert metrics == {"remember/reward": 4.0}
    assert environment.tools[0]["function"]["parameters"]["required"] == ["note"]
    assert sys.modules[name].Memory  # imported under the name in the yaml


def test_verls_example_yaml_runs_on_the_tools_here(tmp_path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text("""
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool
    config: {sandbox_fusion_url: "http://nowhere", num_workers: 10}
  - class_name: calculator
""")
    settings = environments_of(tool_config_path=str(file), max_parallel_calls=4)
    row = {"extra_info": {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}}}
    calls = [
        ToolCall("calc_gsm8k_reward", {"answer": "71"}),
        ToolCall("code_interpreter", {"code": "print(6 * 7)"}),
        ToolCall("calculator", {"expression": "2 + 3"}),
    ]
    right = ToolCall("calc_gsm8k_reward", {"answer": "72"})
    _, (first, second, third), metrics = episode(settings, row, *(Response("", c) for c in (calls, [right], [right])))
    assert [record.result for record in first.calls] == ["Current parsed answer='71' reward=0.0", "42", "5"]
    assert [step.calls[0].reward for step in (first, second, third)] == [-0.05, 0.0, -0.05]
    assert metrics["calc_gsm8k_reward/reward"] == 1.0


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("\n  - config: {{}}", "tools[0] has no class_name; write class_name: module.Class"),
        ("\n  - class_name: nowhere.Tool", "class_name nowhere.Tool does not import: ModuleNotFoundError"),
        ("\n  - class_name: {name}.Other", "has no class Other; it has"),
        (ENTRY.replace("type: string", "type: text"), "schema of remember: parameters.properties.note.type: 'text'"),
        (ENTRY.replace("type: object", "type: array"), "parameters.type is array; write object"),
        ("\n  - class_name: {name}.Memory", "the tool has no schema"),
        ("\n  x: 1", "has no list tools"),
        (": [", "is not YAML"),
    ],
)
def test_a_yaml_that_cannot_work_is_rejected_with_its_entry(tmp_path, entry, said) -> None:
    settings = settings_of(tmp_path, TOOL.replace("{tools}", "verl.tools."), "memory_checked", entry)
    with pytest.raises(ConfigError) as raised:
        load_tools(settings)
    assert said in str(raised.value)
    assert "tool_config_path" in str(raised.value)


INTERACTION = """
from verl.interactions.base import BaseInteraction

class Polite(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self.wanted = dict()

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs) -> str:
        self.wanted[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        said = messages[-1]["content"]
        tools = sum(message["role"] == "tool" for message in messages)
        right = said == self.wanted[instance_id]
        return right, self.config["text"] + f" {kwargs['query']} {tools}", float(right), dict(tools=tools)

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.wanted[instance_id]
"""


def test_an_interaction_of_verl_answers_what_calls_no_tool(tmp_path) -> None:
    (tmp_path / "polite.py").write_text(INTERACTION)
    (tmp_path / "user.yaml").write_text("interaction: [{name: p, class_name: polite.Polite, config: {text: wrong}}]")
    settings = environments_of(interaction_config_path=str(tmp_path / "user.yaml"), tools=("calculator",))
    row = {"extra_info": {"interaction_kwargs": {"name": "p", "query": "2?", "ground_truth": "2"}}}
    check_environments(settings, [row])
    call = Response("", [ToolCall("calculator", {"expression": "1 + 1"})])
    environment, steps, _ = episode(settings, row, Response("1"), call, Response("2"))
    assert steps[0].messages == [{"role": "user", "content": "wrong 2? 0"}]
    assert steps[1].messages[0]["content"] == "2"
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (None, False), (1.0, True)]
    assert steps[2].metrics == {"tools": 1.0}
    assert environment.tools[0]["function"]["name"] == "calculator"
    (tmp_path / "nan.py").write_text(INTERACTION.replace("float(right)", "float('nan')"))
    (tmp_path / "nan.yaml").write_text("interaction: [{name: p, class_name: nan.Polite, config: {text: wrong}}]")
    settings = environments_of(interaction_config_path=str(tmp_path / "nan.yaml"))
    with pytest.raises(
        EpisodeFault, match=r"the reward of Polite \(.*nan\.py\) is not a finite number: it returned nan"
    ):
        episode(settings, row, Response("1"))
    with pytest.raises(ConfigError, match=r"row 0: interaction_kwargs\.name=q: .* has no such interaction; it has p"):
        check_environments(settings, [{"extra_info": {"interaction_kwargs": {"name": "q"}}}])


def test_what_verl_s_schemas_make_can_be_sent_to_another_process():
    call = required(stand_ins.NAMES["verl.tools.schemas"]["OpenAIFunctionToolCall"])
    made = call(id="1", function={"name": "add", "arguments": {"a": 1}}, index=0)
    assert pickle.loads(pickle.dumps(made)) == made
    for member in stand_ins.NAMES["verl.tools.schemas"].values():
        assert pickle.loads(pickle.dumps(member)) is member
