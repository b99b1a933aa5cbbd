"""Trials before a run: custom functions are called with made-up values before models and rows are read, and plug-ins
try the rows. `hybridrl doctor algorithm FILE.py:NAME` shows what a custom estimator or loss returns."""

import argparse
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from inspect import signature
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl import project_file
from hybridrl.config import PPOConfig
from hybridrl.config.compose import CONF, SHIPPED
from hybridrl.config.custom_code import bind_named, call_custom, load_function
from hybridrl.config.findings import ConfigError, Findings
from hybridrl.config.load import resolve_config
from hybridrl.config.schema import OptimizerConfig
from hybridrl.config.schema_parts import AlgorithmConfig
from hybridrl.core.algorithms.algorithm import bind, find_estimator, find_policy_loss
from hybridrl.core.batch import Batch
from hybridrl.core.carried import declared
from hybridrl.core.training.optimizer import custom_schedule
from hybridrl.data.tokenizer import ResponseDecoder, end_tokens
from hybridrl.health import Diagnosis, History
from hybridrl.health.rules import KEY as RULES
from hybridrl.plugins import load, trials
from hybridrl.required import required
from hybridrl.runs.settings import build_algorithm, build_policy_plan
from hybridrl.tracking.sink import SampleRow, Sink

ESTIMATOR, LOSS = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"
SINKS, RUN = "trainer.logger", ("project_name", "experiment_name")
# Keys with names of plug-ins that are loaded after the trials.
ASKING = {"engine": "actor_rollout_ref.rollout.name", "reward_manager": "reward.reward_manager.name"}
SOME = "on some of the tokens of made-up groups"
PAGE, EXTENSIONS = "docs/algorithms.md", "docs/extensions.md"
UPDATES, STEPS = 10, 20  # length of the synthetic runs for trials of custom schedules and health rules
# Parameters that a custom sink's constructor may have; it gets the ones that it has.
PARAMETERS = ("run_dir", "project", "name", "config", "saved", "offline")
# The calls of a custom sink in its trial.
CALLS: dict[str, tuple[Any, ...]] = {
    "log": (0, {"timing_s/start_up": 1.0}),
    "samples": (0, [SampleRow("2+2?", "4", "4", 1.0)]),
    "state_dict": (),
    "close": (),
}
# Metrics of a healthy step, without the score, which rises.
WELL = {
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "actor/entropy": 0.5,
    "actor/grad_norm": 0.3,
    "response_length/mean": 100.0,
    "timing_s/step": 10.0,
}
GROUPS, LENGTHS, SCORES = 2, (3, 1, 2), (1.0, 0.0, 0.5)  # tokens and scores of the responses, in turn


class Subject(NamedTuple):
    """A configuration to try; later with its tokenizer, and the datasets that could be read, by key or file."""

    config: Any
    tokenizer: PreTrainedTokenizerBase | None = None
    datasets: Mapping[str, Any] = MappingProxyType({})

    @property
    def decoder(self) -> ResponseDecoder | None:
        """The decoder of a run's responses."""
        if self.tokenizer is None:
            return None
        return ResponseDecoder(self.tokenizer, end_tokens(self.config.actor_rollout_ref.model.path, self.tokenizer))


class Trial(NamedTuple):
    """A trial of the function that `key` names, if it `applies`; `run` adds findings, or raises ConfigError."""

    key: str
    applies: Callable[[Subject], bool]
    run: Callable[[Subject, Findings], None]


def run_trials(subject: Subject, findings: Findings) -> None:
    """Run the trials of custom functions, or, if the subject has a tokenizer, the plug-ins `trial.NAME`: hybridrl's
    and those of distributions with another name that is used."""
    chosen = TRIALS
    if subject.tokenizer is not None:
        asked = [f"{kind}.{attrgetter(key)(subject.config)}" for kind, key in ASKING.items()]
        chosen = [load(f"trial.{name}") for name in trials(asked)]
    for trial in chosen:
        if trial.applies(subject):
            with findings.gathered():
                trial.run(subject, findings)


