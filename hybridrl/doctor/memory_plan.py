"""The memory plan: what each phase of a run takes, against what the machine has, and which override mends a lack.

Knows sizes alone, of the models' config.json; docs/memory.md says how far off the formulae are.
"""

from dataclasses import dataclass
from pathlib import Path

from hybridrl.cluster.session import joins
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.findings import Findings
from hybridrl.doctor.gpus import visible_gpus
from hybridrl.doctor.machine import memory_left
from hybridrl.doctor.memory_phases import PHASES, cached_rows, held, machine_needs
from hybridrl.doctor.memory_remedy import remedy
from hybridrl.doctor.memory_setup import Models, Setup, setup
from hybridrl.doctor.memory_sizes import blank, hand_over_buffer, model_sizes
from hybridrl.doctor.memory_work import Needs
from hybridrl.runs.settings import build_algorithm, ppo_worker_config

GIB = 2**30
ERROR = 0.2  # of the plan, at most, where it was measured
FIRST_COLUMN = 18


@dataclass(frozen=True)
class Plan:
    """What one place holds in each phase, and what it has to offer, in bytes; 0 where that is not known."""

    place: str
    needs: dict[str, Needs]
    offered: int

    @property
    def fullest(self) -> str:
        return max(self.needs, key=lambda phase: self.needs[phase].total())

    @property
    def peak(self) -> float:
        return self.needs[self.fullest].total()


def memory_plan(config: PPOConfig, findings: Findings) -> None:
    """Tell of the plan; refuse it where the machine lacks more than the plan may be wrong by, warn where it lacks
    less."""
    try:
        run = setup(config, read_models(config), _gpu_bytes(config))
        found = plans(run)
    except OSError as error:
        return findings.inform(
            "memory.unknown", f"memory is not planned: a model's config.json cannot be read ({error})"
        )
    except (ValueError, ConfigError) as error:
        return findings.refuse("memory.unknown", f"memory cannot be planned: {error}")
    for plan in found:
        findings.inform("memory.plan", f"{plan.place}\n{table(plan)}")
        _judge(run, plan, findings)
    _tell_cache(run, findings)


def read_models(config: PPOConfig) -> Models:
    """The sizes of all models of a run; OSError, ValueError or ConfigError where one cannot be read or trained."""
    section, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    worker = ppo_worker_config(config, build_algorithm(config), Path(), steps=1)
    policy = blank(section.model, "actor_rollout_ref.model")
    limit = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    reference = critic = None
    if worker.reference:
        reference = model_sizes(blank(worker.reference.model, "actor_rollout_ref.ref.model"))
    if worker.critic:
        critic = model_sizes(blank(config.critic.model, "critic.model", values=True))
    return Models(model_sizes(policy), hand_over_buffer(policy, rollout.dtype or "float32", limit), reference, critic)


def _gpu_bytes(config: PPOConfig) -> int:
    """Of the smallest GPU that would be used; 0 on CPU, and where the GPUs are elsewhere."""
    if config.trainer.device != "cuda" or joins(config.ray_kwargs.ray_init):
        return 0
    return min((gpu.total for gpu in visible_gpus()[: config.trainer.n_gpus_per_node]), default=0)


def plans(run: Setup) -> list[Plan]:
    """Of each GPU, and of the host memory of a machine."""
    phases = [phase for phase in PHASES if run.worker.critic or phase != "critic update"]
    free = 0 if joins(run.config.ray_kwargs.ray_init) else memory_left()
    host = {phase: machine_needs(run, phase) for phase in phases}
    if run.on_cpu:
        return [Plan("memory of this machine, in all processes together, in GiB:", host, free)]
    device = {phase: held(run, phase).device for phase in phases}
    return [
        Plan("memory of each GPU, in GiB (on CUDA not measured):", device, run.gpu),
        Plan("host memory of each machine, in GiB (on CUDA not measured):", host, free),
    ]


def table(plan: Plan) -> str:
    """A line a kind, a column a phase."""
    kinds = list(dict.fromkeys(kind for needs in plan.needs.values() for kind, size in needs.items() if size))
    lines = [_line("", list(plan.needs), plan)]
    lines += [_line(kind, [_gib(needs[kind]) for needs in plan.needs.values()], plan) for kind in kinds]
    return "\n".join([*lines, _line("together", [_gib(needs.total()) for needs in plan.needs.values()], plan)])


def _line(first: str, cells: list[str], plan: Plan) -> str:
    columns = (cell.rjust(max(len(phase), 5) + 2) for cell, phase in zip(cells, plan.needs, strict=True))
    return first.ljust(FIRST_COLUMN) + "".join(columns)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def _judge(run: Setup, plan: Plan, findings: Findings) -> None:
    if not plan.offered or plan.peak <= plan.offered:
        return
    index = [item.place for item in plans(run)].index(plan.place)
    mend = remedy(run, lambda changed: plans(changed)[index].peak, plan.offered)
    place = plan.place.split(",")[0]
    line = f"{place}: {plan.fullest} takes {_gib(plan.peak)} GiB, and {_gib(plan.offered)} are free; {mend}"
    if plan.peak * (1 - ERROR) > plan.offered:
        findings.refuse("memory.lack", line)
    else:
        findings.warn("memory.lack", line)


def _tell_cache(run: Setup, findings: Findings) -> None:
    if not run.on_cpu and not run.gpu:
        return
    rollout, rows = run.config.actor_rollout_ref.rollout, cached_rows(run)
    words = f"the KV cache of an engine holds {rows} rows of {run.longest} tokens (max_num_seqs={rollout.max_num_seqs})"
    if rows:
        return findings.inform("memory.cache", words)
    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    findings.warn("memory.cache", f"{words}; raise {key}={rollout.gpu_memory_utilization:g}")
