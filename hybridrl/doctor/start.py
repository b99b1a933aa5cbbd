"""Checks of this machine before anything is loaded, by main_ppo, main_sft and the doctor. `Room`: its memory."""

import contextlib
import copy
import importlib.util
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import RepositoryNotFoundError

from hybridrl.checkpoint.read import open_tensors, stored_tensors
from hybridrl.config import ConfigError, PPOConfig, SFTConfig, TrainingConfig
from hybridrl.config.custom_code import attempt, import_libraries, publish_own_keys
from hybridrl.config.files import HUB_NAME, is_sharded, resolve_model
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.schema import DataConfig, ModelConfig
from hybridrl.config.values import PACKAGES
from hybridrl.core.cluster.session import (
    RayMachine,
    describe_room,
    existing_ray,
    missing_machines,
    read_machines,
    request_of,
)
from hybridrl.core.device import memory_left
from hybridrl.doctor.machine import GIB, check_gpus, check_machine, check_versions, machine_resources, visible_gpus
from hybridrl.doctor.memory import PlannedRun, make_plans, memory_plan, plan_run
from hybridrl.doctor.memory_sizes import ITEMSIZE
from hybridrl.runs.prepare import reject_unusable_overrides
from hybridrl.runs.settings import build_algorithm, contents_to_save
from hybridrl.runs.setup import save_times
from hybridrl.runtime.environment import joins
from hybridrl.runtime.guard import LOG_BYTES
from hybridrl.runtime.stacks import largest_processes, run_processes, shared_bytes
from hybridrl.tracking.console import info, warn
from hybridrl.tracking.records import COMPRESSED

HUB_SECONDS = 10.0
KEY, KEEP = "trainer.default_local_dir", "trainer.max_actor_ckpt_to_keep"
DEVICE_KEYS = ("trainer.nnodes", "trainer.n_gpus_per_node")
SAMPLES = "trainer.max_rollout_data_gb"
# Below actor_rollout_ref; tried in turn if no change that leaves the learning unchanged is enough.
LEARNED = {"rollout.dtype": "bfloat16", "actor.fsdp_config.dtype": "bfloat16", "model.lora_rank": 32}
NOT_ENOUGH, MARGIN = "take a smaller model", 0.97  # the next time a little less may be left
# Size of each part of a checkpoint in copies of the parameters. Adam has two moments; SGD and Muon have fewer.
COPIES = {"model": 1, "optimizer": 2, "hf_model": 1}
# Bytes of a sample in its file: of each token of prompt and response, and of what is known besides; of the importance
# weight of a token, and of one that is written with its log-probs (trainer.rollout_tokens). Large files are compressed,
# prose to a third.
TEXT_BYTES, SAMPLE_BYTES, WEIGHT_BYTES, TOKEN_BYTES, COMPRESSION = 4.5, 420, 6.5, 70, 3
# An update without recomputation may take this share of the memory: the plan is not measured on CUDA, and other
# programs use a machine's. Smaller micro-batches than this would slow a GPU down.
GPU_SHARE, CPU_SHARE, FEWEST_TOKENS = 0.8, 0.6, 8192
LAYERS = {0: "none", 1: "all layers", 2: "every second layer", 3: "every third layer", 4: "every fourth layer"}


def check_run_start(config: TrainingConfig) -> None:
    """Print the warnings of `check_start`; raises ConfigError with all of its errors."""
    findings = Findings()
    if check_start(config, findings):
        check_space(config, findings)
    for finding in findings.items:
        if finding.severity == "warning":
            warn(finding.text, finding.code)
        elif finding.code == "memory.recomputation":
            info(finding.text)
    findings.close()


def check_loggers(loggers: Sequence[str], findings: Findings) -> None:
    """Report loggers whose package is not installed: what a run does not log cannot be logged later."""
    for name in loggers:
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            cause, key = f"trainer.logger={name}: its package is not installed", "trainer.logger"
            findings.error("logger.package", cause, f"pip install {name}, or leave it out", keys=key, value=name)


def check_evaluation_start(models: Sequence[str], compare: str | None, device: str) -> None:
    """Raise ConfigError for models neither here nor on the hub, and for versions that cannot work."""
    findings = Findings()
    names = [*(("eval.models", name) for name in models), ("eval.compare", compare)]
    check_models([(key, name) for key, name in names if name and "://" not in name], findings)
    check_versions(device, findings)
    findings.close()


def check_hub(models: Mapping[str, ModelConfig], findings: Findings) -> None:
    """Report a run's models that are neither here nor on the hub, and settings not allowed for a model."""
    check_models([(f"{key}.path", model.path) for key, model in models.items()], findings)
    if findings.errors:
        return
    first = next(iter(models.values()))
    with contextlib.suppress(ConfigError):  # reported with the model: a library may register it
        import_libraries(first.external_lib)
    for key, model in models.items():
        if model is first or (model.path, model.override_config) != (first.path, first.override_config):
            with findings.gathered():
                reject_unusable_overrides(model, f"{key}.override_config")


