"""Estimate the memory of each phase of a run, per GPU and in host memory, and find overrides that make it fit.

The estimate is of a run from its second step on, when every buffer has been allocated. Sizes are bytes.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridrl.cluster.session import joins
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.findings import Findings
from hybridrl.doctor.machine import GIB, memory_left, visible_gpus
from hybridrl.doctor.memory_sizes import FULL, Models, ModelSizes, Shard, micro_batch_tokens, read_models
from hybridrl.rollout.vllm.settings import cpu_cache_bytes
from hybridrl.runs.settings import build_algorithm, build_critic_plan, build_policy_plan, ppo_worker_config
from hybridrl.runs.setup import save_times
from hybridrl.training.linear_log_probs import tokens_at_once
from hybridrl.training.packing import MicroBatchBudget
from hybridrl.training.worker import LearnerConfig, WorkerConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
ERROR = 0.2  # largest error of the estimate where it was measured
# Measured on CPU with models of negligible size (scripts/benchmark/memory_plan.py): the driver with Ray and two
# scorers; per device, the train worker, the rollout server and the engine.
MACHINE_BYTES, DEVICE_BYTES = 1007e6, 1447e6
# Assumed, not measured here. The CUDA context of each process that uses a GPU, with loaded kernels: 543 MiB were
# reported for a process without tensors (pytorch/pytorch#81257). A sleeping engine frees weights and cache, and keeps
# CUDA graphs, kernel workspaces and NCCL buffers: 1.4 GiB were reported for a large model (vllm-project/vllm#47654).
CONTEXT_BYTES, ASLEEP_BYTES, PROCESSES_PER_GPU = 0.5 * GIB, 1.5 * GIB, 2

PHASES = ("start-up", "rollout", "log-probs", "critic update", "policy update", "weight sync", "save")
# Phases in which offloaded parameters have left the device: policy and critic make room for each other.
POLICY_AWAY = ("rollout", "critic update")
CRITIC_AWAY = ("rollout", "log-probs", "policy update", "weight sync", "save")

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
SHARE = f"{ROLLOUT}.gpu_memory_utilization"
SWITCHES = (
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "critic.model.enable_gradient_checkpointing",
    f"{REF}.fsdp_config.param_offload",
    f"{ACTOR}.fsdp_config.param_offload",
    f"{ACTOR}.fsdp_config.optimizer_offload",
    "critic.fsdp.param_offload",
    "critic.fsdp.optimizer_offload",
)
# Proposed only if nothing else is enough: the optimizer then steps on the CPU.
SLOW_SWITCHES = (f"{ACTOR}.fsdp_config.offload_policy", "critic.fsdp.offload_policy")
TOKENS = (
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
)
ROWS = (f"{ACTOR}.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.max_num_seqs")

Bytes = Counter[str]  # by kind


@dataclass
class Run:
    """Everything that memory depends on. `gpu` is the memory of one GPU, 0 on CPU."""

    config: PPOConfig
    worker: WorkerConfig
    models: Models
    gpu: int

    def __post_init__(self) -> None:
        self.rollout, trainer = self.config.actor_rollout_ref.rollout, self.config.trainer
        self.devices, self.on_cpu = trainer.n_gpus_per_node or 1, trainer.device == "cpu"
        self.longest, self.itemsize = self.rollout.max_model_len or 0, ITEMSIZE[self.rollout.dtype or "float32"]

    def micro_batch(self, budget: MicroBatchBudget, prompts: int) -> int:
        """Tokens per device in the largest micro-batch when `prompts` are spread over all devices."""
        rows = -(-prompts * self.rollout.n // (self.devices * self.config.trainer.nnodes))
        tokens = micro_batch_tokens(budget.tokens, budget.rows, rows * budget.devices, self.longest)
        return -(-tokens // budget.devices)

    def shard(self, sizes: ModelSizes, learner: LearnerConfig) -> Shard:
        fsdp, muon = learner.fsdp, learner.optimizer.optimizer == "Muon"
        types = ITEMSIZE[fsdp.model_dtype], ITEMSIZE[fsdp.dtype or "float32"]
        return Shard(sizes, *types, fsdp.fsdp_size, fsdp.reshard_after_forward, muon)

    def logits(self, shard: Shard, tokens: int) -> float:
        at_once = tokens_at_once(self.config.trainer.device, shard.sizes.vocabulary)
        return shard.logits(tokens, at_once, on_cpu=self.on_cpu)

    @property
    def policy(self) -> Shard:
        return self.shard(self.models.policy, self.worker.policy)

    @property
    def critic(self) -> Shard | None:
        learner = self.worker.critic
        return self.shard(self.models.critic, learner) if learner and self.models.critic else None

    @property
    def reference(self) -> Shard | None:
        """The frozen reference is sharded as the policy is and stored in the computed type."""
        sizes, policy = self.models.reference, self.policy
        return replace(policy, sizes=sizes, stored=policy.computed) if sizes else None

    @property
    def learners(self) -> list[tuple[str, Shard, LearnerConfig]]:
        models = [("policy", self.policy, self.worker.policy), ("critic", self.critic, self.worker.critic)]
        return [(name, shard, learner) for name, shard, learner in models if shard and learner]


def describe_run(config: PPOConfig, models: Models, gpu: int) -> Run:
    return Run(config, ppo_worker_config(config, build_algorithm(config), Path(), steps=1), models, gpu)


# -- what each phase holds ---------------------------------------------------------------------------------------------


@dataclass
class Held:
    """Bytes of one device, and of its share of the machine's host memory."""

    device: Bytes = field(default_factory=Counter)
    host: Bytes = field(default_factory=Counter)

    def add(self, kind: str, size: float, *, host: bool, device: bool) -> None:
        for place, there in ((self.host, host), (self.device, device)):
            if there:
                place[kind] += size


