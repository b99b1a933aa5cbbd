"""Entries of a system's table, each for the keys matching its patterns, and entries computed from several keys."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hybridrl.config.custom_code import attempt
from hybridrl.config.findings import show

KINDS = ("rejected", "combined", "translated", "ignored", "otherwise")  # in the order in which they are consulted
SETTING = ("combined", "translated")  # keys of these kinds set other keys
REJECTING = ("rejected", "otherwise")  # the latter if no other entry names the key


@dataclass(frozen=True, eq=False)
class Entry:
    """The treatment of the keys that some patterns name.

    `silent` values change nothing; `follows` is a key whose value does not either; `when` limits the entry to values
    that match it. `sets` has by key a value, or a function that computes it; {value} is the entry's own value, which
    `values` may replace. `drops`: values of keys that count as not set. A `named` entry rejects its keys wherever a
    command names them. A `usual` entry sets only keys that the command does not name, by any name. An `is_same` entry
    computes its own value for another place, and both must agree. `fix` returns the fix for a value, given the values
    of all keys; "" if it is accepted.
    """

    kind: str
    keys: list[str]
    why: str = ""
    silent: list[Any] = field(default_factory=list)
    follows: str = ""
    sets: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    when: str = ""
    named: bool = False
    usual: bool = False
    is_same: bool = False
    drops: dict[str, Any] = field(default_factory=dict)
    fix: Callable[[Any, Mapping[str, Any]], str] | None = None

    def names(self, key: str) -> bool:
        """Whether a pattern names the key, or a section that it is in."""
        inside = f"{key}."
        return any(
            fnmatchcase(inside, f"{form}.*") if "*" in form else inside.startswith(f"{form}.") for form in self.keys
        )

    def is_silent(self, value: Any) -> bool:
        """Whether the value changes nothing, so that nothing is reported."""
        alike = (item == value and isinstance(item, bool) == isinstance(value, bool) for item in self.silent)
        return value is None or value == "" or self.silent == ["*"] or any(alike)

    def accepts(self, value: Any, values: Mapping[str, Any]) -> bool:
        """Whether a value says what other keys say."""
        return value == values.get(self.follows) or (self.fix is not None and not self.fix(value, values))

    def concerns(self, value: Any) -> bool:
        return re.search(self.when, str(value)) is not None

    def value_of(self, text: str) -> Any:
        """Return the replacement of a value, if `values` states one."""
        matches = ((re.fullmatch(pattern, text), value) for pattern, value in self.values.items())
        match, value = next(((match, value) for match, value in matches if match), (None, None))
        return match.expand(value) if match and isinstance(value, str) else value

    @property
    def reason(self) -> str:
        """The reason, or the keys that are set instead."""
        return self.why or " ".join(f"{name}={show(value)}" for name, value in self.sets.items())


def combined_entry(keys: str, meaning: str, sets: dict[str, Any], **options: Any) -> Entry:
    """An entry of keys that count together, once all are known; a `meaning` where values are computed."""
    return Entry("combined", keys.split(), meaning, sets=sets, **options)


def parse_number(text: Any) -> Any:
    """An integer if it is one, else a float. Raises ValueError."""
    value = float("" if isinstance(text, bool) else text)
    return int(value) if value.is_integer() else value


class Look:
    """The values that an entry's functions compute with: `of(key, usual)`, the number at a key of either system;
    `of.value`, what the entry's first key is set to; `of.size("dt")`, the product of these groups of `when`. `of.read`:
    keys so far."""

    def __init__(self, find: Callable[[str, Any], Any], entry: Entry, values: list[Any]) -> None:
        self._find = find
        self.read: list[str] = []
        self.value = values[0]
        self._match = next(match for value in values if (match := re.search(entry.when, str(value))))

    def __call__(self, key: str, usual: float | None = None) -> Any:
        value = self._find(key, usual)
        self.read += [key] * (key not in self.read)
        try:
            return parse_number(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key}={show(value)}") from error

    @property
    def serves_sglang(self) -> bool:
        """Whether AReaL would have SGLang as its engine."""
        return any(str(self._find(key, "")).startswith("sglang") for key in ("allocation_mode", "rollout.backend"))

    def size(self, groups: str) -> int:
        return math.prod(int(self._match[group] or 1) for group in groups)


ROLLOUT, ACTOR, CORRECTION = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "algorithm.rollout_correction"
MODE, BOUND = "trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy_threshold"
BATCH, MINI = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
BYPASS = "algorithm.rollout_correction.bypass_mode"
STEPS, BATCHES = "async_training.trigger_parameter_sync_step", "async_training.require_batches"
ROLLOUT_STEPS = "actor_rollout_ref.rollout.total_rollout_steps"
VERL_STALENESS = "async_training.staleness_threshold"


def argument_of_reward(key: str) -> str:
    """The name of a key of the reward manager, which in verl passes further arguments to the reward function."""
    place = "reward.reward_kwargs."
    is_argument = key.startswith(place) and "overlong_buffer_cfg" not in key
    return key.replace(place, "reward.custom_reward_function.reward_kwargs.") if is_argument else key


def _patch_size(value: Any, values: Mapping[str, Any]) -> str:
    """Return the fix for a size of patches that the processor of a local model does not have."""
    file = Path(str(values.get("actor_rollout_ref.model.path"))).expanduser() / "preprocessor_config.json"
    settings = attempt(lambda: json.loads(file.read_text(encoding="utf-8")))
    size = settings.get("patch_size", value) if isinstance(settings, dict) else value
    return "" if str(size) == str(value) else f"set {size}, or leave it out"


def _generator(sees: Any, values: Mapping[str, Any]) -> str:
    """Return the fix for a generator of pictures with a local model that does not see."""
    file = Path(str(values.get("actor_rollout_ref.model.path"))).expanduser() / "config.json"
    settings = attempt(lambda: json.loads(file.read_text(encoding="utf-8")))
    return "" if not isinstance(settings, dict) or "vision_config" in settings else "set false, or name one that does"


def _batch_of_sync(step: Any, values: Mapping[str, Any]) -> str:
    """Name the batch with `step` updates; "" if verl does not read the key or if it is the present batch."""
    if values.get(MODE) != "separate_async":
        return ""
    try:
        batch = parse_number(step) * parse_number(values[MINI])
    except (TypeError, ValueError):
        return f"set {BATCH} and {MINI} to numbers"
    return "" if batch == values[BATCH] else f"set {BATCH}={batch}"


def shared_rows(part: str, model: str, keys: str) -> Entry:
    """Sizes of context parallelism, by Ulysses here: only packed rows can be shared."""
    size, packed = f"{part}.ulysses_sequence_parallel_size", f"{model}.use_remove_padding"
    sets: dict[str, Any] = {size: lambda of: of.value, packed: True}
    drops = {packed: False}
    return combined_entry(keys, f"{size} = its value, with packed rows", sets, silent=[1], drops=drops, is_same=True)


def _of_engines(part: str, model: str) -> list[Entry]:
    """Keys of verl's other engines, for the actor or the critic."""
    optim, names = f"{part}.optim", ("megatron.context", "veomni.ulysses", "torchtitan.context")
    decay, least = f"{optim}.lr_scheduler_type", f"{optim}.min_lr_ratio"
    return [
        shared_rows(part, model, " ".join(f"{part}.{name}_parallel_size" for name in names)),
        combined_entry(f"{optim}.decay_type", f"{decay} = its value", {decay: lambda of: of.value}, is_same=True),
        *(
            combined_entry(
                f"{optim}.{name}",
                f"{least} = its value / lr",
                {least: lambda of, name=name: float(f"{of(f'{optim}.{name}') / of(f'{optim}.lr'):g}")},
                silent=[0],
                is_same=True,
            )
            for name in ("min_lr", "lr_min")
        ),
    ]