def check_models(models: Iterable[tuple[str, str]], findings: Findings) -> None:
    """Report models that are neither here nor on the hub, by their keys. It asks once: libraries that load them try for
    a minute."""
    for key, name in models:
        if not HUB_NAME.fullmatch(name) or Path(name).is_dir():
            continue
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            continue
        answer = attempt(partial(HfApi().model_info, name, timeout=HUB_SECONDS))
        if isinstance(answer, RepositoryNotFoundError):
            cause, fix = "neither a directory nor a model on the hub", "check the name, or log in: hf auth login"
            findings.error("model.hub", f"{key}={name}: {cause}", fix, keys=key, value=name)
        elif isinstance(answer, Exception):  # a failure of the network; the library's exceptions depend on its version
            cause = f"neither a directory nor in the hub's cache, and the hub does not respond ({answer})"
            fix = f"name a local directory; where there is a network: hf download {name}"
            findings.error("model.hub", f"{key}={name}: {cause}", fix, keys=key, value=name)


def check_start(config: TrainingConfig, findings: Findings) -> bool:
    """Check models, versions, machine and GPUs, and unless it is supervised the memory of each phase. Returns False
    if a model cannot be used: nothing else is checked then, as each part would ask the hub again, for a minute."""
    trainer, ray_init = config.trainer, config.ray_kwargs.ray_init
    if isinstance(config, SFTConfig):
        models, utilization, engine = {"model": config.model}, 0.0, ""
        tokens = config.data.train_batch_size * config.data.max_length
    else:
        section, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
        models = {"actor_rollout_ref.model": section.model}
        models |= {"critic.model": config.critic.model} if config.critic.enable else {}
        utilization, engine = rollout.gpu_memory_utilization, rollout.name
        tokens = config.data.train_batch_size * rollout.n * (rollout.max_model_len or 0)
    check_hub(models, findings)
    if findings.errors:
        return False
    check_versions(trainer.device, findings, engine=engine)
    check_loggers(trainer.logger, findings)
    devices = config.devices_per_machine if trainer.device == "cpu" else 1
    check_machine(devices, ray_init, tokens, findings, machine_resources())
    here, gpus = not joins(ray_init), []
    if here and trainer.device == "cuda":
        gpus = visible_gpus()[: config.devices_per_machine]
        check_gpus(gpus, utilization, findings)
    if isinstance(config, PPOConfig):
        publish_own_keys(config.own)
        if run := plan_run(config, findings, [gpu.total for gpu in gpus], memory_left() * here):
            memory_plan(choose_recomputation(run, findings), findings)
        if lack := Room(config).lack(saving=False):
            findings.items = [finding for finding in findings.items if finding.code != "memory.lack"]
            findings.error("memory.lack", *lack.rsplit("; ", 1))
    return True


def choose_recomputation(run: PlannedRun, findings: Findings) -> PlannedRun:
    """Decide in the configuration what it leaves open about recomputation, and report it: no layer, every second or
    all, the first for which the update fits; on a GPU each with a micro-batch as configured, then a half, a quarter."""
    share = CPU_SHARE if run.on_cpu else GPU_SHARE
    for name, shard, entry, section, budget in run.learners:
        model = entry.model  # the configuration's own section
        tokens, least = section.ppo_max_token_len_per_gpu, max(FEWEST_TOKENS, run.longest)
        halved = [tokens >> times for times in range(1, tokens.bit_length()) if tokens >> times >= least]
        # Not by the memory that is free on a CPU: a resumed run, which repeats the same numbers, may find another one.
        sizes = [tokens] if run.on_cpu or budget.rows is not None else [tokens, *halved]
        tried = [*product((False, 2), sizes), (True, tokens)]
        if model.enable_gradient_checkpointing is not None:
            tried = [(model.enable_gradient_checkpointing, tokens)]
        for choice in tried:
            model.enable_gradient_checkpointing, section.ppo_max_token_len_per_gpu = choice
            plan = make_plans(replace(run))[0]
            need = plan.needs[f"{name} update"].total()
            if need <= share * plan.available:
                break
        of = f"of {plan.available / GIB:.1f} GiB" if plan.available else "GiB, of memory that is not known here"
        layers = LAYERS[model.recomputes_every] + ", layers are compiled" * shard.compiled
        cause = f"recomputation: {layers}; the plan of the {name} update takes {need / GIB:.1f} {of}"
        if section.ppo_max_token_len_per_gpu < tokens:
            cause += f" in micro-batches of {section.ppo_max_token_len_per_gpu} tokens, not {tokens}"
        findings.info("memory.recomputation", cause)
    return replace(run)


