import importlib

import pytest

from hybridrl.config import ConfigError
from hybridrl.rewards.load import load_reward
from hybridrl.rewards.verl_names import EQUIVALENTS

SCORE = "def compute_score(solution_str): return 1.0"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("from verl.utils.reward_score.gsm8k import compute_score as old", "hybridrl.rewards.scorers.gsm8k here"),
        ("from verl.utils.reward_score import math_verify", "hybridrl.rewards.scorers.math here"),
        ("import verl.utils.reward_score.math_dapo", "hybridrl.rewards.scorers.math_dapo here"),
        ("from verl.utils.reward_score import default_compute_score", "hybridrl.rewards.built_in.compute_score here"),
        ("def later():\n    from verl.utils.reward_score import prime_code", "hybridrl.rewards.scorers.code here"),
        ("from verl import DataProto", "no equivalent here"),
    ],
)
def test_an_import_from_verl_is_refused_with_the_name_here(reward_config, line, told):
    with pytest.raises(ConfigError) as raised:
        load_reward(reward_config(f"{line}\n{SCORE}"))
    assert "verl is not installed" in str(raised.value) and told in str(raised.value)
    assert f"line {1 + line.count(chr(10))} imports verl" in str(raised.value)


def test_an_import_that_may_fail_is_left_alone(reward_config):
    source = (
        f"try:\n    import verl.utils\nexcept ImportError:\n    verl = None\nimport verlanguage_is_no_verl\n{SCORE}"
    )
    with pytest.raises(ConfigError, match="does not import: ModuleNotFoundError: No module named 'verlanguage"):
        load_reward(reward_config(source))


def test_every_name_here_exists():
    for name in EQUIVALENTS.values():
        module, _, member = name.rpartition(".")
        found = importlib.import_module(module)
        assert member in vars(found) or importlib.import_module(name)
