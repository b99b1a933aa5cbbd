"""A supervised run: conversations -> rows -> updates, on the same workers as reinforcement learning."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch, pack
from hybridrl.checkpoint.resume import (
    code_fingerprint,
    data_fingerprint,
    fingerprint,
    model_fingerprint,
    what_was_restored,
)
from hybridrl.checkpoint.resume.select import agree, saved_step
from hybridrl.checkpoint.saved import Saved, is_of_verl
from hybridrl.checkpoint.store import SKIPPED_UPDATES
from hybridrl.cluster import Group
from hybridrl.config import ConfigError, SFTConfig
from hybridrl.config.compose import as_dict, as_yaml
from hybridrl.config.custom_code import import_libraries
from hybridrl.data.conversations import Conversation, ConversationDataset, load_conversations
from hybridrl.data.files import row_files
from hybridrl.data.order import PromptOrder
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.runs.settings import budget
from hybridrl.runs.setup import (
    as_laid_out,
    open_run_directory,
    open_store,
    open_tracker,
    refuse_hub_model,
    refuse_unknown_tokens,
    save_times,
    start_session,
    start_train_workers,
    with_restarts,
)
from hybridrl.runtime.signals import StopRequest
from hybridrl.runtime.timer import Stopwatch
from hybridrl.saving import Save, SavePlan, Saver
from hybridrl.tracking import Resume, Tracker, draw_curves, summary
from hybridrl.tracking.log import info
from hybridrl.training.lora import check_adapter
from hybridrl.training.losses import LossConfig
from hybridrl.training.worker import LearnerConfig, TrainWorker, WorkerConfig
from hybridrl.training.worker_group import PolicyPlan, TrainWorkers, UpdatePlan


def train(config: SFTConfig) -> None:
    """Run the whole of it, and anew where a worker dies and the configuration says so."""
    with_restarts(lambda: _train(config), config.trainer)


def _train(config: SFTConfig) -> None:
    """One attempt, which leaves nothing running however it ends."""
    began = time.monotonic()
    directory = open_run_directory(config)
    import_libraries(config.model.external_lib)
    tokenizer = load_tokenizer(
        config.model.path,
        tokenizer_path=config.data.tokenizer or config.model.tokenizer_path,
        trust_remote_code=config.data.trust_remote_code or config.model.trust_remote_code,
        custom_chat_template=config.model.custom_chat_template,
        model_key="model.path",
    )
    refuse_hub_model(config.model, "model.path")
    if config.model.lora_rank:
        info(check_adapter(config.model, "model"))
    training, validation = _load(config, tokenizer)
    refuse_unknown_tokens(config.model, "model.path", training, validation)
    trainer, size = config.trainer, config.data.train_batch_size
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(config, directory)))
        files = [file for found in row_files(config.data.train_files) for file in found]
        rows = data_fingerprint(files, len(training), config.data.train_max_samples)
        identity = fingerprint(rows, config.model.path)
        saved = saved_step(trainer.resume_mode, trainer.resume_from_path, directory, identity, info)
        bases = {"model.path": model_fingerprint(config.model.path)} if config.model.lora_rank else {}
        if saved:
            refuse_verl(saved)
            agree(saved, as_dict(config), rows, trainer.resume_allow, trainer.reset_optimizer, info, bases)
        done, used = (saved.step, saved.state["prompts"]) if saved else (0, 0)
        left = trainer.total_epochs * len(training) - used
        steps = trainer.total_training_steps or done + max(left // size, 0 if saved else 1)
        info(f"{steps} steps of {size} conversations out of {len(training)}")
        if done >= steps:
            return info(f"the run is complete: {done} of {steps} steps are done ({saved.path})")
        session = start_session(trainer, config.ray_kwargs.ray_init)
        stack.callback(session.close)
        group = start_train_workers(session, directory / "logs")
        _build(config, group, directory, steps)
        plans = as_laid_out(group, _policy_plan(config), None, trainer.step_timeout)
        workers = TrainWorkers(group, *plans, config.engine.fsdp_config.dtype, trainer.step_timeout)
        resume = Resume(done, saved.state["sinks"] if saved.path.parent == directory else {}) if saved else None
        tracker = stack.enter_context(open_tracker(config, directory, steps, resume))
        if saved:
            _restore(config, saved, workers, len(training))
        else:
            tracker.log(0, {"timing_s/start_up": time.monotonic() - began})
        contents, times = {"actor": config.checkpoint.save_contents}, save_times(trainer)
        plan = SavePlan(contents, times, tokenizer.save_pretrained, as_yaml(config))
        saver = Saver(workers, store, plan)
        fixed = {"fingerprint": identity, "data": rows, "bases": bases, "code": code_fingerprint()}
        _fit(config, range(done + 1, steps + 1), used, training, validation, workers, tracker, saver, fixed)
    draw_curves(directory)
    info(summary(directory))


def refuse_verl(saved: Saved) -> None:
    if is_of_verl(saved.path):
        raise ConfigError(
            f"{saved.path} is a step of verl's, from which no supervised run goes on; one can start from its model: "
            f"trainer.resume_mode=disable model.path={saved.path}/actor"
        )


def _restore(config: SFTConfig, saved: Saved, workers: TrainWorkers, rows: int) -> None:
    reset = config.trainer.reset_optimizer or "optim.optimizer" in config.trainer.resume_allow
    kept = {"model"} if reset else {"model", "optimizer", "extra"}
    parts = [part for part in config.checkpoint.load_contents if part in kept]
    updates = workers.load(saved.path, {"actor": parts})
    told = what_was_restored(
        saved.path,
        saved.step,
        weights=["actor"],
        optimizers=["actor"] if "optimizer" in parts else [],
        updates=updates if "extra" in parts else {},
        prompts=saved.state["prompts"],
        rows=rows,
        trackers=["metrics.jsonl", *sorted(saved.state["sinks"])],
    )
    info(told)


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
    passes = budget(config.model, config.engine.fsdp_config, config.data.max_token_len_per_gpu, None, by_tokens=True)
    loss = LossConfig(
        policy_loss="likelihood",
        settings=LossSettings(),
        aggregation="token-mean",
        scale=1.0,
        temperature=1.0,
        grad_clip=config.engine.grad_clip,
    )
    updates = UpdatePlan(config.data.train_batch_size, epochs=1, shuffle=False, seed=0, budget=passes)
    return PolicyPlan(loss, updates, log_prob_budget=passes, reference_budget=passes)


def _fit(
    config: SFTConfig,
    steps: range,
    position: int,
    training: ConversationDataset,
    validation: ConversationDataset | None,
    workers: TrainWorkers,
    tracker: Tracker,
    saver: Saver,
    fixed: dict[str, Any],
) -> None:
    order = PromptOrder(len(training), config.data.seed, config.data.shuffle)
    size, trainer = config.data.train_batch_size, config.trainer
    watch = Stopwatch()
    with StopRequest(wait_for_step=saver.plan.times.ever) as stop:
        for step in steps:
            last = step == steps[-1]
            with watch("step"), watch("update_actor"):
                batch = to_batch([training[row] for row in order.rows(position, size)])
                updates, _ = workers.update(batch, [range(len(batch))], workers.policy.loss, step)
            epochs = (position / len(training), (position + size) / len(training))
            position += size
            workers.stop_if_broken(trainer.max_skipped_updates, saver.store)
            metrics = {name: value for name, value in updates.mean("train").items() if name != "train/pg_loss"}
            metrics |= watch.take() | saver.watch.take() | {"training/epoch": (position - 1) // len(training)}
            metrics["perf/total_num_tokens"] = int(batch.lengths.sum())
            if validation is not None and (last or (trainer.test_freq > 0 and step % trainer.test_freq == 0)):
                with watch("testing"):
                    metrics["val/loss"] = validation_loss(workers, validation)
            tracker.log(step, metrics | watch.take())
            saver.poll()
            save = saver.due(step, epochs, last=last) or (Save.RECOVERY if stop.reason else None)
            if save:
                broken = workers.skipped_in_a_row["actor"]
                state = fixed | {
                    "step": step,
                    "prompts": position,
                    "sinks": tracker.state(),
                    "metrics": metrics,
                    "recovery": save is Save.RECOVERY,
                    "healthy": not broken,
                    "reason": "the last update was not finite" if broken else "",
                }
                saver.start(step, state)
            if stop.reason:
                break
        saver.finish()
    if saver.failed:
        raise saver.failed
    if stop.reason:
        raise KeyboardInterrupt(stop.reason)


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
    prompt_ids, prompt_lengths = pack([item.ids[:start] for item, start in pairs], torch.int32)
    response_ids, response_lengths = pack([item.ids[start:] for item, start in pairs], torch.int32)
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
