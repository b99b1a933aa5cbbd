"""The examples of docs/rewards.md run, and its tables are complete."""

import re
from pathlib import Path

import pytest

from hybridrl.compat.verl.names import NAMES
from hybridrl.config.schema_parts import RewardManagerConfig, RewardManagerModuleConfig
from hybridrl.config.values import REWARD_MANAGERS
from hybridrl.rewards.load import CPU_SECONDS, FAMILIES, SCORERS
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import ScoringRequest

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\w+\.py).*?\n(.*?)```", PAGE, re.DOTALL))
ANSWER = ScoringRequest("test", "1 + 1 = 2", "2", {}, [5, 6, 7])

SCORES = {
    "my_reward.py": 1.0,
    "detailed.py": 1.1,
    "step_by_step.py": 0.997,
    "brevity.py": 0.1,
    "together.py": 1.0,
    "manager.py": 2.0,
}


def test_every_scorer_of_verl_that_has_a_counterpart_is_listed():
    table = PAGE.partition("**A file made for verl**")[2].partition("\n## ")[0]
    graders = {name for module, names in NAMES.items() if "reward_score" in module for name in names}
    assert sorted(name for name in graders if f"{name}`" not in table and name[0] != "_") == []


def test_every_example_is_run():
    assert set(EXAMPLES) == set(SCORES)


@pytest.mark.parametrize("name", SCORES)
def test_an_example_scores_a_response(reward_config, tmp_path, name):
    (tmp_path / name).write_text(EXAMPLES[name])
    reward = tmp_path / ("my_reward.py" if name == "manager.py" else name)
    reward.write_text(EXAMPLES[reward.name])
    config = reward_config(path=str(reward), manager="batch" if name == "together.py" else "naive")
    if name == "manager.py":
        module = RewardManagerModuleConfig(str(tmp_path / name), "custom_reward_manager")
        config.reward_manager = RewardManagerConfig("importlib", "doubled", module)
    with ScorerPool(config) as pool:
        (score,) = [future.result(timeout=20) for future in pool.submit([ANSWER])]
    assert score.value == pytest.approx(SCORES[name]), score


def test_the_tables_name_every_manager_and_every_scorer():
    for name in (*REWARD_MANAGERS, *SCORERS, *(f"{beginning}*" for beginning in FAMILIES)):
        assert f"`{name}`" in PAGE


def test_the_limit_of_cpu_time_is_the_one_that_holds():
    assert f"Every response has {CPU_SECONDS}\nseconds of CPU time" in PAGE