def phase_memory(run: Run, phase: str) -> Held:
    """Estimate the peak of a phase."""
    held = Held()
    for name, shard, learner in run.learners:
        _add_learner(run, name, shard, learner.fsdp, phase, held)
    if run.worker.reference and run.reference:
        offloaded = run.worker.reference.offload and not run.on_cpu
        held.add("reference", run.reference.parameters, host=offloaded, device=not offloaded or phase == "start-up")
    held.device.update(_working(run, phase))
    _add_engine(run, phase, held)
    if phase != "start-up" and save_times(run.config.trainer).ever:
        held.host["checkpoint staging"] = _staging(run)
    return held


def machine_memory(run: Run, phase: str) -> Bytes:
    """Host memory of all processes of a machine; on CPU that includes the devices'."""
    held = phase_memory(run, phase)
    one = held.host + held.device if run.on_cpu else held.host
    memory = Counter({kind: run.devices * size for kind, size in one.items()})
    memory["processes"] = MACHINE_BYTES + run.devices * DEVICE_BYTES
    return memory


def _add_learner(run: Run, name: str, shard: Shard, fsdp: Any, phase: str, held: Held) -> None:
    """Offloaded parameters keep their place in host memory all the time. Under `offload_policy` shards still pass
    through the device on their way from the files."""
    everything, leaves = fsdp.offload_policy and not run.on_cpu, fsdp.param_offload and not run.on_cpu
    absent = phase in (CRITIC_AWAY if name == "critic" else POLICY_AWAY)
    away = phase != "start-up" if everything else leaves and absent
    parameters, moments = ("critic", "critic") if name == "critic" else ("parameters", "optimizer")
    held.add(parameters, shard.parameters, host=everything or leaves, device=not away)
    on_host = everything or fsdp.optimizer_offload
    held.add(moments, shard.moments, host=on_host, device=not on_host)
    if phase == f"{name} update":
        held.add("gradients", shard.gradients, host=everything, device=not everything)


def _working(run: Run, phase: str) -> Bytes:
    """Temporary memory of a phase's computation, at most; none in phases that only move weights or wait."""
    config, worker = run.config, run.worker
    if phase == "log-probs":
        plan, prompts = build_policy_plan(config), config.data.train_batch_size
        forwards = [_forward(run, run.policy, run.micro_batch(plan.log_prob_budget, prompts))]
        if run.reference:
            forwards.append(_forward(run, run.reference, run.micro_batch(plan.reference_budget, prompts)))
        return max(forwards, key=Counter.total)
    if phase == "policy update":
        budget, prompts = build_policy_plan(config).updates.budget, config.actor_rollout_ref.actor.ppo_mini_batch_size
        return _update(run, run.policy, worker.policy, budget, prompts)
    if phase == "critic update" and worker.critic and run.critic:
        plan = build_critic_plan(config)
        values = _forward(run, run.critic, run.micro_batch(plan.value_budget, config.data.train_batch_size), head=False)
        update = _update(run, run.critic, worker.critic, plan.updates.budget, config.critic.ppo_mini_batch_size)
        return max(update, values, key=Counter.total)
    return Counter()


