"""Estimate the memory of each phase of a run, per GPU and in host memory, and find overrides that make it fit.

The estimate is of a run from its second step on, when every buffer has been allocated. Sizes are bytes.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.findings import Findings
from hybridrl.config.schema import ActorConfig, CriticConfig
from hybridrl.core.device import memory_left
from hybridrl.core.rollout.vllm.settings import cpu_cache_bytes
from hybridrl.core.training.linear_log_probs import tokens_at_once
from hybridrl.core.training.packing import MicroBatchBudget
from hybridrl.core.training.worker import LearnerConfig
from hybridrl.doctor.machine import GIB, UTILIZATION, visible_gpus
from hybridrl.doctor.memory_sizes import FULL, Bytes, Held, Models, Shard, read_models
from hybridrl.runs.settings import build_algorithm, build_critic_plan, build_policy_plan, ppo_worker_config
from hybridrl.runs.setup import save_times
from hybridrl.runtime.environment import joins

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
# What follows from the numbers of parameters, or was measured: the rest is estimated, with errors up to 20%.
EXACT = ("parameters", "optimizer", "gradients", "reference", "critic", "processes")
# Measured on CPU with models of negligible size (scripts/benchmark/memory_plan.py): the driver with Ray and two
# scorers; per device, the train worker, the rollout server and the engine.
MACHINE_BYTES, DEVICE_BYTES = 1007e6, 1447e6
# Measured on one H100 with vLLM 0.26 (scripts/benchmark/gpu.py): what a train worker and an engine hold of the GPU
# outside their tensors, with loaded kernels. A sleeping engine frees weights and cache, and keeps CUDA graphs, kernel
# workspaces and NCCL buffers: 0.3 GiB with four captured sizes, while the usual number of them is assumed to take more.
TRAINER_CONTEXT_BYTES, ENGINE_CONTEXT_BYTES, ASLEEP_BYTES = 1.3 * GIB, 0.7 * GIB, 0.8 * GIB

PHASES = ("start-up", "rollout", "log-probs", "critic update", "policy update", "weight sync", "save")
# Phases in which offloaded parameters have left the device: policy and critic make room for each other.
AWAY = {
    "policy": ("rollout", "critic update"),
    "critic": ("rollout", "log-probs", "policy update", "weight sync", "save"),
}

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
SWITCHES = (
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "critic.model.enable_gradient_checkpointing",
    f"{REF}.fsdp_config.param_offload",
    f"{ACTOR}.fsdp_config.param_offload",
    f"{ACTOR}.fsdp_config.optimizer_offload",
    "critic.fsdp.param_offload",
    "critic.fsdp.optimizer_offload",
)
MERGE = "actor_rollout_ref.model.lora.merge"
# Proposed only if nothing else is enough: the optimizer then steps on the CPU, or all weights are sent at every sync.
SLOW_SWITCHES = (f"{ACTOR}.fsdp_config.offload_policy", "critic.fsdp.offload_policy", MERGE)
TOKENS = (
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
)
ROWS = (f"{ACTOR}.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.max_num_seqs")


class PlannedModel(NamedTuple):
    """A trained model; `kinds` name its parameters and moments, `budget` is that of an update's micro-batch."""

    name: str
    kinds: tuple[str, str]
    shard: Shard
    config: LearnerConfig
    section: ActorConfig | CriticConfig
    budget: MicroBatchBudget


