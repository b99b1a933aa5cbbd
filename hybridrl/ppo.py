"""A reinforcement learning run, put together: data and reward first, then devices, then steps."""

import time
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridrl.assembly import (
    build_algorithm,
    build_update_plan,
    end_tokens,
    open_run_directory,
    open_tracker,
    ppo_worker_config,
    probe_ids,
    refuse_hub_model,
    say_batch_arithmetic,
    start_session,
    start_train_workers,
    training_sampling,
    validation_sampling,
)
from hybridrl.checkpoint.store import Store
from hybridrl.cluster import Group, RaySession, gather
from hybridrl.config import PPOConfig
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
from hybridrl.training.worker import TrainWorker, WorkerConfig
from hybridrl.training.workers import TrainWorkers
from hybridrl.validation import Validator


def train(config: PPOConfig) -> None:
    """Run the whole of it, and leave nothing running however it ends."""
    began = time.monotonic()
    directory = open_run_directory(config)
    refuse_hub_model(config.actor_rollout_ref.model, "actor_rollout_ref.model.path")
    tokenizer = _tokenizer(config)
    prompts, validation = load_data(config, tokenizer)
    steps = config.trainer.total_training_steps or max(
        config.trainer.total_epochs * len(prompts) // config.data.train_batch_size, 1
    )
    algorithm = build_algorithm(config.algorithm, kl_in_loss=config.actor_rollout_ref.actor.use_kl_loss)
    plan = build_update_plan(config.actor_rollout_ref, config.data.train_batch_size)
    info(say_batch_arithmetic(config, steps))
    with ExitStack() as stack:
        scorers = stack.enter_context(ScorerPool(config.reward, directory / "logs" / "reward.log"))
        session = start_session(config.trainer, config.ray_kwargs.ray_init)
        stack.callback(session.close)
        worker = ppo_worker_config(config, algorithm.uses_reference, total_updates=steps * plan.updates_per_step)
        workers, engine = start_devices(config, session, worker, directory / "logs", probe_ids(prompts[0].ids))
        respondent = Respondent(tokenizer, scorers, config.actor_rollout_ref.rollout.seed)
        stop_ids = end_tokens(config.actor_rollout_ref.model.path, tokenizer)
        tracker = stack.enter_context(open_tracker(config, directory, steps))
        tracker.log(0, {"timing_s/start_up": time.monotonic() - began})
        trainer = Trainer(
            algorithm,
            build_experience(config, prompts, respondent, stop_ids),
            engine,
            TrainWorkers(workers, plan, config.actor_rollout_ref.rollout.dtype, config.trainer.step_timeout),
            build_validator(config, validation, respondent, stop_ids) if validation else None,
            build_records(config, tracker),
            Store(directory, tokenizer.save_pretrained),
            Schedule(
                steps,
                config.trainer.test_freq,
                config.trainer.save_freq,
                config.trainer.val_before_train,
                config.trainer.val_only,
            ),
        )
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


def start_devices(
    config: PPOConfig, session: RaySession, worker: WorkerConfig, logs: Path, probe: list[int]
) -> tuple[Group, HybridEngine]:
    """Training ranks and rollout servers, built side by side and ready for the first hand-over."""
    section, limit = config.actor_rollout_ref, config.trainer.startup_timeout
    workers = start_train_workers(session, logs)
    engine = HybridEngine(
        session,
        workers,
        section.model,
        section.rollout,
        train_dtype=section.actor.fsdp_config.dtype or "float32",
        logs=logs,
        startup_timeout=limit,
        timeout=config.trainer.step_timeout,
    )
    info(f"starting {len(workers)} training ranks and {len(engine.servers)} rollout servers; their logs: {logs}")
    places = workers.broadcast(TrainWorker.place, timeout=limit)
    starting = engine.start([place["gpus"] for place in places])
    if session.device == "cuda":  # an engine measures what memory it may take, and nobody else may move meanwhile
        gather(starting, "rollout server.start", limit, engine.servers.logs)
        engine.sleep()
    building = workers.start(TrainWorker.build, worker, f"{places[0]['address']}:{places[0]['port']}")
    gather([*building, *starting], "start-up", limit, [*workers.logs, *engine.servers.logs])
    if session.device == "cpu":
        engine.sleep()
    engine.ready(probe)
    return workers, engine


def build_experience(
    config: PPOConfig, prompts: PromptDataset, respondent: Respondent, stop_ids: tuple[int, ...]
) -> Experience:
    data, reward, rollout = config.data, config.reward, config.actor_rollout_ref.rollout
    return Experience(
        prompts,
        PromptOrder(len(prompts), data.seed, data.shuffle),
        respondent,
        FaultGuard(reward.on_error, reward.max_fault_rate, reward.max_fault_steps),
        prompts_per_step=data.train_batch_size,
        samples_per_prompt=rollout.n,
        sampling=training_sampling(rollout, stop_ids),
    )


def build_validator(
    config: PPOConfig, prompts: PromptDataset, respondent: Respondent, stop_ids: tuple[int, ...]
) -> Validator:
    rollout = config.actor_rollout_ref.rollout
    return Validator(prompts, respondent, validation_sampling(rollout, stop_ids), rollout.val_kwargs.n)


def build_records(config: PPOConfig, tracker: Tracker) -> Records:
    trainer = config.trainer
    return Records(
        tracker,
        training_dir=trainer.rollout_data_dir,
        validation_dir=trainer.validation_data_dir,
        shown=trainer.log_val_generations,
    )