def _schedule_of_engine(engine: str, schedule: str) -> Entry:
    """An engine of verl whose schedule is another one, unless the command names it."""
    sets = {f"{part}.optim.lr_scheduler_type": schedule for part in ("actor_rollout_ref.actor", "critic")}
    why = "training runs on FSDP2, with that engine's schedule unless the command names one"
    names = "model_engine *.model_engine actor_rollout_ref.actor.strategy critic.strategy"
    return combined_entry(names, why, sets, when=f"^{engine}$", usual=True)


# A later one wins, and what the command or its file sets by hybridrl's name stays.
OF_VERL = [
    _schedule_of_engine("veomni", "cosine"),
    _schedule_of_engine("torchtitan", "linear"),
    *_of_engines("actor_rollout_ref.actor", "actor_rollout_ref.model"),
    *_of_engines("critic", "critic.model"),
    # Whether the engine can sleep at all; a command may turn that off and still ask for it.
    combined_entry(f"{ROLLOUT}.enable_sleep_mode", "", {f"{ROLLOUT}.free_cache_engine": False}, silent=[True]),
    combined_entry("async_training.partial_rollout", "", {MODE: "colocate_async"}, when="^(?i:true)$"),
    # One step off is all that it says by itself; fully_async says more.
    combined_entry(
        "actor_rollout_ref.hybrid_engine", "", {MODE: "separate_async", BOUND: 1, BYPASS: True}, silent=[True]
    ),
    combined_entry(
        f"{STEPS} {BATCHES} {VERL_STALENESS}",
        f"separate_async with bypass_mode, {BATCH} = trigger_parameter_sync_step x require_batches x "
        "ppo_mini_batch_size, over_sample_rate = staleness_threshold, max_off_policy_threshold = that rounded up",
        {
            MODE: "separate_async",
            BATCH: lambda of: of(STEPS, 4) * of(BATCHES, 1) * of(MINI),
            BOUND: lambda of: math.ceil(of(VERL_STALENESS, 0.1)),
            "actor_rollout_ref.rollout.over_sample_rate": lambda of: of(VERL_STALENESS, 0.1),
            BYPASS: True,
        },
        drops={BATCH: 0, "data.gen_batch_size": 1},
    ),
    combined_entry(
        ROLLOUT_STEPS,
        "trainer.total_training_steps = its value / (trigger_parameter_sync_step x require_batches x "
        "ppo_mini_batch_size), rounded down",
        {"trainer.total_training_steps": lambda of: of(ROLLOUT_STEPS) // (of(STEPS, 4) * of(BATCHES, 1) * of(MINI))},
    ),
    combined_entry(
        "async_training.use_rollout_log_probs actor_rollout_ref.actor.use_rollout_log_probs",
        f"{BYPASS} = its value",
        {BYPASS: lambda of: of.value},
        is_same=True,
    ),
    combined_entry("async_training.compute_prox_log_prob", "", {BYPASS: False}, silent=[False]),
    Entry(
        "rejected",
        ["data.image_patch_size"],
        "pictures are cut into patches as the model's processor states",
        fix=_patch_size,
    ),
    Entry(
        "rejected",
        ["trainer.v1.separate_async.parameter_sync_step"],
        "weights are sent once per step, after data.train_batch_size / ppo_mini_batch_size updates",
        fix=_batch_of_sync,
    ),
]


# SkyRL
SKYRL_STALENESS = "trainer.fully_async.max_staleness_steps"
OFF_POLICY = "trainer.algorithm.off_policy_correction"
LOW, HIGH = f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"


def _mask(metric: str, statistic: str, name: str, low: float, high: float) -> Entry:
    """A mask whose bounds are of the trainer's probability over the engine's; those of k1 are of the inverse."""
    least, most = f"{OFF_POLICY}.{name}_mask_low", f"{OFF_POLICY}.{name}_mask_high"
    return combined_entry(
        f"{OFF_POLICY}.sequence_mask_metric",
        f"{CORRECTION}.rollout_rs={statistic}, between 1 / {name}_mask_high and 1 / {name}_mask_low",
        {
            f"{CORRECTION}.rollout_rs": statistic,
            f"{CORRECTION}.rollout_rs_threshold": lambda of: f"{1 / of(most, high):g}_{1 / of(least, low):g}",
        },
        when=f"^{metric}$",
    )


OF_SKYRL = [
    shared_rows(ACTOR, "actor_rollout_ref.model", "trainer.policy.megatron_config.context_parallel_size"),
    combined_entry(
        "trainer.placement.colocate_all",
        "separate_async with a bound of 0, and num_engines x data_parallel_size x tensor_parallel_size devices for "
        "rollout, divided over the machines",
        {
            MODE: "separate_async",
            BOUND: 0,
            f"{ROLLOUT}.n_gpus_per_node": lambda of: math.ceil(
                of("generator.num_engines", 1)
                * of("generator.data_parallel_size", 1)
                * of(f"{ROLLOUT}.tensor_model_parallel_size")
                / of("trainer.nnodes")
            ),
        },
        silent=[True],
    ),
    combined_entry(
        f"trainer.fully_async.enabled {SKYRL_STALENESS}",
        "separate_async, max_off_policy_threshold = max_staleness_steps",
        {MODE: "separate_async", BOUND: lambda of: of(SKYRL_STALENESS, 4)},
        silent=[False],
    ),
    # A token's loss is weighted by its ratio to the engine's probability, and 0 outside the clip range.
    combined_entry(
        "trainer.algorithm.policy_loss_type",
        f"{CORRECTION}: bypass_mode, loss_type=reinforce, rollout_is=token, a threshold of the clip range around 1",
        {
            BYPASS: True,
            f"{CORRECTION}.loss_type": "reinforce",
            f"{CORRECTION}.rollout_is": "token",
            f"{CORRECTION}.rollout_is_threshold": lambda of: f"{1 - of(LOW, 0.2):g}_{1 + of(HIGH, 0.2):g}",
        },
        when="^rollout_is$",
    ),
    _mask("geometric", "seq_mean_k1", "geo", 0.99, 1.01),
    _mask("product", "seq_sum_k1", "product", 0.5, 2),
    Entry("rejected", ["generator.vision_language_generator"], "the model reads no pictures", [False], fix=_generator),
]


# AReaL
AREAL_STALENESS, PER_NODE = "rollout.max_head_offpolicyness", "trainer.n_gpus_per_node"
# Arguments in AReaL's section of SGLang, if they have another name here, and the key that sets each.
SERVER_ARGS = {
    "context_length": f"{ROLLOUT}.max_model_len",
    "max_running_requests": f"{ROLLOUT}.max_num_seqs",
    "max_prefill_tokens": f"{ROLLOUT}.max_num_batched_tokens",
    "mem_fraction_static": f"{ROLLOUT}.gpu_memory_utilization",
    "dtype": f"{ROLLOUT}.dtype",
    "disable_cuda_graph": f"{ROLLOUT}.enforce_eager",
}
# An engine's or trainer's devices, such as sglang:d4t2: data, tensor, pipeline and context parallel.
ENGINES = r"(?:\w+(?:\[\w+\])?[:.])?(?:d(?P<d>\d+)|t(?P<t>\d+)|p(?P<p>\d+)|[ce]\d+)+"
TRAINER = r"(?:\w+(?:\[\w+\])?[:.])?(?:d(?P<D>\d+)|t(?P<T>\d+)|p(?P<P>\d+)|c(?P<C>\d+)|e(?P<E>\d+))+"
SEPARATE = {MODE: "separate_async", BOUND: lambda of: of(AREAL_STALENESS, 0)}


def _divided(part: str, fsdp: str) -> dict[str, Any]:
    """Sizes by which the devices of a trainer divide a model; 1 is the default of each, and sets nothing."""
    return {
        f"{part}.{fsdp}.tensor_parallel_size": lambda of: of.size("T") if of.size("T") > 1 else None,
        f"{part}.{fsdp}.expert_parallel_size": lambda of: of.size("E") if of.size("E") > 1 else None,
        f"{part}.ulysses_sequence_parallel_size": lambda of: of.size("C") if of.size("C") > 1 else None,
    }


FOR_TRAINING = _divided(ACTOR, "fsdp_config") | {
    "trainer.nnodes": lambda of: math.ceil(of.size("DTPC") / of(PER_NODE, 8)),
    "trainer.n_gpus_per_node": lambda of: min(of.size("DTPC"), of(PER_NODE, 8)),
}
FOR_ROLLOUT = {
    f"{ROLLOUT}.name": lambda of: "sglang" if of.serves_sglang else None,
    "actor_rollout_ref.rollout.nnodes": lambda of: math.ceil(of.size("dtp") / of(PER_NODE, 8)),
    "actor_rollout_ref.rollout.n_gpus_per_node": lambda of: min(of.size("dtp"), of(PER_NODE, 8)),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": lambda of: of.size("t"),
}

OF_AREAL = [
    *(
        combined_entry(f"sglang.{name}", f"{key} = its value", {key: lambda of: of.value if of.serves_sglang else None})
        for name, key in SERVER_ARGS.items()
    ),
    combined_entry(
        "sglang.disable_radix_cache",
        f"{ROLLOUT}.enable_prefix_caching=false",
        {f"{ROLLOUT}.enable_prefix_caching": lambda of: False if of.serves_sglang else None},
        silent=[False],
    ),
    combined_entry(
        AREAL_STALENESS,
        "colocate_async, with max_off_policy_threshold at its value",
        {MODE: "colocate_async", BOUND: lambda of: of(AREAL_STALENESS)},
        silent=[0],
    ),
    combined_entry(
        "allocation_mode",
        f"separate_async, with the devices of both parts and max_off_policy_threshold={AREAL_STALENESS}",
        SEPARATE | FOR_TRAINING | FOR_ROLLOUT,
        when=rf"^{ENGINES}\+{TRAINER}$",
    ),
    combined_entry(
        "rollout.backend",
        f"separate_async, with these devices for rollout and max_off_policy_threshold={AREAL_STALENESS}",
        SEPARATE | FOR_ROLLOUT,
        when=rf"^{ENGINES}$",
    ),
    combined_entry("actor.backend", "the devices for training, and their division", FOR_TRAINING, when=rf"^{TRAINER}$"),
    combined_entry("critic.backend", "the division of the critic", _divided("critic", "fsdp"), when=rf"^{TRAINER}$"),
    Entry(
        "rejected",
        ["actor.backend", "critic.backend"],
        "only devices in one group, such as megatron:d4t2e2, are translated; write it so",
        when=rf"^(?!{TRAINER}$)(megatron|archon)",
    ),
    combined_entry(
        "rollout.scheduling_strategy.type actor.scheduling_strategy.type",
        "",
        {MODE: "colocate_async"},
        when="^colocation$",
    ),
]
