"""A run as far as memory goes: its models' sizes, how each is kept, and how many tokens a pass has."""

from dataclasses import dataclass, replace
from pathlib import Path

from hybridrl.config import PPOConfig
from hybridrl.doctor import memory_formulas as formulas
from hybridrl.doctor.memory_formulas import Kept, ModelSizes
from hybridrl.runs.settings import build_algorithm, ppo_worker_config
from hybridrl.training.packing import Budget
from hybridrl.training.worker import LearnerConfig, WorkerConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Models:
    """The models of a run; `bucket` in bytes."""

    policy: ModelSizes
    bucket: int
    reference: ModelSizes | None = None
    critic: ModelSizes | None = None


@dataclass(frozen=True)
class Setup:
    """A run as far as memory goes; `gpu` is what a GPU has, 0 on CPU."""

    config: PPOConfig
    worker: WorkerConfig
    models: Models
    gpu: int

    @property
    def slots(self) -> int:
        return self.config.trainer.n_gpus_per_node or 1

    @property
    def on_cpu(self) -> bool:
        return self.config.trainer.device == "cpu"

    @property
    def longest(self) -> int:
        return self.config.actor_rollout_ref.rollout.max_model_len or 0

    def rows(self, prompts: int) -> int:
        """Of a device, of so many prompts over all of them."""
        devices = self.slots * self.config.trainer.nnodes
        return -(-prompts * self.config.actor_rollout_ref.rollout.n // devices)

    def tokens(self, budget: Budget, prompts: int) -> int:
        """Of a pass, on a device."""
        rows = self.rows(prompts) * budget.devices
        return -(-formulas.pass_tokens(budget.tokens, budget.rows, rows, self.longest) // budget.devices)

    def kept(self, learner: LearnerConfig) -> Kept:
        fsdp = learner.fsdp
        stored, computed = ITEMSIZE[fsdp.model_dtype], ITEMSIZE[fsdp.dtype or "float32"]
        return Kept(stored, computed, fsdp.fsdp_size, fsdp.reshard_after_forward)

    @property
    def reference_kept(self) -> Kept:
        policy = self.kept(self.worker.policy)
        return replace(policy, stored=policy.computed)

    def moments(self, sizes: ModelSizes, learner: LearnerConfig) -> float:
        return formulas.moments(sizes, self.kept(learner), muon=learner.optimizer.optimizer == "Muon")


def setup(config: PPOConfig, models: Models, gpu: int) -> Setup:
    return Setup(config, ppo_worker_config(config, build_algorithm(config), Path(), steps=1), models, gpu)
