"""What each phase of a run holds in memory, on a device and in the host memory of a machine, in bytes by kind.

As it is from the second step on, when all there is has been made once. Knows no machine but the size of its GPUs.
"""

from collections import Counter
from dataclasses import dataclass, field

from hybridrl.doctor import memory_formulas as formulas
from hybridrl.doctor.memory_formulas import ModelSizes
from hybridrl.doctor.memory_setup import ITEMSIZE, Setup
from hybridrl.doctor.memory_work import Needs, working
from hybridrl.rollout.vllm.cpu_cache import cpu_cache_bytes
from hybridrl.runs.setup import save_times
from hybridrl.training.worker import LearnerConfig

PHASES = ("start-up", "rollout", "log-probs", "critic update", "policy update", "hand-over", "save")
# When parameters that may leave the device have left it: critic and policy make room for one another.
POLICY_AWAY = ("rollout", "critic update")
CRITIC_AWAY = ("rollout", "log-probs", "policy update", "hand-over", "save")

# Measured on CPU, of models without a size (scripts/benchmark/memory_plan.py): the driver with Ray and two scorers, and
# a slot's train worker, rollout server and engine.
MACHINE_BYTES, SLOT_BYTES = 1007e6, 1447e6


PROCESSES_PER_GPU = 2  # the trainer and the engine


@dataclass
class Held:
    """Bytes by kind: of one device, and of its share of the machine's host memory."""

    device: Needs = field(default_factory=Counter)
    host: Needs = field(default_factory=Counter)


def held(run: Setup, phase: str) -> Held:
    """What a device holds at most in a phase, and its share of host memory."""
    found = Held()
    _put_learner(run, run.models.policy, run.worker.policy, phase, found)
    if run.worker.critic and run.models.critic:
        _put_learner(run, run.models.critic, run.worker.critic, phase, found)
    if run.worker.reference and run.models.reference:
        reference = formulas.parameters(run.models.reference, run.reference_kept)
        offloaded = run.worker.reference.offload and not run.on_cpu
        _put(found, "reference", reference, host=offloaded, device=not offloaded or phase == "start-up")
    found.device.update(working(run, phase))
    _put_engine(run, phase, found)
    if phase != "start-up" and save_times(run.config.trainer).ever:
        found.host["staging of saves"] = _staging(run)
    return found


def machine_needs(run: Setup, phase: str) -> Needs:
    """What all processes of a machine hold in host memory; on CPU that is all there is."""
    one = held(run, phase)
    needs = one.host + one.device if run.on_cpu else one.host
    needs = Counter({kind: run.slots * size for kind, size in needs.items()})
    needs["processes"] = MACHINE_BYTES + run.slots * SLOT_BYTES
    return needs


def _put_learner(run: Setup, sizes: ModelSizes, learner: LearnerConfig, phase: str, found: Held) -> None:
    """What of it may leave the device has its place in host memory all the time; there shards also arrive from files
    by way of the device."""
    critic, kept, fsdp = learner is run.worker.critic, run.kept(learner), learner.fsdp
    all_offloaded, leaves = fsdp.offload_policy and not run.on_cpu, fsdp.param_offload and not run.on_cpu
    away = phase != "start-up" if all_offloaded else leaves and phase in (CRITIC_AWAY if critic else POLICY_AWAY)
    parameters, moments = formulas.parameters(sizes, kept), run.moments(sizes, learner)
    _put(found, "critic" if critic else "parameters", parameters, host=all_offloaded or leaves, device=not away)
    on_host = all_offloaded or fsdp.optimizer_offload
    _put(found, "critic" if critic else "optimizer", moments, host=on_host, device=not on_host)
    if phase == ("critic update" if critic else "policy update"):
        gradients = formulas.gradients(sizes, kept)
        _put(found, "gradients", gradients, host=all_offloaded, device=not all_offloaded)


def _put(found: Held, kind: str, size: float, *, host: bool, device: bool) -> None:
    if host:
        found.host[kind] += size
    if device:
        found.device[kind] += size


# -- the engine and saves ----------------------------------------------------------------------------------------------


def rollout_weights(run: Setup) -> float:
    """Of one device's engine."""
    rollout = run.config.actor_rollout_ref.rollout
    size = formulas.rollout_weights(run.models.policy, ITEMSIZE[rollout.dtype or "float32"], on_cpu=run.on_cpu)
    return size / rollout.tensor_model_parallel_size


def cache_bytes(run: Setup) -> float:
    """Of one device: on CPU as asked for, on CUDA what the weights leave of the engine's share (and its own activations
    and graphs take some of that)."""
    rollout = run.config.actor_rollout_ref.rollout
    if run.on_cpu:
        return cpu_cache_bytes(_row_bytes(run, 1), rollout, run.slots // rollout.tensor_model_parallel_size)
    return max(rollout.gpu_memory_utilization * run.gpu - rollout_weights(run), 0)


def cached_rows(run: Setup) -> int:
    """How many rows of full length the cache of one engine holds."""
    engine = cache_bytes(run) * run.config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return int(engine // _row_bytes(run, run.longest))


def _row_bytes(run: Setup, tokens: int) -> int:
    itemsize = ITEMSIZE[run.config.actor_rollout_ref.rollout.dtype or "float32"]
    return formulas.cache_of_row(run.models.policy, tokens, itemsize)


def _put_engine(run: Setup, phase: str, found: Held) -> None:
    """An engine that sleeps gives most of its memory back on CUDA, and keeps it on CPU, as the trainer does its
    bucket."""
    there = {
        "rollout weights": run.on_cpu or phase in ("rollout", "hand-over"),
        "KV cache": run.on_cpu or phase == "rollout",
        "hand-over bucket": (run.on_cpu and phase != "start-up") or phase == "hand-over",
    }
    sizes = {"rollout weights": rollout_weights, "KV cache": cache_bytes, "hand-over bucket": _bucket}
    found.device.update({kind: sizes[kind](run) for kind, is_there in there.items() if is_there})
    if not run.on_cpu:
        found.device["CUDA contexts"] = PROCESSES_PER_GPU * formulas.CONTEXT_BYTES
        if phase not in ("rollout", "hand-over"):
            found.device["sleeping engine"] = formulas.ASLEEP_BYTES


def _bucket(run: Setup) -> float:
    return run.models.bucket


def _staging(run: Setup) -> float:
    """The copies that saves are written from, which are kept."""
    actor, critic = run.config.actor_rollout_ref.actor.checkpoint, run.config.critic.checkpoint
    found = _copied(run, run.models.policy, run.worker.policy, actor.save_contents)
    if run.worker.critic and run.models.critic:
        found += _copied(run, run.models.critic, run.worker.critic, critic.save_contents)
    return found


def _copied(run: Setup, sizes: ModelSizes, learner: LearnerConfig, contents: list[str]) -> float:
    trained = formulas.gradients(sizes, run.kept(learner)) if "model" in contents else 0
    return trained + (run.moments(sizes, learner) if "optimizer" in contents else 0)
