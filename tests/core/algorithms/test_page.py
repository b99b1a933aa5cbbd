"""docs/algorithms.md names everything that can be chosen and only existing keys, and its examples compute."""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch

from hybridrl.config.catalog import ESTIMATOR_NAMES, ESTIMATORS, POLICY_LOSS_NAMES, POLICY_LOSSES
from hybridrl.config.schema import PPOConfig
from hybridrl.config.schema_parts import RejectionForm, RolloutCorrectionConfig
from hybridrl.config.values import Aggregation, KLForm, hints, tree
from hybridrl.core.algorithms.algorithm import bind, find_estimator, find_policy_loss
from hybridrl.required import required

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
CODE = re.findall(r"```.*?```|`[^`\n]+`", PAGE, re.DOTALL)
SECTIONS = "algorithm|actor_rollout_ref|critic|reward|data|trainer"

LEVELS = get_args(get_args(hints(RolloutCorrectionConfig)["rollout_is"])[0])


@pytest.mark.parametrize(
    "names",
    [ESTIMATOR_NAMES, POLICY_LOSS_NAMES, get_args(Aggregation), get_args(KLForm), LEVELS, get_args(RejectionForm)],
    ids=["estimators", "policy losses", "aggregations", "KL forms", "correction levels", "rejections"],
)
def test_every_name_that_can_be_chosen_is_on_the_page(names: set[str]) -> None:
    assert names
    assert [name for name in names if f"`{name}`" not in CODE] == []


def test_every_key_on_the_page_exists() -> None:
    keys = {key for code in CODE for key in re.findall(rf"(?<![\w.])(?:{SECTIONS})\.[\w.]+", code)}
    assert len(keys) > 50
    assert keys - tree(PPOConfig).keys() == set()


def estimator_row(name: str) -> str:
    entry = ESTIMATORS[name]
    keys, reads = (", ".join(f"`{item}`" for item in items) for items in (entry.keys, entry.reads))
    return row(f"`{name}`", entry.paper, "yes" if entry.compares_group else "no", reads, keys)


def loss_row(name: str) -> str:
    entry = POLICY_LOSSES[name]
    keys = ", ".join([f"`{key}`" for key in entry.keys] + [f"`policy_loss.{key}`" for key in entry.parameters])
    aggregation = f"`{entry.aggregation}`" if entry.aggregation else ""
    return row(f"`{name}`", entry.paper, "yes" if entry.by_token else "no", aggregation, keys)


def row(name: str, paper: str, *cells: str) -> str:
    return f"| {' | '.join([name, f'[{paper}](https://arxiv.org/abs/{paper})', *cells])} |".replace("|  |", "| |")


@pytest.mark.parametrize(
    "expected", [*map(estimator_row, ESTIMATOR_NAMES), *map(loss_row, POLICY_LOSS_NAMES)], ids=lambda line: line[:30]
)
def test_the_tables_state_the_facts_of_the_catalog(expected: str) -> None:
    assert expected in PAGE.splitlines()


EXAMPLES = [code.strip("`").removeprefix("python") for code in CODE if code.startswith("```python")]


def test_the_example_for_a_tensordict_computes(make_batch, tmp_path) -> None:
    (tmp_path / "my_estimator.py").write_text(EXAMPLES[1])
    _, function = find_estimator(f"{tmp_path}/my_estimator.py:estimator")
    batch = make_batch([2, 1], token_rewards=[1.0, 2.0, 3.0], response_mask=[True, False, True])
    advantages, returns = bind(function, {})(batch)
    assert (advantages.tolist(), returns.tolist()) == ([1.5, 0, 3], [1.5, 1.5, 3])


def test_the_examples_of_custom_functions_compute(make_batch, tmp_path) -> None:
    file = tmp_path / "my_algorithms.py"
    file.write_text(EXAMPLES[0])
    mask = [True, False, True, True]
    batch = make_batch([2, 1, 1], group=[0, 0, 0], token_rewards=[0.0, 1.0, 3.0, 2.0], response_mask=mask)
    entry, function = find_estimator(f"{file}:above_median")
    advantages, _ = bind(function, {"gamma": 1.0})(batch)
    assert advantages.tolist() == [-1, 0, 1, 0]
    assert entry.compares_group

    batch.advantages, batch.old_log_probs = advantages, torch.full((4,), -1.0)
    log_probs = torch.full((4,), -1.0, requires_grad=True)
    entry, function = find_policy_loss(f"{file}:square_root")
    loss, statistics = bind(function, {"clip_ratio_c": 3.0}, rows=2)(log_probs, batch)
    loss.sum().backward()
    assert required(log_probs.grad).tolist() == [1, 0, -1, 0]  # where nothing has moved, that of -A log p
    assert not statistics["ratio"].requires_grad
    assert entry.by_token
