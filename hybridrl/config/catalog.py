"""The catalog of algorithms: every fact about each advantage estimator and each policy loss, one entry per name; and
the families of models that cannot be trained.

Configuration, help, checks, driver and workers read these entries; no other place knows an algorithm by its name. A
function is named by its module and imported only in the process that calls it, so nothing heavy is imported here.

To add an algorithm, write its function and its entry; a new parameter of a policy loss needs a line in
conf/actor/default.yaml as well. A custom function (path/to/file.py:function) states the same facts as attributes of the
function, under the names of the fields below.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hybridrl import plugins
from hybridrl.config.values import AboveZero, Aggregation, NonNegative, ShareAboveZero

# Fields of the batch that an estimator may read in addition to rewards. The critic fills `values`, a greedy response
# per prompt `greedy_rewards`, algorithm.gdpo_reward_keys `reward_parts`, a forward pass of the policy the last two.
Field = Literal["values", "greedy_rewards", "reward_parts", "old_log_probs", "sum_pi_squared"]


@dataclass(frozen=True)
class Parameter:
    """A key of actor_rollout_ref.actor.policy_loss that a policy loss takes as a keyword argument of the same name.

    `type`: type of the key; its default and meaning are in conf/actor/default.yaml. A parameter with a `suggestion` has
    no default (it is null there): the user must set it, and the error suggests that value.
    """

    type: Any
    suggestion: float | None = None


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: `function` is "module:function", a function of the step's rows.

    `keys`: keys of the section `algorithm`, passed as keyword arguments. `reads`: fields of the batch that it needs in
    addition to rewards, a Field or the name of a carried one (core/carried.py). `compares_group`: it compares the
    responses to a prompt, so that a single response has no signal.
    """

    name: str
    function: str
    keys: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    compares_group: bool = False
    paper: str = ""

    @property
    def reads_probabilities(self) -> bool:
        """Whether advantages depend on the probabilities that the trained policy gives to the sampled tokens."""
        return "sum_pi_squared" in self.reads or "old_log_probs" in self.reads


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss: `function` is "module:function", a function of log-probs and the rows of a micro-batch.

    `keys`: keys of actor_rollout_ref.actor, passed as keyword arguments; `parameters`: those of its subsection
    policy_loss. `by_token`: the loss of a token depends on its own log-prob and the fields of token and row alone. It
    is then called for a span of tokens as well: the gradient is computed together with the log-probs, with the logits
    formed once instead of twice. `aggregation` replaces
    loss_agg_mode. `clips_ratio`: quantity in the window clip_ratio_low to clip_ratio_high. `token_selector`: function
    that fills the batch's `chosen` once per mini-batch. A loss that is not `selectable` cannot be set as loss_mode:
    bypass mode or supervised fine-tuning uses it.
    """

    name: str
    function: str
    keys: tuple[str, ...] = ()
    parameters: dict[str, Parameter] = field(default_factory=dict)
    by_token: bool = False
    aggregation: Aggregation | None = None
    clips_ratio: Literal["ratio", "log_ratio"] | None = None
    token_selector: str | Callable[..., Any] | None = None
    selectable: bool = True
    reads: tuple[str, ...] = ()  # names of carried fields
    terms: tuple[str, ...] = ()  # names of plug-ins `term.NAME`: further terms of the loss
    paper: str = ""


Output = Literal["entropies", "entropy_gradient", "sum_pi_squared"]  # options of OutputSpec


class Divergence(NamedTuple):
    """A divergence of the policy from another model."""

    kind: Literal["reverse_kl", "forward_kl", "jsd", "forward_kl_topk"] = "reverse_kl"
    beta: float = 0.5  # the other model's share of the mixture of a JSD, in (0, 1)
    least: float | None = None  # smaller log-probs of the policy count as this in forward_kl_topk


REVERSE_KL = Divergence()


@dataclass(frozen=True)
class LossTerm:
    """A term of the policy's loss: `weight` times the weighted sum of its tokens' losses, logged as `NAME_loss`.

    `function` ("module:function") maps a model's outputs (`TokenOutputs`) and the rows of a micro-batch to the loss per
    response token and to statistics per token; the policy's term, POLICY_TERM, names a policy loss instead. Keyword
    arguments are `parameters` and the values of the policy loss. Outputs and fields of the batch are 0 on tokens that
    the policy did not write. `by_token`: as that of a policy loss.
    """

    name: str
    function: str
    weight: float = 1.0
    parameters: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()  # fields of the batch, and names of carried fields, that are sent to the ranks
    outputs: tuple[Output, ...] = ()  # in addition to log-probs
    # The model with which the policy is compared over the whole vocabulary; "teacher": the one that teaches the row.
    against: str = ""
    divergence: Divergence = REVERSE_KL  # from the teacher
    mask: str = ""  # a bool field per row or response token: only its tokens count, with divisors of their own
    aggregation: Aggregation | None = None  # None: that of the run
    by_token: bool = True


_PLACE = "hybridrl.core.algorithms.estimators"
_NORMALIZE = ("norm_adv_by_std_in_grpo",)
_PROBABILITIES: tuple[Field, ...] = ("old_log_probs", "sum_pi_squared")
_BASELINE = "optimal_token_baseline"

# Name, function, keys, reads, compares_group, paper.
_ESTIMATORS = (
    Estimator("gae", f"{_PLACE}:gae", ("gamma", "lam"), ("values",), False, "1506.02438"),
    Estimator("grpo", f"{_PLACE}:grpo", _NORMALIZE, (), True, "2402.03300"),
    Estimator("grpo_vectorized", f"{_PLACE}:grpo", _NORMALIZE, (), True, "2402.03300"),
    Estimator("grpo_passk", f"{_PLACE}:grpo_passk", _NORMALIZE, (), True, "2503.19595"),
    Estimator("rloo", f"{_PLACE}:rloo", (), (), True, "2402.14740"),
    Estimator("rloo_vectorized", f"{_PLACE}:rloo", (), (), True, "2402.14740"),
    Estimator("reinforce_plus_plus", f"{_PLACE}:reinforce_plus_plus", ("gamma",), (), False, "2501.03262"),
    Estimator("reinforce_plus_plus_baseline", f"{_PLACE}:reinforce_plus_plus_baseline", (), (), True, "2501.03262"),
    Estimator("remax", f"{_PLACE}:remax", (), ("greedy_rewards",), False, "2310.10505"),
    Estimator("opo", f"{_PLACE}:opo", (), (), True, "2505.23585"),
    Estimator("gpg", f"{_PLACE}:gpg", (), (), True, "2504.02546"),
    Estimator(_BASELINE, f"{_PLACE}:{_BASELINE}", (), _PROBABILITIES, True, "2602.07078"),
    Estimator(f"tir_{_BASELINE}", f"{_PLACE}:tir_{_BASELINE}", (), _PROBABILITIES, True, "2602.07078"),
    Estimator("gdpo", f"{_PLACE}:gdpo", (*_NORMALIZE, "gdpo_reward_weights"), ("reward_parts",), True, "2601.05242"),
)

_LOSSES = "hybridrl.core.algorithms.policy_losses"
_WINDOW = ("clip_ratio_low", "clip_ratio_high")
_DUAL = (*_WINDOW, "clip_ratio_c")
_TAU = ("tau_pos", "tau_neg")
_BY_ROW: Aggregation = "seq-mean-token-mean"
_CLIP_COV = {"clip_cov_ratio": Parameter(ShareAboveZero)}
_CLIP_COV |= {"clip_cov_lb": Parameter(float), "clip_cov_ub": Parameter(float)}
_KL_COV = {"kl_cov_ratio": Parameter(ShareAboveZero), "ppo_kl_coef": Parameter(NonNegative)}
_DRO = {"dro_beta": Parameter(AboveZero, suggestion=0.1)}

# Name, function, keys, parameters, by_token, aggregation, clips_ratio, token_selector.
_POLICY_LOSSES = (
    PolicyLoss("vanilla", f"{_LOSSES}:vanilla", _DUAL, {}, True, None, "ratio", paper="1707.06347"),
    PolicyLoss("gspo", f"{_LOSSES}:gspo", _WINDOW, {}, False, _BY_ROW, "ratio", paper="2507.18071"),
    PolicyLoss("cispo", f"{_LOSSES}:cispo", _WINDOW, {}, True, paper="2506.13585"),
    PolicyLoss("sapo", f"{_LOSSES}:sapo", _TAU, {}, True, _BY_ROW, paper="2511.20347"),
    PolicyLoss("geo_mean", f"{_LOSSES}:geo_mean", _WINDOW, {}, False, _BY_ROW, "log_ratio", paper="2507.20673"),
    PolicyLoss("gmpo", f"{_LOSSES}:geo_mean", _WINDOW, {}, False, _BY_ROW, "log_ratio", paper="2507.20673"),
    PolicyLoss("gpg", f"{_LOSSES}:group_policy_gradient", (), {}, True, paper="2504.02546"),
    PolicyLoss(
        "clip_cov", f"{_LOSSES}:clip_cov", _WINDOW, _CLIP_COV, True, None, "ratio",
        f"{_LOSSES}:select_clipped", paper="2505.22617"
    ),
    PolicyLoss(
        "kl_cov", f"{_LOSSES}:kl_cov", (), _KL_COV, True, None, None,
        f"{_LOSSES}:select_penalized", paper="2505.22617"
    ),
    PolicyLoss("dppo_tv", f"{_LOSSES}:dppo_tv", _DUAL, {}, True, paper="2602.04879"),
    PolicyLoss("dppo_kl", f"{_LOSSES}:dppo_kl", _DUAL, {}, True, paper="2602.04879"),
    PolicyLoss("dro", f"{_LOSSES}:dro", (), _DRO, True, paper="2405.19107"),
    PolicyLoss("reinforce", f"{_LOSSES}:reinforce", (), {}, True, selectable=False),
    PolicyLoss("likelihood", f"{_LOSSES}:likelihood", (), {}, True, selectable=False)
)  # fmt: skip

POLICY_TERM = "pg"
# Fields that every policy loss may read, as well as `response_mask` and its `reads`.
POLICY_READS = (
    "old_log_probs",
    "reference_log_probs",
    "rollout_log_probs",
    "advantages",
    "importance_weights",
    "chosen",
)
_TERMS = "hybridrl.core.training.losses"
ENTROPY = LossTerm("entropy", f"{_TERMS}:entropy", outputs=("entropies", "entropy_gradient"))
SAMPLED_KL = LossTerm("kl", f"{_TERMS}:sampled_kl", reads=("reference_log_probs",))
FULL_KL = LossTerm("kl", f"{_TERMS}:full_kl", against="reference")

EXACT_TEACHER = LossTerm("distillation", f"{_TERMS}:exact_divergence", against="teacher")
TOP_TEACHER = LossTerm("distillation", f"{_TERMS}:exact_divergence", reads=("teacher_top",))
SAMPLED_TEACHER = LossTerm("distillation", f"{_TERMS}:sampled_divergence", reads=("teacher_log_probs",))
TEACHER_REWARD = LossTerm(
    "distillation", f"{_TERMS}:teacher_reward", reads=("teacher_log_probs", "old_log_probs", "importance_weights")
)

ESTIMATORS = {entry.name: entry for entry in _ESTIMATORS}
POLICY_LOSSES = {entry.name: entry for entry in _POLICY_LOSSES}

# Values of algorithm.rollout_correction.loss_type, and the policy loss that replaces loss_mode.
BYPASS_LOSSES = {"ppo_clip": None, "reinforce": "reinforce"}

DEFAULT_POLICY_LOSS = "vanilla"
SFT_POLICY_LOSS = "likelihood"

ESTIMATOR_NAMES = tuple(ESTIMATORS)
POLICY_LOSS_NAMES = tuple(entry.name for entry in _POLICY_LOSSES if entry.selectable)

ESTIMATOR_KEYS = tuple(dict.fromkeys(key for entry in _ESTIMATORS for key in entry.keys))
ACTOR_KEYS = tuple(dict.fromkeys(key for entry in _POLICY_LOSSES for key in entry.keys))
PARAMETERS = {name: parameter for entry in _POLICY_LOSSES for name, parameter in entry.parameters.items()}


def parameter_types() -> list[tuple[str, Any]]:
    """Name and type of every key of actor_rollout_ref.actor.policy_loss that a policy loss takes, for the schema."""
    return [(name, item.type if item.suggestion is None else item.type | None) for name, item in PARAMETERS.items()]


# -- families of models ------------------------------------------------------------------------------------------------

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names of their number
NO_PLAN = "transformers has no plan of {} parallelism for the family {}"  # kind, family
RANDOM = re.compile("drop|jitter")  # in the name of a setting that makes training random
CHUNKED = "attention within chunks of the text"
INDEXED = "sparse attention to the tokens that an indexer selects"
UNKNOWN_ATTENTION = "which the trainer's attention for packed rows does not have"
# Setting or word in `layer_types` -> its kind of attention, which packed rows do not support.
OTHER_ATTENTION = {"attention_chunk_size": CHUNKED, "index_topk": INDEXED}
OTHER_LAYERS = {"chunked": CHUNKED, "indexed": INDEXED, "sparse": "sparse attention", "compressed": "compressed keys"}
BOTH_WAYS = "its tokens of a picture attend to later ones of the picture"
SOUNDS = "sounds are not trained"
# Model type -> why no model of this family can be trained.
NOT_TRAINED = {
    **dict.fromkeys(("gemma3", "gemma4", "paligemma"), f"{BOTH_WAYS}, {UNKNOWN_ATTENTION}"),
    "gemma3n": f"{BOTH_WAYS}, {UNKNOWN_ATTENTION}; and {SOUNDS}",
    **dict.fromkeys(("llama4", "llama4_text"), f"{CHUNKED}, {UNKNOWN_ATTENTION}"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), f"{INDEXED}, {UNKNOWN_ATTENTION}"),
    "phimoe": "its routers choose experts at random in training, and router_jitter_noise is a threshold of that "
    "choice, not noise: another function would be trained than the engine computes",
}
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # LoRA ranks for which vLLM can reserve memory
ALL_LINEAR = ["all-linear"]


def why_unsupported(settings: Mapping[str, Any]) -> str | None:
    """The reason why a model with these settings cannot be trained, or None."""
    kind = settings.get("model_type")
    if settings.get("is_encoder_decoder"):
        return f"model_type={kind}: an encoder and a decoder; only decoder-only models are trained"
    if kind in NOT_TRAINED:
        return f"model_type={kind}: {NOT_TRAINED[kind]}"
    for name in ("audio_config", "thinker_config"):
        if settings.get(name):
            return f"{name}: {SOUNDS}"
    if settings.get("vision_config") and kind not in plugins.names("vision"):
        families = ", ".join(sorted(plugins.names("vision")))
        return f"model_type={kind}: of the models that read pictures, these families are trained: {families}"
    for name, meaning in OTHER_ATTENTION.items():
        if settings.get(name):
            return f"{name}={settings[name]}: {meaning}, {UNKNOWN_ATTENTION}"
    for layer in settings.get("layer_types") or []:
        for word, meaning in OTHER_LAYERS.items():
            if word in str(layer) and layer != "sparse":  # "sparse" means experts, not attention
                return f"layer_types has {layer}: {meaning}, {UNKNOWN_ATTENTION}"
    if quantized := settings.get("quantization_config"):
        method = quantized.get("quant_method", "unknown")
        return f"quant_method={method}: quantized weights cannot be trained; name the original model"
    text = settings.get("text_config")  # a model that sees has one
    return why_unsupported(text) if isinstance(text, Mapping) and text is not settings else None


def disturbances(settings: Mapping[str, Any]) -> dict[str, float]:
    """The settings that make a model drop or change activations at random in training."""
    return {name: rate for name, rate in settings.items() if RANDOM.search(name) and isinstance(rate, float) and rate}
