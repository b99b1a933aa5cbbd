"""`python -m hybridrl.doctor algorithm FILE.py:NAME`: what a custom estimator or loss makes of made-up groups.

The groups and the checks are those of a run that starts (runs/algorithm_trial.py). Reads no data and starts nothing.
"""

import argparse
from collections.abc import Callable
from inspect import signature
from typing import Any

from rich.table import Table
from rich.text import Text
from torch import Tensor

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.compose import CONF, SHIPPED
from hybridrl.config.custom_code import load_function
from hybridrl.config.load import resolve_config
from hybridrl.config.schema_parts import AlgorithmConfig
from hybridrl.core.algorithms.algorithm import bind, find_estimator
from hybridrl.core.batch import Batch
from hybridrl.runs.algorithm_trial import LOSS, toy_batch, toy_update, try_estimator, try_policy_loss
from hybridrl.runs.settings import build_algorithm, build_policy_plan
from hybridrl.tracking.console import Terminal

ESTIMATOR = "algorithm.adv_estimator"
# What a configuration must have, and groups to compare; the command's own keys come after these.
SUPPOSED = ("data.train_files=rows.jsonl", "actor_rollout_ref.model.path=some/model", "actor_rollout_ref.rollout.n=4")


def main(argv: list[str]) -> int:
    """Return 1 if a run would reject the function, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor algorithm",
        description="Call a custom estimator or loss with made-up groups; shows what it returns, next to grpo or ppo.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", metavar="FILE.py:NAME", help="an estimator, or a loss: its first parameter is log_probs"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the run: parameters, rollout.n, own")
    options = parser.parse_args(argv)
    console = Terminal(highlight=False)
    try:
        first = next(iter(signature(load_function(options.name, "algorithm")).parameters), "")
        is_loss = first == "log_probs"
        config = _configuration([*SUPPOSED, f"{LOSS if is_loss else ESTIMATOR}={options.name}", *options.overrides])
        if is_loss:
            table = _losses(options.name, build_policy_plan(config).loss.parameters)
        else:
            estimator = build_algorithm(config).estimator
            table = _advantages(options.name, estimator, config.algorithm, config.actor_rollout_ref.rollout.n)
    except ConfigError as error:
        console.print(Text(str(error)), style="bold red", soft_wrap=True)
        return 1
    console.print(table)
    return 0


def _configuration(overrides: list[str]) -> PPOConfig:
    resolved = resolve_config(PPOConfig, overrides, SHIPPED[PPOConfig], CONF, offline=True)
    resolved.findings.close()
    assert resolved.config is not None
    return resolved.config


def _advantages(name: str, estimator: Callable[[Batch], Any], algorithm: AlgorithmConfig, samples: int) -> Table:
    parts, batch = len(algorithm.gdpo_reward_keys), toy_batch(samples)
    ours, _, metrics = try_estimator(name, estimator, samples, parts)
    grpo = bind(find_estimator("grpo")[1], vars(algorithm))
    theirs, *_ = try_estimator("grpo", grpo, samples, parts)
    table = _table("advantages, mean over the tokens of a response", "group", "response", "tokens", "score")
    for title in (name.rpartition(":")[2], "grpo"):
        table.add_column(title, justify="right")
    means = [batch.per_row(values) / batch.response_lengths for values in (ours, theirs)]
    for row in range(len(batch)):
        facts = (batch.group[row], batch.sample[row], batch.response_lengths[row])
        table.add_row(*(str(int(fact)) for fact in facts), *_numbers(batch.rewards[row], *(one[row] for one in means)))
    if metrics:
        table.caption = "logged: " + ", ".join(f"algorithm/{key}={value:.4g}" for key, value in metrics.items())
    return table


def _losses(name: str, parameters: dict[str, Any]) -> Table:
    ours, theirs = try_policy_loss(name, parameters), try_policy_loss("vanilla", parameters)
    batch, log_probs = toy_update()
    table = _table("loss of each token, and its gradient by the log-prob", "response", "advantage", "new/old")
    for title in (name.rpartition(":")[2], "gradient", "ppo", "gradient"):
        table.add_column(title, justify="right")
    ratios = (log_probs.detach() - batch.old_log_probs).exp()
    for token, row in enumerate(batch.response_row.tolist()):
        facts = (batch.advantages[token], ratios[token])
        table.add_row(str(row), *_numbers(*facts, *(one[token] for one in (*ours, *theirs))))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _numbers(*values: Tensor) -> list[str]:
    return [f"{float(value):.3f}" for value in values]
