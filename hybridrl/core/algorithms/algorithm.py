"""The algorithm of a step: its needs, the computation of advantages from rewards, and the lookup of functions."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor

from hybridrl import plugins
from hybridrl.config import catalog
from hybridrl.config.catalog import (
    ENTROPY,
    ESTIMATORS,
    FULL_KL,
    POLICY_LOSSES,
    POLICY_READS,
    POLICY_TERM,
    SAMPLED_KL,
    Estimator,
    LossTerm,
    PolicyLoss,
)
from hybridrl.config.custom_code import bind_named, load_function
from hybridrl.config.findings import ConfigError
from hybridrl.config.values import Aggregation
from hybridrl.core.algorithms.objective import KLWeight, penalized
from hybridrl.core.algorithms.rollout_correction import RolloutCorrection
from hybridrl.core.batch import Batch
from hybridrl.core.carried import TEACHER, declared_names
from hybridrl.required import required


@dataclass(frozen=True)
class ForwardSpec:
    """The outputs of a language model to compute in addition to log-probs; other models have one output."""

    temperature: float = 1.0
    entropies: bool = False
    sum_pi_squared: bool = False
    against: str = ""  # a model: also the exact KL to it, over the whole vocabulary


@dataclass(frozen=True)
class Signal:
    """Fields of the batch that a model's forward pass fills before the advantages: its outputs in their order.

    The values are those of response tokens. Other Python packages add a signal as the plug-in `signal.FIELD`, used
    where `reads` of the estimator or of a loss term names this carried field.
    """

    fields: tuple[str, ...]
    model: str
    spec: ForwardSpec = ForwardSpec()
    rows: tuple[str, float] | None = None  # a field per row and its value in the rows that are filled; None: all
    timing: str = ""  # key of its seconds, in timing_s/; default: the first field


@dataclass
class Algorithm:
    """The part of a step between the rewards and the update.

    `estimator` is a function of the step's rows, with its parameters bound, and `entry` its catalog entry.
    `kl_in_reward` is the form of a KL penalty, or None. `bypass` uses the rollout log-probs as old log-probs; otherwise
    `correction` weights and masks tokens by the difference of the two. `terms` are those of the policy's loss, and
    `signals` are filled in this order.
    """

    estimator: Callable[[Batch], tuple[Tensor, Tensor]]
    entry: Estimator = field(default_factory=lambda: Estimator("", ""))
    kl_in_reward: str | None = None
    kl_weight: KLWeight = field(default_factory=lambda: KLWeight(0.0))
    correction: RolloutCorrection | None = None
    bypass: bool = False
    signals: tuple[Signal, ...] = ()
    terms: tuple[LossTerm, ...] = ()
    teachers: tuple[str, ...] = ()  # names of models
    # Models that follow the policy: every N steps they move towards its weights, by a share of the distance.
    copies: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    scorers: tuple[str, ...] = ()  # names of models, whose scores are known before the batch

    @property
    def models(self) -> list[str]:
        """Return the names of the models in the order in which every rank builds them; the policy's is `actor`."""
        compared = ["reference"] * (self.kl_in_reward == "full")
        compared += [term.against for term in self.terms if term.against != TEACHER] + [*self.teachers]
        named = ["actor", *compared, *(name for signal in self.signals for name in (signal.model, signal.spec.against))]
        return [*filter(None, dict.fromkeys([*named, *self.scorers]))]

    @property
    def needs_old_log_probs(self) -> bool:
        """Return whether advantages depend on a forward pass of the policy, which then precedes the update."""
        if self.kl_in_reward == "full":
            return True
        corrects = self.correction is not None and not self.correction.fits_update
        reads = self.kl_in_reward is not None or corrects or self.entry.reads_probabilities
        return reads and not self.bypass

    def advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Fill token rewards, advantages and returns; metrics of the KL penalty, the correction and the
        estimator, if any. Without old log-probs the update computes the importance weights.

        An episode counts once, whatever the number of its rows: the estimator sees its tokens as one row.
        """
        token_rewards, whole = batch.token_rewards, batch.by_episode()
        if token_rewards is None:
            token_rewards = torch.zeros(batch.response_ids.shape).index_add_(
                0, whole.last_tokens, required(whole.rewards)
            )
        batch = replace(batch, token_rewards=token_rewards)
        metrics: dict[str, float] = {}
        if self.kl_in_reward is not None:
            weight = self.kl_weight.value
            token_rewards, kl = penalized(batch.by_episode(), self.kl_in_reward, weight)
            self.kl_weight.update(kl, len(whole))
            batch = replace(batch, token_rewards=token_rewards)
            metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": weight}
        corrected = batch
        if self.correction is not None and not self.bypass and batch.old_log_probs is not None:
            corrected, correction_metrics = self.correction.apply(batch)
            metrics |= correction_metrics
        # The estimator sees the mask before rejections: a rejected token is not trained on (its advantage becomes 0
        # below), and its reward and its value still belong to the tokens before it.
        written = replace(corrected, response_mask=batch.response_mask)
        rows = written.by_episode()
        if ":" in self.entry.name:  # custom code may change its input, and carried fields may be large
            carried = {name: value for name, value in rows.carried.items() if name in self.entry.reads}
            rows = deepcopy(replace(rows, carried=carried))
        advantages, returns, *logged = self.estimator(rows)
        metrics |= {f"algorithm/{name}": float(value) for statistics in logged for name, value in statistics.items()}
        rejected = required(batch.response_mask) & ~required(corrected.response_mask)
        advantages, returns = advantages.masked_fill(rejected, 0), returns.masked_fill(rejected, 0)
        return replace(corrected, advantages=advantages, returns=returns), metrics

    def state_dict(self) -> dict[str, Any]:
        return {"kl_weight": self.kl_weight.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_weight.value = state["kl_weight"]


# -- from the name of an estimator or a policy loss to its catalog entry and its function ------------------------------
#
# A name is in the catalog, or is path/to/file.py:function: a custom function. The attributes of a custom function are
# the facts of its entry. Functions are imported when they are looked up.

# Further names in the namespace `settings` of custom functions, with the configuration keys that they stand for.
SETTINGS = {
    "normalise": "norm_adv_by_std_in_grpo",
    "part_weights": "gdpo_reward_weights",
    "clip_low": "clip_ratio_low",
    "clip_high": "clip_ratio_high",
    "clip_dual": "clip_ratio_c",
    "tau_positive": "tau_pos",
    "tau_negative": "tau_neg",
    "clip_cov_share": "clip_cov_ratio",
    "clip_cov_least": "clip_cov_lb",
    "clip_cov_most": "clip_cov_ub",
    "kl_cov_share": "kl_cov_ratio",
    "kl_cov_weight": "ppo_kl_coef",
    "dro_weight": "dro_beta",
}


@cache
def find_estimator(name: str) -> tuple[Estimator, Callable[..., Any]]:
    """The entry and the function of an advantage estimator; ConfigError if there is none."""
    key = "algorithm.adv_estimator"
    entry, function = _find(name, key, ESTIMATORS, Estimator)
    return entry, function


@cache
def find_policy_loss(name: str) -> tuple[PolicyLoss, Callable[..., Any]]:
    """The entry and the function of a policy loss; ConfigError if there is none."""
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    entry, function = _find(name, key, POLICY_LOSSES, PolicyLoss)
    _check(entry.aggregation, (None, *get_args(Aggregation)), f"{key}={name}: its attribute aggregation")
    return entry, function


def loss_terms(
    policy_loss: str | None,
    entropy_coeff: float = 0.0,
    kl_form: str | None = None,
    kl_coef: float = 0.0,
    teaching: LossTerm | None = None,
) -> tuple[LossTerm, ...]:
    """The terms of the policy's loss: a policy loss (None: without), less the entropy, plus the KL to the reference in
    one of the forms of `kl_estimate` or "full" (None: without), a term of the teachers, and those that a custom policy
    loss names."""
    entry, terms = PolicyLoss("", "", by_token=True), []
    if policy_loss is not None:
        entry, _ = find_policy_loss(policy_loss)
        options = {"aggregation": entry.aggregation, "by_token": entry.by_token}
        terms.append(LossTerm(POLICY_TERM, policy_loss, reads=(*POLICY_READS, *entry.reads), **options))
    if entropy_coeff:
        terms.append(replace(ENTROPY, weight=-entropy_coeff))
    if kl_form == "full":
        terms.append(replace(FULL_KL, weight=kl_coef))
    elif kl_form is not None:
        terms.append(replace(SAMPLED_KL, weight=kl_coef, parameters={"form": kl_form}))
    terms += [teaching] if teaching else []
    terms += [plugins.load(f"term.{name}") for name in entry.terms]
    compared = {term.against for term in terms if term.against not in ("", TEACHER)}
    if len(compared) > 1 or len({term.name for term in terms}) < len(terms):
        names = ", ".join(f"{term.name} ({term.against})" if term.against else term.name for term in terms)
        cause = (
            "terms of a loss have different names, and the policy is compared with one model over the whole vocabulary"
        )
        raise ConfigError(f"{cause}: {names}", fix=f"change the attribute terms of {policy_loss}, or kl_loss_type")
    return tuple(terms)


def _find(name: str, key: str, entries: Mapping[str, Any], kind: type) -> tuple[Any, Callable[..., Any]]:
    if name in entries:
        return entries[name], imported(entries[name].function)
    function = load_function(name, key)
    facts = {item.name: getattr(function, item.name) for item in fields(kind)[2:] if hasattr(function, item.name)}
    field_names = get_args(catalog.Field) if kind is Estimator else ()
    for item in facts.get("reads", ()):
        _check(item, (*field_names, *declared_names()), f"{key}={name}: its attribute reads")
    for item in facts.get("terms", ()):
        _check(item, tuple(plugins.names("term")), f"{key}={name}: its attribute terms")
    return kind(name, name, **facts), function


def imported(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function at "module:function"; a function is returned unchanged."""
    if callable(function):
        return function
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)


def bind(function: Callable[..., Any], values: Mapping[str, Any], rows: int = 1) -> Callable[..., Any]:
    """Return the function with its parameters bound to the values of their names; the first `rows` arguments are left
    to the caller. Custom functions may have one further positional parameter with any other name: it is bound to a
    namespace of all values."""
    parameters = list(signature(function).parameters.values())
    further = [item.name for item in parameters[rows:] if item.kind is Parameter.POSITIONAL_OR_KEYWORD]
    if further and further[0] not in values:
        present = {name: values[key] for name, key in SETTINGS.items() if key in values}
        values = {**values, further[0]: SimpleNamespace(**values, **present)}
    return bind_named(function, values)


def _check(value: Any, choices: tuple[Any, ...], subject: str) -> None:
    if value not in choices:
        names = ", ".join(name for name in choices if name)
        raise ConfigError(f"{subject} names {value!r}", fix=f"choose from {names}")
