"""Supervised fine-tuning: conversations -> rows -> updates, on the same workers and loop as reinforcement learning."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.resume import data_fingerprint, fingerprint, model_fingerprint
from hybridrl.checkpoint.saver import Stateful
from hybridrl.config import SFTConfig
from hybridrl.core.batch import Batch
from hybridrl.core.cluster import RaySession
from hybridrl.core.trainer import Schedule, Task
from hybridrl.core.training.learner import Head
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.data.conversations import conversation_batch
from hybridrl.data.order import PromptOrder
from hybridrl.data.row_files import row_files
from hybridrl.runs.prepare import load_sft_inputs
from hybridrl.runs.ranks import build_models, fitting_plan, start_train_workers
from hybridrl.runs.resume import Identity, ResumePlan, contents_to_load, find_checkpoint
from hybridrl.runs.settings import sft_policy_plan, sft_worker_config
from hybridrl.tracking import Stopwatch, Tracker
from hybridrl.tracking.console import stage


class SFTJob:
    """The parts of a supervised run (see `Job`)."""

    asynchronous_saves = True
    user_keys: dict[str, Any] = {}  # noqa: RUF012  # none
    engine_pool = None
    kl_in_reward = runs_episodes = False
    unit = "conversations"
    head: Head = "language"

    def __init__(self, config: SFTConfig) -> None:
        self.config, self.model_path = config, config.model.path
        self.tokenizer, self.training, self.validation = self.read(config)
        self.rows = len(self.training)
        self.description = f"{config.data.train_batch_size} {self.unit} each, out of {self.rows}"
        self.contents = {"actor": config.checkpoint.save_contents}

    def read(self, config: SFTConfig) -> tuple[Any, Any, Any]:
        """Return tokenizer, training and validation data. Raises ConfigError."""
        return load_sft_inputs(config)

    def task(self, *arguments: Any) -> "SFTTask":
        """Return the task, given the arguments of SFTTask."""
        return SFTTask(*arguments)

    def plan(self, directory: Path) -> ResumePlan:
        config, trainer, path = self.config, self.config.trainer, self.config.model.path
        files = [file for files in row_files(config.data.train_files) for file in files]
        data = data_fingerprint(files, self.rows, config.data.train_max_samples)
        bases = {"model.path": model_fingerprint(path)} if config.model.lora_rank else {}
        identity = Identity(data, fingerprint(data, path), bases)
        saved = find_checkpoint(trainer, asdict(config), directory, identity)
        contents = contents_to_load(trainer, {"actor": config.checkpoint.load_contents}, saved.path) if saved else {}
        plan = ResumePlan(identity, saved, contents, trainer.total_training_steps or 0)
        left = (trainer.total_epochs * self.rows - plan.prompts_used) // config.data.train_batch_size
        return plan if plan.steps else replace(plan, steps=plan.done + max(left, 0 if saved else 1))

    def start(self, session: RaySession, stack: ExitStack, plan: ResumePlan, directory: Path) -> TrainWorkers:
        config = self.config
        group = start_train_workers(session, directory / "logs")
        worker, timeout = sft_worker_config(config, directory, plan.steps, self.head), config.trainer.step_timeout
        with stage(f"starting {len(group)} training rank{'s' * (len(group) > 1)}"):
            build_models(group, worker, config.trainer.startup_timeout)
        rank_plan = fitting_plan(group, RankPlan(worker.models, sft_policy_plan(config)), timeout)
        return TrainWorkers(group, rank_plan, config.engine.fsdp_config.dtype, timeout)

    def build(self, workers: TrainWorkers, tracker: Tracker) -> tuple[Task, dict[str, Stateful]]:
        data = self.config.data
        order = PromptOrder(self.rows, data.seed, data.shuffle)
        task = self.task(workers, self.training, self.validation, order, data.train_batch_size)
        return task, {"task": task, "workers": workers}

    def schedule(self, steps: int) -> Schedule:
        trainer = self.config.trainer
        return Schedule(steps, trainer.test_freq, max_skipped_updates=trainer.max_skipped_updates)


class SFTTask(Task):
    """One update per step on the next conversations of the seeded order, with the negative log-likelihood as loss."""

    def __init__(
        self,
        workers: TrainWorkers,
        training: Sequence[Any],
        validation: Sequence[Any] | None,
        order: PromptOrder,
        size: int,
    ) -> None:
        self.workers, self.training, self.validation = workers, training, validation
        self.order, self.size = order, size
        self.position = 0  # conversations used since the run began
        self.watch = Stopwatch()

    @property
    def epochs(self) -> float:
        return self.position / len(self.training)

    def train_step(self, step: int) -> dict[str, float]:
        with self.watch("update_actor"):
            batch, updates = self.update(
                [self.training[row] for row in self.order.rows(self.position, self.size)], step
            )
        self.position += self.size
        metrics = {name.replace("actor/", "train/"): mean for name, mean in updates.items() if name != "actor/pg_loss"}
        metrics["training/epoch"] = (self.position - 1) // len(self.training)
        metrics["perf/total_num_tokens"] = int(batch.lengths.sum())
        return metrics | self.watch.take()

    def update(self, rows: Sequence[Any], step: int) -> tuple[Batch, dict[str, float]]:
        """Run one update on these rows of the training data; returns them as a batch, and the update's metrics."""
        batch = conversation_batch(rows)
        updates, _ = self.workers.update_mini_batches(batch, [range(len(batch))], self.workers.policy.loss, step)
        return batch, updates

    def validate(self, step: int) -> dict[str, float]:
        """The mean negative log-likelihood of the assistants' tokens."""
        if self.validation is None:
            return {}
        with self.watch("testing"):
            batch = conversation_batch(list(self.validation))
            scored = self.workers.forward_log_probs(batch)
        self.workers.watch.take()
        return {"val/loss": -float(scored.old_log_probs[batch.response_mask].mean())} | self.watch.take()

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["prompts"]
