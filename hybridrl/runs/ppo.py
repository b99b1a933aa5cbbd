"""A reinforcement learning run, put together: data and reward first, then devices, then steps."""

import time
from contextlib import ExitStack, closing
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridrl.algorithms import Algorithm
from hybridrl.cluster import Group, RaySession, gather
from hybridrl.config import PPOConfig
from hybridrl.config.arithmetic import batch_arithmetic
from hybridrl.config.compose import as_yaml
from hybridrl.config.schema_reward import RewardConfig
from hybridrl.data.order import Order
from hybridrl.data.prompts import PromptDataset
from hybridrl.evaluation.evaluator import Validator
from hybridrl.experience.collector import Experience
from hybridrl.experience.dynamic_sampling import GroupFilter
from hybridrl.experience.episodes import Respondent
from hybridrl.experience.sample_log import Records
from hybridrl.hybrid_engine import HybridEngine
from hybridrl.rewards.faults import FaultGuard
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.shaping import OverlongPenalty, Shaping
from hybridrl.run_state import RunState
from hybridrl.runs.prepare import prepare
from hybridrl.runs.resume import (
    chart_course,
    contents_to_save,
    restore,
)
from hybridrl.runs.settings import (
    build_agreement,
    ppo_worker_config,
    training_sampling,
    validation_sampling,
)
from hybridrl.runs.setup import (
    as_laid_out,
    end_tokens,
    open_run_directory,
    open_store,
    open_tracker,
    probe_ids,
    save_times,
    start_session,
    start_train_workers,
    with_restarts,
)
from hybridrl.saving import SavePlan, Saver
from hybridrl.tracking import Resume, Tracker, draw_curves, summary
from hybridrl.tracking.log import info
from hybridrl.trainer import Schedule, Trainer
from hybridrl.training.worker import TrainWorker, WorkerConfig
from hybridrl.training.worker_group import TrainWorkers


def train(config: PPOConfig) -> None:
    """Run the whole of it, and anew where a worker dies and the configuration says so."""
    with_restarts(lambda: _train(config), config.trainer)


def _train(config: PPOConfig) -> None:
    """One attempt, which leaves nothing running however it ends."""
    began = time.monotonic()
    directory = open_run_directory(config)
    prepared = prepare(config)
    prepared.refusals.close()
    algorithm, tokenizer, prompts, order = prepared.algorithm, prepared.tokenizer, prepared.prompts, prepared.order
    assert algorithm is not None and tokenizer is not None and prompts is not None and order is not None
    for remark in prepared.remarks:
        info(remark)
    trainer = config.trainer
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(config, directory)))
        course = chart_course(config, algorithm, len(prompts), order.size, directory)
        saved, done, steps = course.saved, course.done, course.steps
        info(f"{steps} steps: {batch_arithmetic(config)}")
        if done >= steps and not trainer.val_only:
            return info(f"the run is complete: {done} of {steps} steps are done ({saved.path})")
        log = directory / "logs" / "reward.log"
        scorers = stack.enter_context(ScorerPool(config.reward, log, prepared.data_sources))
        session = start_session(trainer, config.ray_kwargs.ray_init)
        stack.callback(session.close)
        worker = ppo_worker_config(config, algorithm, directory, steps)
        group, engine = start_devices(config, session, worker, directory / "logs", probe_ids(prompts[0].ids))
        plans = as_laid_out(group, prepared.policy, prepared.critic, trainer.step_timeout)
        workers = TrainWorkers(group, *plans, config.actor_rollout_ref.rollout.dtype, trainer.step_timeout)
        seed, shaping = config.actor_rollout_ref.rollout.seed, build_shaping(config.reward)
        respondent = Respondent(tokenizer, scorers, seed, shaping)
        stop_ids = end_tokens(config.actor_rollout_ref.model.path, tokenizer)
        experience = build_experience(config, algorithm, prompts, order, respondent, stop_ids, course.prompts_in_all)
        resume = Resume(done, saved.state["sinks"] if saved.path.parent == directory else {}) if saved else None
        records = build_records(config, stack.enter_context(open_tracker(config, directory, steps, resume)))
        identity = course.identity
        recognised = {"fingerprint": identity.run, "data": identity.data, "bases": identity.bases}
        state = RunState(algorithm, experience, workers, records, **recognised)
        start_up = {"timing_s/start_up": time.monotonic() - began}
        if saved:
            restore(config, saved, course.contents, workers, state, order.size)
        else:
            records.log(0, start_up)
        held_out = prepared.validation
        validator = build_validator(config, held_out, respondent, stop_ids) if held_out else None
        saver = Saver(workers, store, build_save_plan(config, algorithm, tokenizer))
        schedule = build_schedule(config, steps)
        hall = Trainer(algorithm, experience, engine, workers, validator, records, saver, state, schedule)
        hall.fit(done, start_up)
    draw_curves(directory)
    info(summary(directory))


def build_save_plan(config: PPOConfig, algorithm: Algorithm, tokenizer: PreTrainedTokenizerBase) -> SavePlan:
    actor, contents = config.actor_rollout_ref.actor.checkpoint, contents_to_save(config, algorithm)
    times = save_times(config.trainer)
    return SavePlan(contents, times, tokenizer.save_pretrained, as_yaml(config), asynchronous=actor.async_save)


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
    config: PPOConfig,
    algorithm: Algorithm,
    prompts: PromptDataset,
    order: Order,
    respondent: Respondent,
    stop_ids: tuple[int, ...],
    prompts_in_all: int | None,
) -> Experience:
    data, reward, rollout = config.data, config.reward, config.actor_rollout_ref.rollout
    chosen, group_filter = config.algorithm.filter_groups, None
    if chosen.enable and rollout.n > 1:
        group_filter = GroupFilter(chosen.metric or "score", chosen.max_num_gen_batches, data.gen_batch_size)
    return Experience(
        prompts,
        order,
        respondent,
        FaultGuard(reward.on_error, reward.max_fault_rate, reward.max_fault_steps),
        prompts_per_step=data.train_batch_size,
        samples_per_prompt=rollout.n,
        sampling=training_sampling(rollout, stop_ids),
        group_filter=group_filter,
        greedy_baseline=algorithm.needs == "greedy_rewards",
        reward_keys=tuple(config.algorithm.gdpo_reward_keys),
        mask_truncated=config.algorithm.mask_truncated,
        prompts_in_all=prompts_in_all,
    )


def build_shaping(reward: RewardConfig) -> Shaping:
    buffer, clip = reward.reward_kwargs.overlong_buffer_cfg, reward.clip_range
    overlong = None
    if reward.reward_manager.name == "dapo" and buffer.enable:
        overlong = OverlongPenalty(reward.reward_kwargs.max_resp_len, buffer.len, buffer.penalty_factor, buffer.log)
    return Shaping(reward.scale, (clip[0], clip[1]) if clip else None, overlong)


def build_schedule(config: PPOConfig, steps: int) -> Schedule:
    trainer = config.trainer
    return Schedule(
        steps,
        validate_every=trainer.test_freq,
        validate_first=trainer.val_before_train,
        validate_only=trainer.val_only,
        first_policy_update=trainer.critic_warmup,
        refresh_reference_every=config.actor_rollout_ref.ref.refresh_freq,
        most_skipped_updates=trainer.max_skipped_updates,
        agreement=build_agreement(config),
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