@dataclass
class PlannedRun:
    """Everything that memory depends on. `gpu` is the memory of one GPU, 0 on CPU."""

    config: PPOConfig
    models: Models
    gpu: int

    def __post_init__(self) -> None:
        config, models, rollout = self.config, self.models, self.config.actor_rollout_ref.rollout
        worker = ppo_worker_config(config, build_algorithm(config), Path(), steps=1)
        self.devices, self.on_cpu = config.trainer.n_gpus_per_node or 1, config.trainer.device == "cpu"
        self.engine_devices = config.rollout_pool[1]  # of a machine, as are those of the trainers
        self.apart = config.separate
        self.longest, itemsize = rollout.max_model_len or 0, ITEMSIZE[rollout.dtype or "float32"]
        self.learners: list[PlannedModel] = []
        actor, policy_plan = config.actor_rollout_ref.actor, build_policy_plan(config)
        critic_plan = build_critic_plan(config) if worker.critic else None
        for name, kinds, sizes, learner, section, plan in (
            ("policy", ("parameters", "optimizer"), models.policy, worker.policy, actor, policy_plan),
            ("critic", ("critic", "critic"), models.critic, worker.critic, config.critic, critic_plan),
        ):
            if sizes and learner and plan:
                fsdp, muon = learner.fsdp, learner.optimizer.optimizer == "Muon"
                types = ITEMSIZE[fsdp.model_dtype], ITEMSIZE[fsdp.dtype or "float32"]
                shard = Shard(sizes, *types, fsdp.fsdp_size, fsdp.reshard_after_forward, muon)
                self.learners.append(PlannedModel(name, kinds, shard, learner, section, plan.updates.budget))
        # Forward passes without gradients by phase: the model, its budget, and whether it has a head of logits.
        policy, self.reference = self.learners[0].shard, None
        self.forwards = {"log-probs": [(policy, policy_plan.log_prob_budget, True)]}
        if worker.reference and models.reference:  # frozen: sharded as the policy is, and stored in the computed type
            self.reference = replace(policy, sizes=models.reference, stored=policy.computed)
            self.forwards["log-probs"].append((self.reference, policy_plan.reference_budget, True))
        if critic_plan:
            self.forwards["critic update"] = [(self.learners[-1].shard, critic_plan.value_budget, False)]
        reference = worker.reference
        self.reference_offloaded = bool(reference and reference.fsdp_config.param_offload and not self.on_cpu)
        # Per device, of an engine over several. On CPU the cache has the configured size; on CUDA the rest of the
        # engine's share, of which the engine's activations and graphs take a part that is not known here.
        width, self.row_bytes = rollout.tensor_model_parallel_size, models.policy.row_cache(self.longest, itemsize)
        self.weights = models.policy.engine_weights(itemsize, on_cpu=self.on_cpu) / width
        self.cache = max(rollout.gpu_memory_utilization * self.gpu - self.weights, 0)
        self.base = models.policy.page_locked * itemsize / width if self._keeps_base() else 0
        if self.on_cpu:
            self.cache = cpu_cache_bytes(models.policy.row_cache(1, itemsize), rollout, self.engine_devices // width)

    def _keeps_base(self) -> bool:
        """Whether a sleeping engine keeps the base of an adapter in host memory, as it does on CUDA."""
        section = self.config.actor_rollout_ref
        adapted = section.model.lora_rank and not section.model.lora.merge
        return bool(adapted and section.rollout.free_cache_engine and not self.apart and not self.on_cpu)

    def micro_batch(self, budget: MicroBatchBudget, prompts: int) -> int:
        """Tokens per device in the largest micro-batch when `prompts` are spread over all devices, and all rows of a
        rank have the greatest length."""
        spread = self.devices * self.config.trainer.nnodes
        rows = -(-prompts * self.config.actor_rollout_ref.rollout.n // spread) * budget.devices
        if budget.rows is None:
            tokens = max(self.longest, min(budget.tokens, rows * self.longest))
        else:
            tokens = min(budget.rows, rows) * self.longest
        return -(-tokens // budget.devices)

    def logits(self, shard: Shard, tokens: int) -> float:
        at_once = tokens_at_once(self.config.trainer.device, shard.sizes.vocabulary)
        return shard.logits(tokens, at_once, on_cpu=self.on_cpu)


# -- what each phase holds ---------------------------------------------------------------------------------------------


def _add_learners(held: Held, run: PlannedRun, phase: str) -> None:
    """Add the parameters, moments and gradients of what is trained."""
    starting, cuda = phase == "start-up", not run.on_cpu
    for name, kinds, shard, learner, _, _ in run.learners:
        # Offloaded parameters keep their place in host memory all the time. Under `offload_policy` shards still pass
        # through the device on their way from the files.
        fsdp = learner.fsdp
        everything, leaves = fsdp.offload_policy and cuda, fsdp.param_offload and cuda
        away = not starting if everything else leaves and phase in AWAY[name]
        held.add(kinds[0], shard.parameters, host=everything or leaves, device=not away)
        on_host = everything or fsdp.optimizer_offload
        held.add(kinds[1], shard.moments, host=on_host, device=not on_host)
        if phase == f"{name} update":
            held.add("gradients", shard.gradients, host=everything, device=not everything)


def phase_memory(run: PlannedRun, phase: str) -> Held:
    """Estimate the peak of a phase."""
    held, starting, syncing = Held(), phase == "start-up", phase == "weight sync"
    _add_learners(held, run, phase)
    if run.reference:
        offloaded = run.reference_offloaded
        held.add("reference", run.reference.parameters, host=offloaded, device=not offloaded or starting)
    held.device.update(_working(run, phase))
    # A sleeping engine frees most of its memory on CUDA. On CPU it keeps it, and the trainer keeps its buckets.
    engine = held.engine if run.apart else held.device
    awake = run.on_cpu or run.apart or phase == "rollout"
    if awake or syncing:
        engine["rollout weights"] += run.weights
    if awake:
        engine["KV cache"] += run.cache
    if syncing or (run.on_cpu and not starting):
        held.device["sync buckets"] += run.models.bucket
    if run.base:  # torch keeps page-locked memory for the next sleep
        held.host["sleeping base"] += run.base
    if not run.on_cpu:
        held.device["CUDA contexts"] += TRAINER_CONTEXT_BYTES
        engine["CUDA contexts"] += ENGINE_CONTEXT_BYTES
        held.engine["sync buckets"] += run.models.bucket * syncing * run.apart
        if not run.apart and not syncing and phase != "rollout":
            held.device["sleeping engine"] = ASLEEP_BYTES
    if not starting and save_times(run.config.trainer).ever:  # the host copies that are written; they are kept
        held.host["checkpoint staging"] += sum(map(_staged, run.learners))
    return held


def _staged(trained: PlannedModel) -> float:
    shard, saved = trained.shard, trained.section.checkpoint.save_contents
    return shard.gradients * ("model" in saved) + shard.moments * ("optimizer" in saved)


def machine_memory(run: PlannedRun, phase: str) -> Bytes:
    """Host memory of all processes of a machine; on CPU that includes the devices'."""
    held = phase_memory(run, phase)
    one = held.host + held.device if run.on_cpu else held.host
    memory = Counter({kind: run.devices * size for kind, size in one.items()})
    memory.update({kind: run.engine_devices * size for kind, size in held.engine.items() if run.on_cpu})
    devices = (run.devices + run.engine_devices) / 2  # assumed, if apart: each has half of a device's processes
    memory["processes"] = MACHINE_BYTES + devices * DEVICE_BYTES
    return memory


def _working(run: PlannedRun, phase: str) -> Bytes:
    """Temporary memory of a phase's computation, at most; none in phases that only move weights or wait."""
    needs = [need for trained in run.learners if phase == f"{trained.name} update" for need in _update(run, trained)]
    for shard, budget, head in run.forwards.get(phase, ()):
        tokens = run.micro_batch(budget, run.config.data.train_batch_size)
        needs.append(Counter({"gathered": shard.gathered, "activations": shard.forward(tokens)}))
        if head:
            needs[-1]["logits"] = run.logits(shard, tokens)
    return max(needs, key=Counter.total, default=Counter())


def _update(run: PlannedRun, trained: PlannedModel) -> list[Bytes]:
    """The backward pass, and the optimizer's step if it is on the device."""
    shard, learner, budget = trained.shard, trained.config, trained.budget
    tokens, by_rows = run.micro_batch(budget, trained.section.ppo_mini_batch_size), run.on_cpu or shard.computed == FULL
    activations = shard.activations(
        tokens,
        checkpointed=learner.model.enable_gradient_checkpointing,
        selective=learner.model.selective_checkpointing,
        by_rows=by_rows and not budget.padded,
    )
    backward = Counter({"gathered": shard.gathered + shard.reduced, "activations": activations})
    if trained.name == "policy":
        backward["logits"] = run.logits(shard, tokens)
    if learner.fsdp.offload_policy and not run.on_cpu:
        return [backward]  # the optimizer steps in host memory
    moments = shard.moments if learner.fsdp.optimizer_offload and not run.on_cpu else 0
    return [backward, Counter({"optimizer": shard.optimizer_step + moments})]


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Estimated memory of each phase in one place, and the bytes available there; 0 if that is not known."""

    place: str
    needs: dict[str, Bytes]
    available: int
    remark: str = ""

    @property
    def fullest(self) -> str:
        return max(self.needs, key=lambda phase: self.needs[phase].total())

    @property
    def peak(self) -> float:
        return self.needs[self.fullest].total()

    @property
    def certain(self) -> float:
        """What no micro-batch and no setting of an engine changes, in the phase with most of it."""
        return max(sum(needs[kind] for kind in EXACT) for needs in self.needs.values())


def memory_plan(config: PPOConfig, findings: Findings) -> None:
    """Report the estimate, with an error if what is counted exactly does not fit by itself, else with a warning."""
    gpu = 0  # of the smallest GPU that would be used; GPUs of other machines are not known
    if config.trainer.device == "cuda" and not joins(config.ray_kwargs.ray_init):
        gpu = min((gpu.total for gpu in visible_gpus()[: config.devices_per_machine]), default=0)
    try:
        run = PlannedRun(config, read_models(config), gpu)
        plans = make_plans(run)
    except OSError as error:
        findings.info("memory.unknown", f"memory is not estimated: a model's config.json cannot be read ({error})")
        return
    except ConfigError:  # reported with the model or the algorithm
        return
    except ValueError as error:
        findings.error("memory.unknown", f"the model cannot be trained as configured: {error}")
        return
    for index, plan in enumerate(plans):
        findings.info("memory.plan", f"estimated memory of {plan.place}{plan.remark}, in GiB:\n{table(plan)}")
        if plan.available and plan.peak > plan.available:
            fix = suggest_fix(run, lambda changed, index=index: make_plans(changed)[index].peak, plan.available)
            report = findings.error if plan.certain > plan.available else findings.warn
            cause = f"memory of {plan.place}: {plan.fullest} takes an estimated {_gib(plan.peak)} GiB, and "
            report("memory.lack", f"{cause}{_gib(plan.available)} GiB are free", fix=fix)
    if run.on_cpu or run.gpu:
        rollout = config.actor_rollout_ref.rollout
        rows = int(run.cache * rollout.tensor_model_parallel_size // run.row_bytes)
        cause = f"the KV cache of an engine holds an estimated {rows} rows of {run.longest} tokens "
        cause += f"(max_num_seqs={rollout.max_num_seqs})"
        if rows:
            findings.info("memory.cache", cause)
        else:
            fix = f"raise {UTILIZATION}={rollout.gpu_memory_utilization:g}"
            widths = (width for width in range(2, run.engine_devices + 1) if run.engine_devices % width == 0)
            whole, share = run.weights * rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization * run.gpu
            if wide := next((width for width in widths if run.gpu and whole / width < share), None):
                fix += f", or set {ROLLOUT}.tensor_model_parallel_size={wide}"
            findings.warn("memory.cache", cause, fix, keys=UTILIZATION)


def make_plans(run: PlannedRun) -> list[Plan]:
    """Plan each GPU, and the host memory of each machine."""
    phases = [phase for phase in PHASES if len(run.learners) > 1 or phase != "critic update"]
    free = 0 if joins(run.config.ray_kwargs.ray_init) else memory_left()
    host = {phase: machine_memory(run, phase) for phase in phases}
    if run.on_cpu:
        return [Plan("this machine", host, free, ", all processes together")]
    device = {phase: phase_memory(run, phase).device for phase in phases}
    remark = " (not measured on CUDA)"
    plans = [Plan("each GPU", device, run.gpu, remark), Plan("each machine's host", host, free, remark)]
    engine = {phase: phase_memory(run, phase).engine for phase in ("rollout", "weight sync")}
    return [*plans, Plan("each GPU of the rollout servers", engine, run.gpu, remark)] if run.apart else plans


def table(plan: Plan) -> str:
    """Format one line per kind and one column per phase."""
    kinds = dict.fromkeys(kind for needs in plan.needs.values() for kind, size in needs.items() if size)
    rows = [("", list(plan.needs))]
    rows += [(kind, [_gib(needs[kind]) for needs in plan.needs.values()]) for kind in kinds]
    rows += [("total", [_gib(needs.total()) for needs in plan.needs.values()])]
    widths = [max(len(phase), 5) + 2 for phase in plan.needs]
    return "\n".join(f"{title:<18}" + "".join(map(str.rjust, cells, widths)) for title, cells in rows)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else "-"


# -- overrides that make a run fit -------------------------------------------------------------------------------------


def suggest_fix(run: PlannedRun, peak: Callable[[PlannedRun], float], limit: float) -> str:
    """Suggest overrides under which the peak stays within the limit; none of them changes what is learned.

    Each is tried on the plan. The one with the largest effect is taken first, in its mildest value that is enough.
    """
    chosen: dict[str, Any] = {}
    while (present := peak(run)) > limit:
        for candidates in _candidates(run):
            effects = {key: peak(_with(run, key, values[-1])) for key, values in candidates.items()}
            key = min(effects, key=lambda key: effects[key], default=None)
            if key is not None and effects[key] < present:
                break
        else:
            break
        tried = [(value, _with(run, key, value)) for value in candidates[key]]
        chosen[key], run = next(((value, other) for value, other in tried if peak(other) <= limit), tried[-1])
    overrides = " ".join(f"{key}={str(value).lower()}" for key, value in chosen.items())
    if present <= limit:
        return f"set {overrides}"
    last = f"take a smaller model, {_enough_devices(run, peak, limit)}"
    if not run.config.actor_rollout_ref.model.lora_rank:
        last += ", or an adapter (actor_rollout_ref.model.lora_rank=32)"
    return f"set {overrides}, which is not enough: {last}" if chosen else last


def _enough_devices(run: PlannedRun, peak: Callable[[PlannedRun], float], limit: float) -> str:
    """Name the number of GPUs over which the models would fit, each with the same free memory."""
    for times in () if run.on_cpu else (2, 4, 8, 16, 32, 64):
        config = copy.deepcopy(run.config)
        config.trainer.nnodes *= times
        for section in (config.actor_rollout_ref.actor.fsdp_config, config.critic.fsdp):
            section.fsdp_size = config.trainer.devices
        if peak(PlannedRun(config, run.models, run.gpu)) <= limit:
            return f"{config.trainer.devices} devices (trainer.nnodes x trainer.n_gpus_per_node)"
    return "a machine with more memory" if run.on_cpu else "GPUs with more memory"


def _candidates(run: PlannedRun) -> Iterator[dict[str, list[Any]]]:
    """Values of keys that may take less memory, from the mildest to the strongest; first those that cost no speed."""
    present = {key: attrgetter(key)(run.config) for key in (*SWITCHES, *SLOW_SWITCHES, *TOKENS, *ROWS, UTILIZATION)}
    values: dict[str, list[Any]] = {key: [True] for key in SWITCHES if present[key] is False}
    for keys, least in ((TOKENS, run.longest), (ROWS, 1)):
        for key in keys:
            halves = [(present[key] or 1) >> shift for shift in range(1, (present[key] or 1).bit_length())]
            values[key] = [half for half in halves if half >= least]
    if not run.on_cpu:
        values[UTILIZATION] = [percent / 100 for percent in range(round(100 * present[UTILIZATION]) - 5, 9, -5)]
    yield {key: tried for key, tried in values.items() if tried}
    has_adapter = bool(run.config.actor_rollout_ref.model.lora_rank)
    yield {key: [True] for key in SLOW_SWITCHES if present[key] is False and (key != MERGE or has_adapter)}


def _with(run: PlannedRun, key: str, value: Any) -> PlannedRun:
    config = copy.deepcopy(run.config)
    section, _, name = key.rpartition(".")
    setattr(attrgetter(section)(config), name, value)
    return PlannedRun(config, run.models, run.gpu)
