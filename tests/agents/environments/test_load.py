"""What a row runs in, and what is rejected before the start."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from hybridrl.agents.environments.built_in.games import GuessNumber
from hybridrl.agents.environments.load import ENVIRONMENTS, Choice, check_environments, choice_of
from hybridrl.config import ConfigError
from tests.agents.environments.conftest import made
from tests.agents.sections import environments_of

GAME = {"target": 3, "low": 1, "high": 9}


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ({}, {}, None),
        ({"env_class": "gsm8k"}, {}, None),
        ({"env_class": "search"}, {"environment": "wordle5"}, Choice("environment", "search")),
        ({}, {"environment": "wordle5"}, Choice("environment", "wordle5")),
        ({"agent_name": "single_turn_agent"}, {"environment": "wordle5"}, None),
        ({"agent_name": "tool_agent"}, {}, Choice("tools", "tool_agent")),
        ({}, {"tools": ("python",)}, Choice("tools", "tool_agent")),
        ({"agent_name": "single_turn_agent"}, {"tools": ("python",)}, None),
        ({}, {"default_agent_loop": "tool_agent"}, Choice("tools", "tool_agent")),
        ({"agent_name": "mine"}, {}, Choice("agent", "mine")),
    ],
)
def test_columns_of_the_row_choose_before_the_settings(row, settings, expected) -> None:
    assert choice_of(row, environments_of(**settings)) == expected


def test_settings_can_be_sent_to_another_process() -> None:
    settings = environments_of(environment="guess_number", environment_kwargs={"cost": 0.1})
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_built_in_environment_gets_the_configuration_under_its_name() -> None:
    for kwargs in ({"guess_number": {"cost": 0.5}, "wordle5": {"cost": 7}}, {"cost": 0.5, "wordle5": {"cost": 7}}):
        environment = made(GAME, environments_of(environment="guess_number", environment_kwargs=kwargs))
        assert isinstance(environment, GuessNumber)
        assert environment.config == {"cost": 0.5}


OWN = """
from hybridrl.agents.environments import Environment, Step

class Echo(Environment):
    def step(self, response):
        return Step([{"role": "user", "content": self.config["mark"] + response.text}])

class Without(Environment):
    pass

class Fails(Environment):
    def __init__(self, config, row):
        raise KeyError("nothing")
    def step(self, response): ...
"""


@pytest.fixture
def own(tmp_path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_an_environment_of_a_file_gets_its_configuration_and_the_row(own) -> None:
    settings = environments_of(environment=f"{own}:Echo", environment_kwargs={"mark": "!"})
    check_environments(settings, [GAME])
    environment = made(GAME, settings)
    assert (environment.config, environment.row) == ({"mark": "!"}, GAME)


@pytest.mark.parametrize(
    ("settings", "row", "said"),
    [
        ({"environment": "{file}:Without"}, {}, "Without has no method step; inherit from hybridrl.environments."),
        ({"environment": "{file}:Missing"}, {}, "there is no class Missing; it has Echo, Without, Fails"),
        ({"environment": "{file}.no:Echo"}, {}, "there is no such file"),
        ({"environment": "{file}:Fails"}, {}, "Fails fails: KeyError: 'nothing' ("),
        ({"environment": "chess"}, {}, ".environment=chess: there is no environment of this name; choose gsm8k"),
        ({"environment": "guess_number"}, {"low": 1}, "guess_number fails: ValueError: the row has no target"),
        ({"tools": ("hammer",)}, {}, "there is no built-in tool hammer; choose calculator"),
        ({"tools": ("python",)}, {"extra_info": {"tool_selection": ["sql"]}}, "tool_selection: there is no tool sql;"),
        ({"tools": ("python",)}, {"extra_info": {"tools_kwargs": {"sql": {}}}}, "tools_kwargs: there is no tool sql;"),
        ({"default_agent_loop": "mine"}, {}, "agent_name=mine: there is no such agent loop"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_rejected_with_its_name_and_a_fix(own, settings, row, said) -> None:
    settings = {k: v.format(file=own) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(ConfigError) as raised:
        check_environments(environments_of(**settings), [row])
    assert said in str(raised.value)


def test_all_faults_are_reported_together_and_a_row_of_each_kind_is_tried_once(monkeypatch) -> None:
    tried = []

    class Counted(GuessNumber):
        def __init__(self, config, row) -> None:
            tried.append(row)
            super().__init__(config, row)

    rows = [{**GAME, "env_class": "guess_number"}] * 3 + [{"env_class": "wordle5"}, {"env_class": "chess"}]
    monkeypatch.setitem(ENVIRONMENTS, "guess_number", Counted)
    with pytest.raises(ConfigError) as raised:
        check_environments(environments_of(tools=("hammer",)), rows)
    assert len(tried) == 1
    assert len(raised.value.findings) == 3
    assert "hammer" in str(raised.value) and "row 3: environment wordle5" in str(raised.value)


def test_a_row_selects_among_the_tools() -> None:
    settings = environments_of(tools=("calculator", "python"))
    row = {"extra_info": {"tool_selection": np.array(["python"]), "tools_kwargs": {"search": None}}}
    for one, selected in (({}, ["calculator", "python"]), (row, ["python"])):
        assert [tool["function"]["name"] for tool in made(one, settings).tools] == selected
