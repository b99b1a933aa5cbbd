"""A supervised run: conversations -> rows -> updates, on the same workers as reinforcement learning."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from hybridrl.algorithms.settings import LossSettings
from hybridrl.assembly import (
    open_run_directory,
    open_tracker,
    refuse_hub_model,
    start_session,
    start_train_workers,
)
from hybridrl.batch import Batch, pack
from hybridrl.checkpoint.store import SKIPPED_UPDATES, Store
from hybridrl.cluster import Group
from hybridrl.config import SFTConfig
from hybridrl.data.conversations import Conversation, ConversationDataset, load_conversations
from hybridrl.data.order import PromptOrder
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.stopwatch import Stopwatch
from hybridrl.tracking import Tracker, draw_curves, summary
from hybridrl.tracking.log import info
from hybridrl.training.losses import LossConfig
from hybridrl.training.packing import Budget
from hybridrl.training.worker import LearnerConfig, TrainWorker, WorkerConfig
from hybridrl.training.workers import PolicyPlan, TrainWorkers, UpdatePlan


def train(config: SFTConfig) -> None:
    """Run the whole of it, and leave nothing running however it ends."""
    began = time.monotonic()
    directory = open_run_directory(config)
    tokenizer = load_tokenizer(
        config.model.path,
        tokenizer_path=config.data.tokenizer or config.model.tokenizer_path,
        trust_remote_code=config.data.trust_remote_code or config.model.trust_remote_code,
        custom_chat_template=config.model.custom_chat_template,
        model_key="model.path",
    )
    refuse_hub_model(config.model, "model.path")
    training, validation = _load(config, tokenizer)
    size = config.data.train_batch_size
    steps = config.trainer.total_training_steps or max(config.trainer.total_epochs * len(training) // size, 1)
    info(f"{steps} steps of {size} conversations out of {len(training)}")
    with ExitStack() as stack:
        session = start_session(config.trainer, config.ray_kwargs.ray_init)
        stack.callback(session.close)
        group = start_train_workers(session, directory / "logs")
        _build(config, group, directory, steps)
        dtype, timeout = config.engine.fsdp_config.dtype, config.trainer.step_timeout
        workers = TrainWorkers(group, _policy_plan(config), None, dtype, timeout)
        tracker = stack.enter_context(open_tracker(config, directory, steps))
        tracker.log(0, {"timing_s/start_up": time.monotonic() - began})
        store = Store(directory, tokenizer.save_pretrained)
        _fit(config, steps, training, validation, workers, tracker, store)
    draw_curves(directory)
    info(summary(directory))


def _load(config: SFTConfig, tokenizer) -> tuple[ConversationDataset, ConversationDataset | None]:
    data = config.data
    training = load_conversations(
        data.train_files,
        data,
        tokenizer,
        max_samples=data.train_max_samples,
        shuffle=data.shuffle,
        key="data.train_files",
    )
    if not data.val_files:
        return training, None
    return training, load_conversations(
        data.val_files, data, tokenizer, max_samples=data.val_max_samples, shuffle=False, key="data.val_files"
    )


def _build(config: SFTConfig, group: Group, directory: Path, steps: int) -> None:
    limit = config.trainer.startup_timeout
    places = group.broadcast(TrainWorker.place, timeout=limit)
    worker = WorkerConfig(
        device=config.trainer.device,
        policy=LearnerConfig(config.model, config.engine.fsdp_config, config.optim, steps),
        collective_timeout=config.engine.nccl_timeout,
        seed=config.trainer.seed,
        skipped_updates=str(directory / SKIPPED_UPDATES),
    )
    group.broadcast(TrainWorker.build, worker, f"{places[0]['address']}:{places[0]['port']}", timeout=limit)


def _policy_plan(config: SFTConfig) -> PolicyPlan:
    """One update a step with the likelihood as its loss."""
    budget = Budget(config.data.max_token_len_per_gpu, padded=not config.model.use_remove_padding)
    loss = LossConfig(
        policy_loss="likelihood",
        settings=LossSettings(),
        aggregation="token-mean",
        scale=1.0,
        temperature=1.0,
        grad_clip=config.engine.grad_clip,
    )
    updates = UpdatePlan(config.data.train_batch_size, epochs=1, shuffle=False, seed=0, budget=budget)
    return PolicyPlan(loss, updates, log_prob_budget=budget, reference_budget=budget)


def _fit(
    config: SFTConfig,
    steps: int,
    training: ConversationDataset,
    validation: ConversationDataset | None,
    workers: TrainWorkers,
    tracker: Tracker,
    store: Store,
) -> None:
    order = PromptOrder(len(training), config.data.seed, config.data.shuffle)
    size, test_freq, save_freq = (
        config.data.train_batch_size,
        config.trainer.test_freq,
        config.trainer.save_freq,
    )
    watch = Stopwatch()
    for step in range(1, steps + 1):
        last = step == steps
        with watch("step"), watch("update_actor"):
            batch = to_batch([training[row] for row in order.rows((step - 1) * size, size)])
            updates, _ = workers.update(batch, [range(len(batch))], workers.policy.loss, step)
        workers.stop_if_broken(config.trainer.max_skipped_updates, store)
        metrics = {name: value for name, value in updates.mean("train").items() if name != "train/pg_loss"}
        metrics |= watch.take() | {"training/epoch": (step * size - 1) // len(training)}
        metrics["perf/total_num_tokens"] = int(batch.lengths.sum())
        if validation is not None and (last or (test_freq > 0 and step % test_freq == 0)):
            with watch("testing"):
                metrics["val/loss"] = validation_loss(workers, validation)
        if save_freq >= 0 and (last or (save_freq > 0 and step % save_freq == 0)):
            with watch("save_checkpoint"):
                store.save(step, actor=workers.export)
        tracker.log(step, metrics | watch.take())


def validation_loss(workers: TrainWorkers, conversations: ConversationDataset) -> float:
    """Mean negative log-likelihood of the assistants' tokens."""
    batch = to_batch(list(conversations))
    scored = workers.log_probs(batch)
    workers.watch.take()
    return -float(scored.old_log_probs[batch.response_mask].mean())


def to_batch(conversations: Sequence[Conversation]) -> Batch:
    """Conversations as rows: what stands before the first token with loss is the prompt."""
    starts = [max(conversation.loss_mask.index(1), 1) for conversation in conversations]
    pairs = list(zip(conversations, starts, strict=True))
    prompt_ids, prompt_lengths = pack([item.ids[:start] for item, start in pairs], torch.int64)
    response_ids, response_lengths = pack([item.ids[start:] for item, start in pairs], torch.int64)
    mask, _ = pack([item.loss_mask[start:] for item, start in pairs], torch.bool)
    numbers = torch.arange(len(conversations))
    return Batch(
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        group=numbers,
        position=numbers,
        sample=torch.zeros_like(numbers),
        response_mask=mask,
    )