def query_cluster(ray_init: dict[str, Any]) -> list[RayMachine]:
    """Join the existing Ray, read its machines, and leave. Raises ConfigError if it does not respond."""
    with existing_ray(ray_init):
        return read_machines()


def check_devices(
    config: PPOConfig, findings: Findings, query: Callable[[dict[str, Any]], Sequence[RayMachine]] = query_cluster
) -> None:
    """Report ranks and engines, and check the Ray cluster that the run would join. `query` returns its machines.

    Devices that this machine lacks have been rejected with the configuration.
    """
    trainer, width = config.trainer, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    device, machines, per_machine = trainer.device, trainer.nnodes, trainer.n_gpus_per_node or 1
    count, (of_rollout, each_has) = machines * per_machine, config.rollout_pool
    engines, each = of_rollout * each_has // width, f" over {width} of them" if width > 1 else ""
    ranks = f"{count} training rank{'s' * (count > 1)}"
    served = f"{engines} rollout engine{'s' * (engines > 1)}{each}"
    plan = f"{_size(device, machines, per_machine)}: {ranks}, {served}"
    if config.separate:
        plan = f"{_size(device, machines, per_machine)}: {ranks}; {_size(device, of_rollout, each_has)}: {served}"
    findings.info("devices.plan", plan)
    if not joins(config.ray_kwargs.ray_init):
        return
    with findings.gathered("devices.ray"):
        cluster, request = query(config.ray_kwargs.ray_init), request_of(device, per_machine)
        room = "\n".join(describe_room(cluster, request))
        free = {name: sum(machine.free.get(name, 0) for machine in cluster) for name in request}
        if missing := missing_machines(cluster, request, machines):
            fix = "lower trainer.nnodes or trainer.n_gpus_per_node, or add machines"
            findings.error("devices.ray", f"{', '.join(missing)} in the Ray cluster:\n{room}", fix, keys=DEVICE_KEYS)
        elif any(free[name] < machines * amount for name, amount in request.items()):
            fix = "see ray status: the run waits trainer.startup_timeout seconds for them"
            findings.warn("devices.ray", f"others are using the devices now:\n{room}", fix, keys=DEVICE_KEYS)
        else:
            findings.info("devices.ray", f"joins the existing Ray cluster:\n{room}")


def _size(device: str, machines: int, per_machine: int) -> str:
    count, kind = machines * per_machine, "GPU" if device == "cuda" else "CPU device"
    return f"{count} {kind}{'s' * (count > 1)} on {machines} machine{'s' * (machines > 1)}"


class Room:
    """The memory of this machine for a run with logs in that directory: its plan, against the memory of its processes
    and the free memory. Known for reinforcement learning on a CPU, in a Ray of its own, only."""

    def __init__(self, config: TrainingConfig, logs: Path = Path()) -> None:
        self.config, self.logs, self.enough = config, [str(logs / "driver.log")], dict[bool, float]()

    def lack(self, *, saving: bool = True, share: float = 1) -> str:
        """Return what the fullest phase lacks in a share of the memory, `saving` with the copies for a checkpoint, and
        after a semicolon the fix; empty: nothing."""
        config, left = copy.deepcopy(self.config), memory_left()
        if not isinstance(config, PPOConfig) or config.trainer.device != "cpu" or joins(config.ray_kwargs.ray_init):
            return ""
        if saving in self.enough and left >= self.enough[saving]:  # measuring and planning take longer
            return ""
        times, limit = save_times(config.trainer), share * (left + shared_bytes(run_processes(self.logs)))
        if not saving and times.steps <= 0 and times.epochs is None and times.seconds is None:
            config.trainer.save_freq = config.trainer.ckpt_freq_secs = -1  # a save is left out where it does not fit
        if not (lack := _lacking(config, limit) and _lacking(config, MARGIN * limit)):
            self.enough[saving] = limit
            return ""
        changes = ""
        for key, value in LEARNED.items() if NOT_ENOUGH in lack.fix else ():
            section, _, name = f"actor_rollout_ref.{key}".rpartition(".")
            setattr(attrgetter(section)(config), name, value)
            other, changes = _lacking(config, MARGIN * limit), f"{changes} {section}.{name}={value}"
            if not other or NOT_ENOUGH not in other.fix:
                further = other.fix.removeprefix("set") if other else ""
                return f"{lack.statement}; set{changes}{further}, which changes what is learned"
        return lack.text

    def check(self) -> None:
        """Raise ConfigError, with the largest processes, if a step does not fit."""
        if lack := self.lack(saving=False):
            raise ConfigError("\n".join([lack, *largest_processes(self.logs)]))


