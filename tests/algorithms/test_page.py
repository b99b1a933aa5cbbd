"""docs/algorithms.md names all there is, names no key that is not, and its own examples compute."""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch

from hybridrl.algorithms.estimators import ESTIMATORS
from hybridrl.algorithms.policy_losses import POLICY_LOSSES
from hybridrl.algorithms.rollout_rejection import OPTIONS
from hybridrl.algorithms.settings import AdvantageSettings, LossSettings
from hybridrl.config.custom_code import load_function
from hybridrl.config.names import hints, tree
from hybridrl.config.schema import PPOConfig
from hybridrl.config.schema_algorithm import RolloutCorrectionConfig
from hybridrl.config.values import Aggregation, KLForm

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
CODE = re.findall(r"```.*?```|`[^`\n]+`", PAGE, re.DOTALL)
SECTIONS = "algorithm|actor_rollout_ref|critic|reward|data|trainer"

LEVELS = get_args(get_args(hints(RolloutCorrectionConfig)["rollout_is"])[0])
NOT_TO_CHOOSE = {"likelihood", "reinforce"}  # supervised fine-tuning's, and bypass mode's own


@pytest.mark.parametrize(
    "names",
    [ESTIMATORS, POLICY_LOSSES.keys() - NOT_TO_CHOOSE, get_args(Aggregation), get_args(KLForm), LEVELS, OPTIONS],
    ids=["estimators", "policy losses", "aggregations", "KL forms", "correction levels", "rejections"],
)
def test_every_name_that_can_be_chosen_is_on_the_page(names: set[str]) -> None:
    assert names
    assert [name for name in names if f"`{name}`" not in CODE] == []


def test_every_key_on_the_page_exists() -> None:
    keys = {key for code in CODE for key in re.findall(rf"(?<![\w.])(?:{SECTIONS})\.[\w.]+", code)}
    assert len(keys) > 50
    assert keys - tree(PPOConfig).keys() == set()


def test_the_examples_of_own_functions_compute(make_batch, tmp_path) -> None:
    file = tmp_path / "my_algorithms.py"
    file.write_text(next(code for code in CODE if code.startswith("```python")).strip("`").removeprefix("python"))
    batch = make_batch(
        [2, 1, 1], group=[0, 0, 0], token_rewards=[0.0, 1.0, 3.0, 2.0], response_mask=[True, False, True, True]
    )
    advantages, _ = load_function(f"{file}:above_median", "key")(batch, AdvantageSettings())
    assert advantages.tolist() == [-1, 0, 1, 0]

    batch.advantages, batch.old_log_probs = advantages, torch.full((4,), -1.0)
    log_probs = torch.full((4,), -1.0, requires_grad=True)
    loss, statistics = load_function(f"{file}:square_root", "key")(log_probs, batch, LossSettings())
    loss.sum().backward()
    assert log_probs.grad.tolist() == [1, 0, -1, 0]  # where nothing has moved, that of -A log p
    assert not statistics["ratio"].requires_grad