def _forward(run: Run, shard: Shard, tokens: int, *, head: bool = True) -> Bytes:
    needs = Counter({"gathered": shard.gathered, "activations": shard.forward(tokens)})
    if head:
        needs["logits"] = run.logits(shard, tokens)
    return needs


def _update(run: Run, shard: Shard, learner: LearnerConfig, budget: MicroBatchBudget, prompts: int) -> Bytes:
    """The backward pass or the optimizer's step, whichever takes more."""
    tokens = run.micro_batch(budget, prompts)
    activations = shard.activations(
        tokens,
        checkpointed=learner.model.enable_gradient_checkpointing,
        selective=learner.model.selective_checkpointing,
        by_rows=not budget.padded and (run.on_cpu or shard.computed == FULL),
    )
    backward = Counter({"gathered": shard.gathered + shard.reduced, "activations": activations})
    if learner is run.worker.policy:
        backward["logits"] = run.logits(shard, tokens)
    if learner.fsdp.offload_policy and not run.on_cpu:
        return backward  # the optimizer steps in host memory
    step = Counter({"optimizer": shard.optimizer_step})
    if learner.fsdp.optimizer_offload and not run.on_cpu:
        step["optimizer"] += shard.moments
    return max(backward, step, key=Counter.total)


def _add_engine(run: Run, phase: str, held: Held) -> None:
    """A sleeping engine frees most of its memory on CUDA. On CPU it keeps it, and the trainer keeps its buckets."""
    syncing = phase == "weight sync"
    if run.on_cpu or syncing or phase == "rollout":
        held.device["rollout weights"] += rollout_weights(run)
    if run.on_cpu or phase == "rollout":
        held.device["KV cache"] += cache_bytes(run)
    if syncing or (run.on_cpu and phase != "start-up"):
        held.device["sync buckets"] += run.models.bucket
    if not run.on_cpu:
        held.device["CUDA contexts"] = PROCESSES_PER_GPU * CONTEXT_BYTES
        if not syncing and phase != "rollout":
            held.device["sleeping engine"] = ASLEEP_BYTES


def rollout_weights(run: Run) -> float:
    """Weights of an engine, per device."""
    weights = run.models.policy.engine_weights(run.itemsize, on_cpu=run.on_cpu)
    return weights / run.rollout.tensor_model_parallel_size


