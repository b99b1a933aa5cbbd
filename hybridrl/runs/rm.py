"""Training of a reward model on pairs of conversations: supervised training with another loss."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hybridrl.config import ConfigError, SFTConfig
from hybridrl.config.custom_code import import_libraries
from hybridrl.core.algorithms.algorithm import Signal
from hybridrl.core.batch import Batch
from hybridrl.core.training.learner import Head
from hybridrl.core.training.model import blank_score_model
from hybridrl.data.pairs import load_pairs, pair_batch
from hybridrl.required import required
from hybridrl.runs.prepare import model_tokenizer, reject_hub_model, reject_unknown_tokens
from hybridrl.runs.sft import SFTJob, SFTTask


class RewardModelTask(SFTTask):
    """One update per step on the next pairs of the seeded order."""

    def __init__(self, center: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.center = center

    def update(self, rows: Sequence[Any], step: int) -> tuple[Batch, dict[str, float]]:
        batch = pair_batch(rows)
        return batch, self.workers.update_pairs(batch, self.center, step)

    def validate(self, step: int) -> dict[str, float]:
        """The mean loss, and the share of pairs whose better conversation has the higher score."""
        if self.validation is None:
            return {}
        with self.watch("testing"):
            batch = pair_batch(list(self.validation))
            scores = required(self.workers.fill(batch, Signal(("values",), "actor")).values).view(-1, 2)
        self.workers.watch.take()
        gaps = scores[:, 0] - scores[:, 1]
        losses = F.softplus(required(batch.rewards)[::2] - gaps) + self.center * scores.sum(1).square()
        metrics = {"loss": losses, "accuracy": (gaps > 0).float(), "margin": gaps}
        return {f"val/{name}": float(value.mean()) for name, value in metrics.items()} | self.watch.take()


class RewardModelJob(SFTJob):
    """The parts of a run that trains a reward model (see `Job`)."""

    unit = "pairs"
    head: Head = "trained score"

    def read(self, config: SFTConfig) -> tuple[Any, Any, Any]:
        """Return tokenizer, training and validation pairs. Raises ConfigError."""
        data, model = config.data, config.model
        import_libraries(model.external_lib)
        tokenizer = model_tokenizer(data, model, "model.path")
        reject_hub_model(model, "model.path")
        blank_score_model(model, torch.float32, trained=True)
        if not tokenizer.chat_template:
            cause = f"model.path={model.path}: its tokenizer has no chat template to render conversations with"
            raise ConfigError(cause, fix="set model.custom_chat_template")
        read, validation = partial(load_pairs, config=data, tokenizer=tokenizer), None
        limit, shuffle = data.train_max_samples, data.shuffle
        training = read(data.train_files, max_samples=limit, shuffle=shuffle, key="data.train_files")
        if data.val_files:
            validation = read(data.val_files, max_samples=data.val_max_samples, shuffle=False, key="data.val_files")
        reject_unknown_tokens(model, "model.path", training, validation)
        return tokenizer, training, validation

    def task(self, *arguments: Any) -> SFTTask:
        return RewardModelTask(required(self.config.pairs.center), *arguments)
