"""Estimate of a run's memory in each phase, from its second step on, when every buffer has been allocated; and of the
overrides that make it fit. Sizes are bytes."""

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.findings import Findings
from hybridrl.config.schema import ActorConfig, CriticConfig
from hybridrl.core.device import KEPT_BYTES
from hybridrl.core.rollout.cache import cpu_cache_bytes
from hybridrl.core.training.learner import RankModel
from hybridrl.core.training.planning import MicroBatchBudget, UpdatePlan
from hybridrl.doctor.machine import GIB, UTILIZATION
from hybridrl.doctor.memory_sizes import ENTRY_BYTES, FULL, ITEMSIZE, Models, ModelSizes, Shard, in_gib, read_models
from hybridrl.plugins import load
from hybridrl.runs.attempts import ACTOR, PPO_SIZES, REF, ROLLOUT
from hybridrl.runs.settings import build_algorithm, policy_loss_config, ppo_worker_config
from hybridrl.runs.setup import save_times

# What follows from the numbers of parameters, or was measured: the rest is estimated, with errors up to 20%.
EXACT = ("parameters", "optimizer", "gradients", "reference", "critic", "processes")
# Measured on CPU with models of negligible size (scripts/benchmark/memory_plan.py): the driver with Ray and two
# scorers; per device, the train worker, the rollout server and the engine.
MACHINE_BYTES, DEVICE_BYTES = 1007e6, 1447e6
ROUTE_BYTES, ROUTE_COPIES = 2, 4  # copies: episodes, batch, shared for log-probs, shared for the update
# Measured on one H100 with vLLM 0.26 (scripts/benchmark/gpu.py): what a train worker and an engine hold of the GPU
# outside their tensors, with loaded kernels. A sleeping engine frees weights and cache, and keeps CUDA graphs, kernel
# workspaces and NCCL buffers: 0.3 GiB with four captured sizes, while the usual number of them is assumed to take more.
TRAINER_CONTEXT_BYTES, ENGINE_CONTEXT_BYTES, ASLEEP_BYTES = 1.3 * GIB, 0.7 * GIB, 0.8 * GIB

HOST = "at most"  # the one column of the host's memory
PHASES = ("start-up", "rollout", "log-probs", "critic update", "policy update", "weight sync")
STAGED = ("weight sync", "rollout")  # after an update, while a checkpoint is written on CPU, whose copy is then freed
# Phases in which offloaded parameters have left the device: policy and critic make room for each other.
AWAY = {
    "policy": ("rollout", "critic update"),
    "critic": ("rollout", "log-probs", "policy update", "weight sync"),
}
KINDS = {"policy": ("parameters", "optimizer"), "critic": ("critic", "critic")}  # kinds of parameters and of moments
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
TOKENS = tuple(sizes.tokens for sizes in PPO_SIZES.values())
ROWS = (f"{ACTOR}.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.max_num_seqs")

Bytes = Counter[str]  # by kind


class PlannedModel(NamedTuple):
    """A trained model; `budget` is that of an update's micro-batch."""

    name: str
    shard: Shard
    config: RankModel
    section: ActorConfig | CriticConfig
    budget: MicroBatchBudget