def cache_bytes(run: Run) -> float:
    """KV cache per device: on CPU the configured size; on CUDA the rest of the engine's share, of which the engine's
    activations and graphs take a part that is not known here."""
    if run.on_cpu:
        token = run.models.policy.row_cache(1, run.itemsize)
        return cpu_cache_bytes(token, run.rollout, run.devices // run.rollout.tensor_model_parallel_size)
    return max(run.rollout.gpu_memory_utilization * run.gpu - rollout_weights(run), 0)


def _staging(run: Run) -> float:
    """The host copies from which checkpoints are written; they are kept."""
    actor, critic = run.config.actor_rollout_ref.actor.checkpoint, run.config.critic.checkpoint
    size = 0.0
    for name, shard, _ in run.learners:
        contents = (critic if name == "critic" else actor).save_contents
        size += shard.gradients * ("model" in contents) + shard.moments * ("optimizer" in contents)
    return size


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


def memory_plan(config: PPOConfig, findings: Findings) -> None:
    """Report the estimate: an error if memory is short by more than the estimate's error, a warning if by less."""
    gpu = 0  # of the smallest GPU that would be used; GPUs of other machines are not known
    if config.trainer.device == "cuda" and not joins(config.ray_kwargs.ray_init):
        gpu = min((gpu.total for gpu in visible_gpus()[: config.trainer.n_gpus_per_node]), default=0)
    try:
        run = describe_run(config, read_models(config), gpu)
        plans = make_plans(run)
    except OSError as error:
        findings.info("memory.unknown", f"memory is not estimated: a model's config.json cannot be read ({error})")
        return
    except (ValueError, ConfigError) as error:
        findings.error("memory.unknown", f"memory cannot be estimated: {error}")
        return
    for index, plan in enumerate(plans):
        findings.info("memory.plan", f"estimated memory of {plan.place}{plan.remark}, in GiB:\n{table(plan)}")
        if plan.available and plan.peak > plan.available:
            fix = suggest_fix(run, lambda changed, index=index: make_plans(changed)[index].peak, plan.available)
            report = findings.error if plan.peak * (1 - ERROR) > plan.available else findings.warn
            cause = f"memory of {plan.place}: {plan.fullest} takes an estimated {_gib(plan.peak)} GiB, and "
            report("memory.lack", f"{cause}{_gib(plan.available)} GiB are free", fix=fix)
    if run.on_cpu or run.gpu:
        _report_cache(run, findings)


def make_plans(run: Run) -> list[Plan]:
    """Plan each GPU, and the host memory of each machine."""
    phases = [phase for phase in PHASES if run.worker.critic or phase != "critic update"]
    free = 0 if joins(run.config.ray_kwargs.ray_init) else memory_left()
    host = {phase: machine_memory(run, phase) for phase in phases}
    if run.on_cpu:
        return [Plan("this machine", host, free, ", all processes together")]
    device = {phase: phase_memory(run, phase).device for phase in phases}
    remark = " (not measured on CUDA)"
    return [Plan("each GPU", device, run.gpu, remark), Plan("each machine's host", host, free, remark)]


def table(plan: Plan) -> str:
    """Format one line per kind and one column per phase."""
    kinds = list(dict.fromkeys(kind for needs in plan.needs.values() for kind, size in needs.items() if size))
    rows = [("", list(plan.needs))]
    rows += [(kind, [_gib(needs[kind]) for needs in plan.needs.values()]) for kind in kinds]
    rows += [("total", [_gib(needs.total()) for needs in plan.needs.values()])]
    widths = [max(len(phase), 5) + 2 for phase in plan.needs]
    return "\n".join(
        first.ljust(18) + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for first, cells in rows
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def _report_cache(run: Run, findings: Findings) -> None:
    row = run.models.policy.row_cache(run.longest, run.itemsize)
    rows = int(cache_bytes(run) * run.rollout.tensor_model_parallel_size // row)
    cause = f"the KV cache of an engine holds an estimated {rows} rows of {run.longest} tokens "
    cause += f"(max_num_seqs={run.rollout.max_num_seqs})"
    if rows:
        findings.info("memory.cache", cause)
    else:
        findings.warn("memory.cache", cause, fix=f"raise {SHARE}={run.rollout.gpu_memory_utilization:g}", keys=SHARE)


# -- overrides that make a run fit -------------------------------------------------------------------------------------


def suggest_fix(run: Run, peak: Callable[[Run], float], limit: float) -> str:
    """Suggest overrides under which the peak stays within the limit; none of them changes what is learned.

    Each is tried on the plan. The one with the largest effect is taken first, in its mildest value that is enough.
    """
    chosen: dict[str, Any] = {}
    while (present := peak(run)) > limit:
        for candidates in (options(run), _switches(run, SLOW_SWITCHES)):
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
    last = "take a smaller model, more devices, or an adapter (actor_rollout_ref.model.lora_rank=32)"
    return f"set {overrides}, which is not enough: {last}" if chosen else last


def options(run: Run) -> dict[str, list[Any]]:
    """Values of keys that may take less memory, from the mildest to the strongest."""
    values = _switches(run, SWITCHES)
    values |= {key: _halves(_value(run.config, key), run.longest) for key in TOKENS}
    values |= {key: _halves(_value(run.config, key) or 1, 1) for key in ROWS}
    if not run.on_cpu:
        values[SHARE] = [percent / 100 for percent in range(round(100 * _value(run.config, SHARE)) - 5, 9, -5)]
    return {key: tried for key, tried in values.items() if tried}


def _switches(run: Run, keys: Iterable[str]) -> dict[str, list[Any]]:
    return {key: [True] for key in keys if _value(run.config, key) is False}


def _halves(value: int, least: int) -> list[int]:
    return [half for shift in range(1, value.bit_length()) if (half := value >> shift) >= least]


def _with(run: Run, key: str, value: Any) -> Run:
    config = copy.deepcopy(run.config)
    section, _, name = key.rpartition(".")
    vars(_value(config, section))[name] = value
    return describe_run(config, run.models, run.gpu)


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = vars(config)[name]
    return config