def scored_batch(lengths: Tensor, group: Tensor, sample: Tensor, rewards: Tensor) -> Batch:
    """Return responses of these lengths [B] with their rewards [B], as an estimator reads them."""
    tokens = torch.arange(int(lengths.sum()), dtype=torch.int32)
    batch = Batch(torch.ones_like(lengths), lengths, tokens[: len(lengths)], tokens, group, group, sample)
    return replace(
        batch,
        rewards=rewards,
        token_rewards=torch.zeros(tokens.shape).index_add_(0, batch.last_tokens, rewards),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        response_mask=torch.ones(tokens.shape, dtype=torch.bool),
    )


def toy_batch(samples: int) -> Batch:
    """Return groups of `samples` responses, with the fields that every step fills before advantages."""
    rows = torch.arange(GROUPS * samples)
    lengths, rewards = torch.tensor(LENGTHS)[rows % len(LENGTHS)], torch.tensor(SCORES)[rows % len(SCORES)]
    batch = scored_batch(lengths, rows // samples, rows % samples, rewards)
    return replace(batch, rollout_log_probs=torch.linspace(-2.0, -0.5, int(lengths.sum())))


def with_absent(batch: Batch, names: Iterable[str]) -> Batch:
    """Return the batch with these carried fields, filled as for rows without them."""
    prompt, response = len(batch.prompt_ids), len(batch.response_ids)
    sizes = {"row": len(batch), "prompt": prompt, "response": response, "token": prompt + response, "items": 0}
    fields = {name: declared(name) for name in names}
    counts = {field.lengths: torch.zeros(len(batch), dtype=torch.int64) for field in fields.values() if field.lengths}
    carried = {name: torch.full((sizes[field.axis],), field.absent) for name, field in fields.items()}
    return replace(batch, carried=counts | carried)


def try_estimator(
    name: str, function: Callable[[Batch], Any], samples: int, parts: int
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return the advantages, returns and metrics of an estimator, with its parameters bound, on toy groups of `samples`
    responses with `parts` reward components. Raises ConfigError if it fails, or if a step could not use its
    result."""
    batch = toy_batch(samples)
    per_token = torch.zeros_like(required(batch.token_rewards))
    filled: dict[str, Any] = {
        "values": per_token,
        "greedy_rewards": torch.zeros(len(batch)),
        "reward_parts": torch.stack([required(batch.rewards)] * max(parts, 1), dim=1),
        "old_log_probs": batch.rollout_log_probs,
        "sum_pi_squared": per_token + 0.5,
    }
    reads = find_estimator(name)[0].reads
    batch = replace(batch, **{field: filled[field] for field in reads if field in filled})
    batch = with_absent(batch, [field for field in reads if field not in filled])
    result = call_custom(ESTIMATOR, name, function, batch, page=project_file(PAGE))
    expected = f"advantages and returns, a tensor [{per_token.numel()}] each: a value per response token"
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        raise _unusable(ESTIMATOR, name, f"it returns {_kind(result)}", expected)
    for part, value in zip(("advantages", "returns"), result[:2], strict=True):
        _check(ESTIMATOR, name, part, value, per_token.shape, expected)
    metrics = result[2] if len(result) == 3 else {}
    try:
        return result[0], result[1], {str(key): float(value) for key, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise _unusable(ESTIMATOR, name, f"its metrics are {metrics!r:.80}", "a dict of numbers to log") from error


def toy_update() -> tuple[Batch, Tensor]:
    """Return two groups with advantages, and log-probs of a policy that has moved along them."""
    batch = toy_batch(samples=2).only("response_mask", "rollout_log_probs")
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[batch.response_row]
    batch = replace(batch, advantages=advantages, old_log_probs=batch.rollout_log_probs)
    return batch, (required(batch.rollout_log_probs) + 0.1 * advantages).requires_grad_()


def try_policy_loss(name: str, parameters: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the loss per token of a policy loss on the toy groups, and its gradient by the log-probs. Raises
    ConfigError if it fails, or if an update could not use its result."""
    batch, log_probs = toy_update()
    entry, function = find_policy_loss(name)
    batch = with_absent(batch, entry.reads)
    if entry.token_selector is not None:
        batch = replace(batch, chosen=torch.ones_like(required(batch.response_mask)))
    bound = bind(function, parameters, rows=2)
    result = call_custom(LOSS, name, bound, log_probs, batch, page=project_file(PAGE))
    expected = f"the loss, a tensor [{log_probs.numel()}] with a value per response token, and a dict of statistics"
    if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[1], dict):
        raise _unusable(LOSS, name, f"it returns {_kind(result)}", expected)
    per_token = result[0]
    _check(LOSS, name, "the loss", per_token, log_probs.shape, expected)
    gradient = None
    if per_token.requires_grad:
        (gradient,) = torch.autograd.grad(per_token.sum(), log_probs, allow_unused=True)
    if gradient is None:
        raise _unusable(LOSS, name, "its loss does not depend on the log-probs", "a loss with a gradient")
    _check(LOSS, name, "the gradient", gradient, log_probs.shape, "a loss with a finite gradient")
    if entry.by_token:
        span = slice(1, log_probs.numel() - 1)
        rows, page = batch.tokens(span), project_file(PAGE)
        alone, _ = call_custom(LOSS, name, bound, log_probs[span], rows, trial=SOME, page=page)
        if alone.shape != log_probs[span].shape or not torch.allclose(alone, per_token[span]):
            expected = "a loss that reads a token's own fields, or by_token=False"
            raise _unusable(LOSS, name, "it returns another loss, though it is by_token", expected, SOME)
    return per_token.detach(), gradient


def try_schedule(key: str, config: OptimizerConfig) -> None:
    """Call a custom schedule with each update of a synthetic run, and the next one. Raises ConfigError if it fails, or
    if an update could not use its result."""
    name, function = config.lr_scheduler_type, custom_schedule(config, key)
    for update in range(UPDATES + 1):
        trial = f"at update {update} of {UPDATES}"
        factor = call_custom(key, name, function, update, UPDATES, trial=trial, page=project_file(EXTENSIONS))
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not number or not 0 <= factor < math.inf:
            expected = "the factor of the learning rate, a number of at least 0"
            raise _unusable(key, name, f"it returns {factor!r:.60}", expected, trial)


def custom_sinks(loggers: list[str]) -> dict[str, Callable[..., Sink]]:
    """Return the custom sinks among the loggers, as functions of the values of PARAMETERS."""
    return {name: lambda *values, name=name: _sink_maker(name, *values)() for name in loggers if ":" in name}


def _sink_maker(name: str, *values: Any) -> Callable[[], Sink]:
    return bind_named(load_function(name, SINKS), dict(zip(PARAMETERS, values, strict=True)))


def try_sink(name: str, project: str, run: str) -> None:
    """Make a custom sink with `offline=True` in a temporary directory, log one synthetic step, and close the sink;
    raises ConfigError if it cannot be used."""
    with tempfile.TemporaryDirectory() as directory:
        make = _sink_maker(name, Path(directory), project, run, {}, {}, True)
        sink = call_custom(SINKS, name, make, trial="when it is created", page=EXTENSIONS)
        if not isinstance(sink, Sink):
            cause = f"{SINKS}={name} is not a subclass of hybridrl.tracking.Sink"
            raise ConfigError(cause, fix="derive the class from it", keys=SINKS)
        for method, arguments in CALLS.items():
            function = getattr(sink, method)
            call_custom(SINKS, f"{name}.{method}", function, *arguments, trial="in a trial", page=EXTENSIONS)


def try_rule(name: str) -> None:
    """Apply a custom health rule to a healthy synthetic run, before its first step and after each. Raises ConfigError
    if it fails, or returns anything else than a diagnosis or None."""
    function, history = load_function(name, RULES), History()
    for step in range(STEPS + 1):
        if step:
            history.add(step, {"critic/score/mean": 0.3 + 0.01 * step, **WELL})
        trial = f"after {step} made-up steps"
        diagnosis = call_custom(RULES, name, function, history, trial=trial, page=EXTENSIONS)
        if not isinstance(diagnosis, Diagnosis | None):
            expected = "None, or hybridrl.health.Diagnosis(cause, fix)"
            raise _unusable(RULES, name, f"it returns {diagnosis!r:.60}", expected, trial)


def custom_names(config: Any, key: str) -> list[str]:
    """Return the custom functions that a key names; none if a section is missing or not enabled."""
    value = config
    for part in key.split("."):
        value = getattr(value, part, None)
        if getattr(value, "enable", True) is False:
            return []
    return [name for name in ([value] if isinstance(value, str) else value or []) if ":" in name]


def _of_functions(key: str, call: Callable[[str, Any], object]) -> Trial:
    """Return the trial of the custom functions that a key names: `call` gets each name, and the configuration."""

    def run(subject: Subject, findings: Findings) -> None:
        for name in custom_names(subject.config, key):
            with findings.gathered():
                call(name, subject.config)

    return Trial(key, lambda subject: bool(custom_names(subject.config, key)), run)


def _configured_estimator(name: str, config: Any) -> None:
    samples, parts = config.actor_rollout_ref.rollout.n, len(config.algorithm.gdpo_reward_keys)
    try_estimator(name, build_algorithm(config).estimator, samples, parts)


def _schedule(optimizer: str) -> Trial:
    key = f"{optimizer}.lr_scheduler_type"
    return _of_functions(key, lambda _, config: try_schedule(key, attrgetter(optimizer)(config)))


TRIALS = [
    _of_functions(ESTIMATOR, _configured_estimator),
    _of_functions(LOSS, lambda name, config: try_policy_loss(name, build_policy_plan(config).loss.parameters)),
    _of_functions(SINKS, lambda name, config: try_sink(name, *attrgetter(*RUN)(config.trainer))),
    _of_functions(RULES, lambda name, _: try_rule(name)),
    *map(_schedule, ("actor_rollout_ref.actor.optim", "critic.optim", "optim")),
]


def _check(key: str, name: str, part: str, value: Any, shape: torch.Size, expected: str) -> None:
    if not isinstance(value, Tensor) or value.shape != shape:
        raise _unusable(key, name, f"{part} is {_kind(value)}", expected)
    if not value.isfinite().all():
        raise _unusable(key, name, f"{part} is not finite: {value.tolist()}", expected)


def _unusable(key: str, name: str, what: str, expected: str, trial: str = "on made-up groups") -> ConfigError:
    return ConfigError(f"{key}={name}: {trial} {what}", fix=f"return {expected}", keys=key)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__


# -- the command -------------------------------------------------------------------------------------------------------


# Required keys of a configuration, and groups to compare; the command's own keys come after these.
SUPPOSED = ("data.train_files=rows.jsonl", "actor_rollout_ref.model.path=some/model", "actor_rollout_ref.rollout.n=4")


def show_function(options: argparse.Namespace) -> Table:
    """Return a table of what a custom estimator or loss returns. Raises ConfigError if a run would reject it."""
    first = next(iter(signature(load_function(options.name, "algorithm")).parameters), "")
    is_loss = first == "log_probs"
    overrides = [*SUPPOSED, f"{LOSS if is_loss else ESTIMATOR}={options.name}", *options.overrides]
    config = resolve_config(PPOConfig, overrides, SHIPPED[PPOConfig], CONF, offline=True).accept()
    if is_loss:
        return _losses(options.name, build_policy_plan(config).loss.parameters)
    estimator = build_algorithm(config).estimator
    return _advantages(options.name, estimator, config.algorithm, config.actor_rollout_ref.rollout.n)


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
        table.add_row(str(row), *_numbers(*facts, *(values[token] for values in (*ours, *theirs))))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _numbers(*values: Tensor) -> list[str]:
    return [f"{float(value):.3f}" for value in values]
