"""The devices that a run asks for, against this machine's or those of a Ray that it would join."""

from collections.abc import Callable
from typing import Any

from hybridrl.cluster.session import Cluster, ask_cluster, bundle_of, joins
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.findings import Findings


def check_devices(
    config: PPOConfig, findings: Findings, ask: Callable[[dict[str, Any]], Cluster] = ask_cluster
) -> None:
    """What this machine lacks has been refused with the configuration. `ask`: who tells of a Ray to join."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    machines, per_machine = trainer.nnodes, trainer.n_gpus_per_node or 1
    ranks = machines * per_machine
    kind = "GPU" if trainer.device == "cuda" else "CPU slot"
    engines = ranks // rollout.tensor_model_parallel_size
    each = f" over {rollout.tensor_model_parallel_size} of them" if rollout.tensor_model_parallel_size > 1 else ""
    findings.inform(
        "devices.plan",
        f"{ranks} {kind}{'s' * (ranks > 1)} on {machines} machine{'s' * (machines > 1)}: "
        f"{ranks} training rank{'s' * (ranks > 1)}, {engines} rollout engine{'s' * (engines > 1)}{each}",
    )
    if joins(config.ray_kwargs.ray_init):
        _check_cluster(config, ask, findings)


def _check_cluster(config: PPOConfig, ask: Callable[[dict[str, Any]], Cluster], findings: Findings) -> None:
    device, machines, per_machine = config.trainer.device, config.trainer.nnodes, config.trainer.n_gpus_per_node or 1
    try:
        cluster = ask(config.ray_kwargs.ray_init)
    except ConfigError as error:
        findings.refuse("devices.ray", str(error))
        return
    wanted = {name: amount * per_machine for name, amount in bundle_of(device).items()}
    fit = [had for had in cluster.machines if all(had.get(name, 0) >= amount for name, amount in wanted.items())]
    asked = f"trainer.nnodes={machines} x trainer.n_gpus_per_node={per_machine}"
    has = ", ".join(f"{had.get('GPU', 0):g} GPUs and {had.get('CPU', 0):g} CPUs" for had in cluster.machines)
    needs = " and ".join(f"{amount:g} {name}s" for name, amount in wanted.items())
    if len(fit) < machines:
        told = f"{asked} on {device}: {machines} machine(s) with {needs} each are asked of Ray, which has: {has}"
        findings.refuse("devices.ray", f"{told}; lower trainer.nnodes or trainer.n_gpus_per_node, or add machines")
    elif any(cluster.free.get(name, 0) < machines * amount for name, amount in wanted.items()):
        told = f"{asked} on {device}: Ray has the devices ({has}), and others use them now"
        findings.warn("devices.ray", f"{told}; see ray status: the run waits trainer.startup_timeout seconds for them")
    else:
        findings.inform("devices.ray", f"joins the Ray that is there, which has: {has}")
