"""A reinforcement learning run, put together: data and reward first, then devices, then steps."""

import time
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridrl import device as devices
from hybridrl.assembly import (
    build_algorithm,
    build_update_plan,
    end_tokens,
    open_run_directory,
    ppo_worker_config,
    probe_ids,
    say_batch_arithmetic,
    start_session,
    start_train_workers,
    training_sampling,
    validation_sampling,
)
from hybridrl.checkpoint.store import Store
from hybridrl.cluster import RaySession, gather
from hybridrl.config import PPOConfig
from hybridrl.config.compose import as_dict
from hybridrl.data.order import PromptOrder
from hybridrl.data.prompts import PromptDataset, load_prompts
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.experience import Experience, Respondent
from hybridrl.hybrid_engine import HybridEngine
from hybridrl.records import Records
from hybridrl.rewards.built_in import check_data_sources
from hybridrl.rewards.faults import FaultGuard
from hybridrl.rewards.pool import ScorerPool
from hybridrl.tracking import Tracker, draw_curves, summary
from hybridrl.tracking.log import info
from hybridrl.trainer import Schedule, Trainer
from hybridrl.training.trainers import Trainers
from hybridrl.training.worker import TrainWorker
from hybridrl.validation import Validator


def train(config: PPOConfig) -> None:
    """Run the whole of it, and leave nothing running however it ends."""
    began = time.monotonic()
    directory = open_run_directory(config)
    tokenizer = _tokenizer(config)
    prompts, validation = load_data(config, tokenizer)
    steps = config.trainer.total_training_steps or max(
        config.trainer.total_epochs * len(prompts) // config.data.train_batch_size, 1
    )
    info(say_batch_arithmetic(config, steps))
    with ExitStack() as stack:
        scorers = stack.enter_context(ScorerPool(config.reward, directory / "logs" / "reward.log"))
        session = start_session(config.trainer, config.ray_kwargs.ray_init)
        stack.callback(session.close)
        trainer = assemble(config, directory, session, tokenizer, prompts, validation, scorers, steps, stack)
        trainer.records.log(0, {"timing_s/start_up": time.monotonic() - began})
        trainer.fit()
    draw_curves(directory)
    info(summary(directory))


def _tokenizer(config: PPOConfig) -> PreTrainedTokenizerBase:
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        model.path,
        tokenizer_path=config.data.tokenizer or model.tokenizer_path,
        trust_remote_code=config.data.trust_remote_code or model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )


def load_data(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptDataset, PromptDataset | None]:
    """Training and validation prompts; refuses rows that no scorer can judge."""
    data = config.data
    prompts = load_prompts(
        data.train_files,
        data,
        tokenizer,
        max_samples=data.train_max_samples,
        shuffle=data.shuffle,
        key="data.train_files",
    )
    validation = None
    if data.val_files:
        validation = load_prompts(
            data.val_files,
            data,
            tokenizer,
            max_samples=data.val_max_samples,
            shuffle=data.validation_shuffle,
            key="data.val_files",
        )
    if config.reward.custom_reward_function.path is None:
        check_data_sources(prompts.data_sources | (validation.data_sources if validation else set()))
    return prompts, validation


def assemble(
    config: PPOConfig,
    directory: Path,
    session: RaySession,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset,
    validation: PromptDataset | None,
    scorers: ScorerPool,
    steps: int,
    stack: ExitStack,
) -> Trainer:
    """All collaborators of a run; what needs to be closed goes on the stack."""
    section, trainer, rollout = config.actor_rollout_ref, config.trainer, config.actor_rollout_ref.rollout
    algorithm = build_algorithm(config.algorithm, kl_in_loss=section.actor.use_kl_loss)
    plan = build_update_plan(section, config.data.train_batch_size)
    updates = -(-plan.prompts_per_step // plan.prompts_per_update) * plan.epochs
    workers = start_train_workers(session, directory / "logs")
    threads = devices.threads_per_slot(session.device, session.per_machine)
    engine = HybridEngine(
        session,
        workers,
        section.model,
        rollout,
        logs=directory / "logs",
        threads=threads,
        timeout=trainer.startup_timeout,
    )
    places = workers.broadcast(TrainWorker.place, timeout=trainer.startup_timeout)
    address = f"{places[0]['address']}:{places[0]['port']}"
    worker_config = ppo_worker_config(config, uses_reference=algorithm.uses_reference, total_updates=steps * updates)
    building = workers.start(TrainWorker.build, worker_config, address)
    starting = engine.start([place["gpus"] for place in places])
    gather([*building, *starting], "start-up", trainer.startup_timeout)
    engine.ready(probe_ids(prompts[0].ids))
    stop_ids = end_tokens(section.model.path, tokenizer)
    respondent = Respondent(tokenizer, scorers, rollout.seed)
    experience = Experience(
        prompts,
        PromptOrder(len(prompts), config.data.seed, config.data.shuffle),
        respondent,
        FaultGuard(config.reward.on_error, config.reward.max_fault_rate, config.reward.max_fault_steps),
        prompts_per_step=config.data.train_batch_size,
        samples_per_prompt=rollout.n,
        sampling=training_sampling(rollout, stop_ids),
    )
    validator = None
    if validation is not None:
        count = rollout.val_kwargs.n
        validator = Validator(validation, respondent, validation_sampling(rollout, stop_ids), count)
    tracker = stack.enter_context(
        Tracker(trainer.logger, directory, trainer.project_name, trainer.experiment_name, as_dict(config), steps)
    )
    records = Records(
        tracker,
        training_dir=trainer.rollout_data_dir,
        validation_dir=trainer.validation_data_dir,
        shown=trainer.log_val_generations,
    )
    return Trainer(
        algorithm,
        experience,
        engine,
        Trainers(workers, plan, export_dtype=rollout.dtype or "float32", timeout=trainer.step_timeout),
        validator,
        records,
        Store(directory, tokenizer.save_pretrained),
        Schedule(steps, trainer.test_freq, trainer.save_freq, trainer.val_before_train, trainer.val_only),
    )