def _lacking(config: PPOConfig, limit: float) -> Finding | None:
    if run := plan_run(config, findings := Findings(), [], int(limit)):
        memory_plan(run, findings)
    return next((finding for finding in findings.items if finding.code == "memory.lack"), None)


def check_space(config: TrainingConfig, findings: Findings, steps: int | None = None) -> None:
    """Compare the disk with the checkpoints that are kept plus the one being written, and with the samples of the
    steps, if their number is known."""

    def amount(size: float) -> str:
        return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"

    directory = Path(config.trainer.default_local_dir).expanduser().absolute()
    existing = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    times, free, steps = save_times(config.trainer), shutil.disk_usage(existing).free, steps or 0
    samples = 0
    if isinstance(config, PPOConfig) and _on_disk_of(existing, config.trainer.rollout_data_dir):
        correction = config.algorithm.rollout_correction
        weighted = bool(correction.rollout_is and not correction.bypass_mode)
        of_step = _step_bytes(config.data, config.actor_rollout_ref.rollout.n, weighted, config.trainer.rollout_tokens)
        most = math.inf if config.trainer.max_rollout_data_gb is None else config.trainer.max_rollout_data_gb * 1e9
        samples = int(min((steps or config.trainer.total_training_steps or 0) * of_step, most))
    of_samples = f"the samples of all steps take up to {amount(samples)}"
    log = LOG_BYTES if isinstance(config, PPOConfig) and config.reward.num_workers else 0
    size = _checkpoint_bytes(config) if times.ever else None
    if not size:
        if samples > free:
            cause = f"{of_samples}, and {amount(free)} are free in {existing}"
            findings.warn("run.disk", cause, f"set a lower {SAMPLES}", keys=(SAMPLES, KEY))
        return
    saves = (steps or 1) // times.steps if times.steps > 0 else 1
    count = max(min(config.trainer.max_actor_ckpt_to_keep or saves, saves), 1)
    cause = f"a checkpoint takes about {amount(size)}, and {amount(free)} are free in {existing}"
    cause += f"; {of_samples}" * bool(samples) + f"; logs/reward.log takes up to {amount(log)}" * bool(log)
    if (count + 1) * size + samples + log <= free:
        findings.info("run.disk", cause)
    else:
        fit = (free - samples - log) // size - 1
        fix = f"set {KEEP}={fit}" if fit > 0 else f"free some, or move {KEY} to a larger disk"
        fix += f", or set a lower {SAMPLES}" * (samples > size)
        findings.warn("run.disk", f"{cause}: not enough for {count} and one being written", fix, keys=(KEEP, KEY))


def _on_disk_of(existing: Path, directory: str | None) -> bool:
    """Whether a directory is configured, and is or will be on the disk of an existing one."""
    if not directory:
        return False
    place = Path(directory).expanduser().absolute()
    there = next(parent for parent in (place, *place.parents) if parent.is_dir())
    return there.stat().st_dev == existing.stat().st_dev


def _step_bytes(data: DataConfig, responses: int, weighted: bool, with_tokens: int) -> float:
    """Estimate what the training samples of a step take at most; `with_tokens` of them have their tokens."""
    length = data.max_prompt_length + data.max_response_length
    of_sample = SAMPLE_BYTES + TEXT_BYTES * length + WEIGHT_BYTES * data.max_response_length * weighted
    written = data.train_batch_size * responses * of_sample + with_tokens * TOKEN_BYTES * data.max_response_length
    return written / COMPRESSION if written >= COMPRESSED else written


def _checkpoint_bytes(config: TrainingConfig) -> int | None:
    """Estimate the size of a checkpoint; None if the models are not here or cannot be read, or only an
    adapter is saved."""
    total = 0
    try:
        if isinstance(config, SFTConfig):
            saved = [(config.model, config.engine.fsdp_config.model_dtype, config.checkpoint.save_contents)]
        else:
            section, critic = config.actor_rollout_ref, config.critic
            actor = (section.model, section.actor.fsdp_config.model_dtype)
            models = {"critic": (critic.model, critic.fsdp.model_dtype)}
            contents = contents_to_save(config.actor_rollout_ref, config.critic, build_algorithm(config))
            saved = [(*models.get(name, actor), names) for name, names in contents.items()]
        for model, dtype, names in saved:
            directory = resolve_model(model.path)
            if model.lora_rank or not directory.is_dir():
                return None
            stored = open_tensors(Path(model.path)).meta if is_sharded(model.path) else stored_tensors(directory)
            count = sum(tensor.shape.numel() for tensor in stored.values())
            total += count * ITEMSIZE[dtype] * sum(COPIES.get(part, 0) for part in names)
    except ConfigError:  # reported with the algorithm or the model
        return None
    return total or None