@dataclass
class PlannedRun:
    """Everything that memory depends on. `gpu` is the memory of a GPU, `free` that of this machine; 0: unknown."""

    config: PPOConfig
    models: Models
    gpu: float = 0
    free: float = 0

    def __post_init__(self) -> None:
        config, models, section = self.config, self.models, self.config.actor_rollout_ref
        worker = ppo_worker_config(config, build_algorithm(config), Path(), steps=1)
        self.devices, self.device = config.trainer.n_gpus_per_node or 1, config.trainer.device
        self.on_cpu = self.device == "cpu"
        self.learners = list[PlannedModel]()
        self.frozen = dict[str, tuple[Shard, bool]]()  # with whether it is offloaded
        # Forward passes without gradients by phase: the model, its budget, and whether it has a head of logits.
        self.forwards = defaultdict[str, list[tuple[Shard, MicroBatchBudget, bool]]](list)
        trained = {"actor": (section.actor, section), "critic": (config.critic, config.critic)}
        for name, sizes in models.sizes.items():
            entry, language = worker.models[name], worker.models[name].head == "language"
            muon = entry.trained is not None and entry.trained.optimizer.optimizer == "Muon"
            whole = self.devices * config.trainer.nnodes == 1 and not entry.fsdp.offload_policy
            shard = Shard(sizes, entry.fsdp, muon=muon, frozen=entry.trained is None, whole=whole)
            if entry.trained is None:
                self.frozen[name] = shard, entry.fsdp.offload_policy and not self.on_cpu
            else:
                (part, planned), label = trained[name], "policy" if name == "actor" else name
                self.learners.append(PlannedModel(label, shard, entry, part, UpdatePlan.of(planned).budget))
            self.forwards["critic update" if name == "critic" else "log-probs"].append((shard, entry.budget, language))
        loss = policy_loss_config(config)
        compared = [(loss.against,), loss.teachers]  # a micro-batch has one of the teachers
        self.compared = [[self.frozen[name][0] for name in names if name in self.frozen] for names in compared]
        self._plan_engine(models.policy)

    def _plan_engine(self, sizes: ModelSizes) -> None:
        """Plan what an engine has per device; its devices are those of a machine."""
        section, rollout = self.config.actor_rollout_ref, self.config.actor_rollout_ref.rollout
        self.engine_devices, self.apart = self.config.rollout_pool[1], self.config.separate
        width, itemsize = rollout.tensor_model_parallel_size, ITEMSIZE[rollout.dtype or "float32"]
        self.longest, token_bytes = rollout.max_model_len or 0, sizes.layers * sizes.cached * itemsize
        self.row_bytes, self.base = self.longest * token_bytes, 0.0
        if self.on_cpu:  # vLLM packs weights; the cache has the configured size
            self.weights = (sizes.parameters + sizes.copied) * itemsize / width
            rows = self.config.data.train_batch_size * rollout.n * width / self.engine_devices
            self.engine_work = sizes.engine_work(min(rows, rollout.max_num_seqs), itemsize / width)
            block = load(f"engine.{rollout.name}").cpu_block
            self.cache: float = cpu_cache_bytes(token_bytes, rollout, self.engine_devices // width, block)
            return
        # The rest of the engine's share; activations and graphs take an unknown part of it.
        self.weights = sizes.parameters * itemsize / width
        self.cache = max(rollout.gpu_memory_utilization * self.gpu - self.weights, 0)
        if section.model.lora_rank and not section.model.lora.merge and rollout.free_cache_engine and not self.apart:
            self.base = sizes.page_locked * itemsize / width  # a sleeping engine keeps it in host memory

    def micro_batch(self, budget: MicroBatchBudget, prompts: int) -> int:
        """Tokens per device in the largest micro-batch when `prompts` are spread over all devices, and all rows of a
        rank have the greatest length."""
        spread = self.devices * self.config.trainer.nnodes
        rows = -(-prompts * self.config.actor_rollout_ref.rollout.n // spread) * budget.devices
        if budget.rows is None:
            tokens = max(self.longest, min(budget.tokens, rows * self.longest))
        else:
            tokens = min(budget.rows, rows) * self.longest
        return -(-tokens * budget.tensor // budget.devices)


def trainer_memory(run: PlannedRun, phase: str) -> Bytes:
    """Estimate the peak of a phase on a device that trains, without an engine."""
    memory, starting = Bytes(), phase == "start-up"
    for name, shard, config, *_ in run.learners:
        # Under `offload_policy` shards still pass through the device on their way from the files.
        fsdp, everything = config.fsdp, config.fsdp.offload_policy and not run.on_cpu
        leaves = fsdp.param_offload and not run.on_cpu and phase in AWAY[name]
        parameters, moments = KINDS[name]
        memory[parameters] += shard.parameters * (starting if everything else not leaves)
        memory[moments] += shard.moments * (not everything and not fsdp.optimizer_offload)
        memory["gradients"] += shard.gradients * (phase == f"{name} update" and not everything)
    for name, (shard, offloaded) in run.frozen.items():
        memory[name] += shard.parameters * (starting or not offloaded)
    memory.update(_working(run, phase))
    if phase == "weight sync" or (run.on_cpu and not starting):  # on CPU they are kept
        memory["sync buckets"] += run.models.bucket
    if run.on_cpu and phase in STAGED:
        update = _working(run, "policy update").total() + run.learners[0].shard.gradients
        memory["unused blocks"] = min(update, KEPT_BYTES)
    if not run.on_cpu:
        memory["CUDA contexts"] += TRAINER_CONTEXT_BYTES
    return memory


def engine_memory(run: PlannedRun, phase: str) -> Bytes:
    """Estimate what an engine has of its device in a phase. It sleeps during training on a GPU that it shares."""
    if not run.on_cpu and not run.apart and phase not in ("rollout", "weight sync"):
        return Bytes({"CUDA contexts": ENGINE_CONTEXT_BYTES, "sleeping engine": ASLEEP_BYTES})
    memory = Bytes({"rollout weights": run.weights})
    if run.on_cpu or run.apart or phase == "rollout":
        memory["KV cache"] = run.cache
    if run.on_cpu and phase != "start-up":  # only a part of other phases' memory is kept
        memory["engine's work"] = run.engine_work.get(phase) or min(max(run.engine_work.values()), KEPT_BYTES)
    if not run.on_cpu:
        memory["CUDA contexts"] = ENGINE_CONTEXT_BYTES
        memory["sync buckets"] = run.models.bucket * (run.apart and phase == "weight sync")
    return memory


def host_memory(run: PlannedRun, phase: str = HOST) -> Bytes:
    """Estimate the most host memory of all processes of a machine, without the memory of devices. Offloaded parameters
    keep their place there, and so does the copy for a checkpoint, except on CPU (STAGED)."""
    memory, saves = Bytes(), save_times(run.config.trainer).ever
    for name, shard, config, section, _ in run.learners:
        everything, saved = config.fsdp.offload_policy and not run.on_cpu, section.checkpoint.save_contents
        parameters, moments = KINDS[name]
        memory[parameters] += shard.parameters * (everything or (config.fsdp.param_offload and not run.on_cpu))
        memory[moments] += shard.moments * (everything or config.fsdp.optimizer_offload)
        memory["gradients"] = max(memory["gradients"], shard.gradients * everything)  # one update at a time
        staged = shard.gradients * ("model" in saved) + shard.moments * ("optimizer" in saved)
        memory["checkpoint staging"] += staged * (saves and (not run.on_cpu or phase in STAGED))
    for name, (shard, offloaded) in run.frozen.items():
        memory[name] += shard.parameters * offloaded
    memory["sleeping base"] += run.base  # torch keeps page-locked memory for the next sleep
    memory = Bytes({kind: run.devices * size for kind, size in memory.items()})
    devices = (run.devices + run.engine_devices) / 2  # assumed, if apart: each has half of a device's processes
    memory["processes"] = MACHINE_BYTES + devices * DEVICE_BYTES
    sizes, section = run.models.policy, run.config.actor_rollout_ref
    memory["tokenizers"] = ENTRY_BYTES * sizes.vocabulary
    if section.actor.router_replay.mode == "R3":
        rows = run.config.data.train_batch_size * section.rollout.n
        memory["routes"] = ROUTE_COPIES * rows * run.longest * sizes.layers * sizes.per_token * ROUTE_BYTES
    return memory


def _working(run: PlannedRun, phase: str) -> Bytes:
    """Temporary memory of a phase's computation, at most; none in phases that only move weights or wait."""
    needs = [Bytes()]
    for shard, budget, head in run.forwards.get(phase, ()):
        tokens = run.micro_batch(budget, run.config.data.train_batch_size)
        logits = shard.logits(tokens, run.device) * head
        needs.append(Bytes(gathered=shard.gathered, activations=shard.forward(tokens), logits=logits))
    for name, shard, config, section, budget in run.learners:
        if phase == f"{name} update":
            tokens = run.micro_batch(budget, section.ppo_mini_batch_size)
            by_rows = (run.on_cpu or shard.computed == FULL) and not budget.padded
            activations = shard.activations(tokens, config.model, by_rows=by_rows)
            logits = shard.logits(tokens, run.device) * (name == "policy")
            compared = [max((model.compared(tokens) for model in each), default=0) for each in run.compared]
            seen = shard.pictures(tokens * budget.devices // budget.tensor, run.config)
            activations += (sum(compared) + seen) * (name == "policy")
            needs.append(Bytes(gathered=shard.gathered + shard.reduced, activations=activations, logits=logits))
            if not config.fsdp.offload_policy or run.on_cpu:  # else the optimizer steps in host memory
                moved = shard.moments * (config.fsdp.optimizer_offload and not run.on_cpu)
                needs.append(Bytes(optimizer=shard.optimizer_step + moved))
    return max(needs, key=Counter.total)


# -- the plan ----------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Estimated memory of each phase in one place, and the bytes available there; 0 if that is not known."""

    place: str
    needs: dict[str, Bytes]
    available: float
    remark: str = " (not measured on CUDA)"

    @property
    def fullest(self) -> str:
        return max(self.needs, key=lambda phase: self.needs[phase].total())

    @property
    def peak(self) -> float:
        return self.needs[self.fullest].total()

    @property
    def certain(self) -> float:
        """The bytes that no micro-batch and no setting of an engine changes, in the phase with most of them."""
        return max(sum(needs[kind] for kind in EXACT) for needs in self.needs.values())

    def __str__(self) -> str:
        """One line per kind and one column per phase."""
        kinds = dict.fromkeys(kind for needs in self.needs.values() for kind, size in needs.items() if size)
        rows = [("", list(self.needs))]
        rows += [(kind, [in_gib(needs[kind]) for needs in self.needs.values()]) for kind in kinds]
        rows += [("total", [in_gib(needs.total()) for needs in self.needs.values()])]
        widths = [max(len(phase), 5) + 2 for phase in self.needs]
        return "\n".join(f"{title:<18}" + "".join(map(str.rjust, cells, widths)) for title, cells in rows)


def make_plans(run: PlannedRun) -> list[Plan]:
    """Plan each GPU, and the host memory of each machine."""
    phases = [phase for phase in PHASES if len(run.learners) > 1 or phase != "critic update"]
    trainer = {phase: trainer_memory(run, phase) for phase in phases}
    engine = {phase: engine_memory(run, phase) for phase in phases}
    if run.on_cpu:
        needs = {phase: _times(run.devices, trainer[phase]) + host_memory(run, phase) for phase in phases}
        needs = {phase: needs[phase] + _times(run.engine_devices, engine[phase]) for phase in phases}
        return [Plan("this machine", needs, run.free, ", all processes together")]
    host = Plan("each machine's host", {HOST: host_memory(run)}, run.free)
    if run.apart:
        engine = {phase: engine[phase] for phase in ("rollout", "weight sync")}
        return [Plan("each GPU", trainer, run.gpu), host, Plan("each GPU of the rollout servers", engine, run.gpu)]
    return [Plan("each GPU", {phase: trainer[phase] + engine[phase] for phase in phases}, run.gpu), host]


def _times(count: int, memory: Bytes) -> Bytes:
    return Bytes({kind: count * size for kind, size in memory.items()})


def plan_run(config: PPOConfig, findings: Findings, gpus: Sequence[int], free: int) -> PlannedRun | None:
    """Plan a run; None if a model cannot be read. `gpus` is the memory of those that would be used, none if unknown;
    `free` that of this machine, 0 if unknown."""
    try:
        return PlannedRun(config, read_models(config), min(gpus, default=0), free)
    except OSError as error:
        findings.info("memory.unknown", f"memory is not estimated: a model's config.json cannot be read ({error})")
    except ValueError as error:
        if not isinstance(error, ConfigError):  # reported with the model or the algorithm
            findings.error("memory.unknown", f"the model cannot be trained as configured: {error}")
    return None


def memory_plan(run: PlannedRun, findings: Findings) -> None:
    """Report the estimate, with an error if what is counted exactly does not fit by itself, else with a warning."""
    for index, plan in enumerate(make_plans(run)):
        phase = "the run" if plan.fullest == HOST else plan.fullest
        short = plan.available and plan.peak > plan.available
        most = f"at most {in_gib(plan.peak)} GiB" + f" of {in_gib(plan.available)}" * (plan.available > 0)
        most = f", in GiB:\n{plan}" if short else f": {most}, in {phase}"
        findings.info("memory.plan", f"estimated memory of {plan.place}{plan.remark}{most}")
        if short:
            fix = suggest_fix(run, lambda changed, index=index: make_plans(changed)[index].peak, plan.available)
            report = findings.error if plan.certain > plan.available else findings.warn
            cause = f"memory of {plan.place}: {phase} takes an estimated {in_gib(plan.peak)} GiB, and "
            report("memory.lack", f"{cause}{in_gib(plan.available)} GiB are free", fix=fix)
    _report_moved(run, findings)
    if run.on_cpu or run.gpu:
        _report_cache(run, findings)


def _report_moved(run: PlannedRun, findings: Findings) -> None:
    """Report the bytes exchanged by ranks where layouts can be chosen: in mixtures, and between parts of a layer."""
    for name, shard, config, section, budget in run.learners:
        tokens = run.micro_batch(budget, section.ppo_mini_batch_size)
        moved = shard.moved(tokens, recomputed=config.model.recomputes_every)
        if any(moved.values()) and (shard.sizes.routed or shard.sizes.tensor > 1):
            sizes = ", ".join(f"{size / GIB:.2f} of {kind}" for kind, size in moved.items() if size)
            cause = f"{name}: per layer and micro-batch of {tokens} tokens each device receives, in GiB: {sizes} "
            findings.info("memory.moved", cause + "(arithmetic, not measured)")


def _report_cache(run: PlannedRun, findings: Findings) -> None:
    rollout = run.config.actor_rollout_ref.rollout
    width, share = rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization
    rows = int(run.cache * width // run.row_bytes)
    cause = f"the KV cache of an engine holds an estimated {rows} rows of {run.longest} tokens "
    cause += f"(max_num_seqs={rollout.max_num_seqs})"
    if rows:
        findings.info("memory.cache", cause)
        return
    fix, widths = f"raise {UTILIZATION}={share:g}", range(2, min(run.engine_devices, 1024) + 1)
    wide = [each for each in widths if run.engine_devices % each == 0 and run.weights * width / each < share * run.gpu]
    if wide:
        fix += f", or set {ROLLOUT}.tensor_model_parallel_size={wide[0]}"
    findings.warn("memory.cache", cause, fix, keys=UTILIZATION)


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
        if peak(replace(run, config=config)) <= limit:
            return f"{config.trainer.devices} devices (trainer.nnodes x trainer.n_gpus_per_node)"
    return "a machine with more memory" if run.on_cpu else "GPUs with more memory"


def _candidates(run: PlannedRun) -> Iterator[dict[str, list[Any]]]:
    """Values of keys that may take less memory, from the mildest to the strongest; first those that cost no speed."""
    present = {key: attrgetter(key)(run.config) for key in (*SWITCHES, *SLOW_SWITCHES, *TOKENS, *ROWS, UTILIZATION)}
    values: dict[str, list[Any]] = {key: [True] for key in SWITCHES if present[key] not in (True, None)}
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
    return replace(run, config=config)
