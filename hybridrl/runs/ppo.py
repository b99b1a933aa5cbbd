"""A reinforcement learning run, put together: data and reward first, then devices, then the task."""

import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybridrl.checkpoint.saver import Stateful
from hybridrl.config import PPOConfig
from hybridrl.config.checks.engine import continues_rollouts, most_in_flight
from hybridrl.config.load import batch_arithmetic, samplings
from hybridrl.core.carried import Encoded
from hybridrl.core.cluster import Group, RaySession, gather
from hybridrl.core.cluster.group import START_LIMIT, control_limit
from hybridrl.core.experience.asynchronous import AsynchronousExperience
from hybridrl.core.experience.batching import GroupFilter
from hybridrl.core.experience.collector import Experience, SamplingPlan, SynchronousExperience
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.evaluator import Evaluator
from hybridrl.core.experience.responses import ResponseStore
from hybridrl.core.experience.trajectory import Sampler
from hybridrl.core.hybrid_engine import HybridEngine, SeparateEngine
from hybridrl.core.pictures import PictureStore, digest_of, placeholder_ids
from hybridrl.core.rollout import Sampling
from hybridrl.core.rollout.fleet import RolloutFleet
from hybridrl.core.trainer import RLTask, Schedule, Task
from hybridrl.core.training.building import WorkerConfig
from hybridrl.core.training.loading import load_settings
from hybridrl.core.training.vision import with_pictures
from hybridrl.core.training.worker import TrainWorker
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.core.weights.sync import BroadcastSync, ColocatedSync
from hybridrl.data.tokenizer import end_tokens
from hybridrl.plugins import load as plugin
from hybridrl.required import required
from hybridrl.rewards.actors import open_scorer_pool
from hybridrl.rewards.load import uses_built_in
from hybridrl.rewards.score import FaultGuard, Shaping
from hybridrl.runs.contexts import Contexts
from hybridrl.runs.models import picture_settings, vision_of
from hybridrl.runs.prepare import decoder_elsewhere, prepare, tokenizer_elsewhere
from hybridrl.runs.ranks import fitting_plan, start_train_workers
from hybridrl.runs.resume import ResumePlan, plan_resume
from hybridrl.runs.reward_model import RewardModel, has_functions, position_limit
from hybridrl.runs.reward_trial import reject_failing_reward
from hybridrl.runs.sample_log import SampleLog
from hybridrl.runs.settings import (
    REWARD_MODEL,
    contents_to_save,
    engine_fingerprint,
    ppo_worker_config,
    score_fingerprint,
)
from hybridrl.runs.teachers import TaughtSource
from hybridrl.runs.trials import Subject
from hybridrl.tracking import Tracker
from hybridrl.tracking.console import info, stage
from hybridrl.tracking.sink import Activity

PROBE_LENGTH = 24


class PPOJob:
    """The parts of a reinforcement learning run (see `Job`). `wrap_client` returns the sampler of all episodes."""

    def __init__(self, config: PPOConfig, wrap_client: Callable[[Sampler], Sampler] = lambda client: client) -> None:
        with stage("reading data and models"):
            inputs = prepare(config)
            inputs.rejections.close()
        for message in inputs.messages:
            info(message)
        algorithm, prompts, order, tokenizer = inputs.algorithm, inputs.prompts, inputs.order, inputs.tokenizer
        assert algorithm is not None and prompts is not None and order is not None and tokenizer is not None
        self.config, self.inputs, self.user_keys, self.wrap_client = config, inputs, config.own, wrap_client
        self.engine_pool = config.rollout_pool if config.separate else None
        self.kl_in_reward, self.runs_episodes = config.algorithm.use_kl_in_reward, inputs.runs_episodes
        self.algorithm, self.prompts, self.order, self.tokenizer = algorithm, prompts, order, tokenizer
        self.rows, self.model_path = order.size, config.actor_rollout_ref.model.path
        self.description = f"{batch_arithmetic(config)}\n{samplings(config.actor_rollout_ref.rollout)}"
        self.contents = contents_to_save(config.actor_rollout_ref, config.critic, algorithm)
        self.asynchronous_saves = config.actor_rollout_ref.actor.checkpoint.async_save

    def plan(self, directory: Path) -> ResumePlan:
        rows, epoch = len(self.prompts), self.order.size
        pictures = picture_settings(self.config.actor_rollout_ref.rollout, self.prompts)
        self.resume = plan_resume(self.config, self.algorithm, rows, epoch, directory, info, *pictures)
        # At this point Ray has not started yet, and the directory, to which the reward logs, is locked for this run.
        if scored := self.inputs.scored:
            with stage("trying the reward on a few rows"):
                subject = Subject(self.config, self.tokenizer, scored)
                reject_failing_reward(subject, directory / "logs" / "reward.log")
        return self.resume

    def start(self, session: RaySession, stack: ExitStack, plan: ResumePlan, directory: Path) -> TrainWorkers:
        config, inputs, logs, self.stack = self.config, self.inputs, directory / "logs", stack
        section, trainer = config.actor_rollout_ref, config.trainer
        load, decoder = (partial(call, config.data, section.model) for call in (tokenizer_elsewhere, decoder_elsewhere))
        self.scorers = stack.enter_context(open_scorer_pool(session, config.reward, logs, inputs.data_sources, decoder))
        vision = vision_of(section, list(inputs.datasets.values()))
        self.pictures = store = PictureStore(Group.share)
        for data in inputs.datasets.values():
            if data.reader is not None:
                data.reader.store = store
        worker = ppo_worker_config(config, self.algorithm, directory, plan.steps, vision)
        saved = plan.checkpoint.state if plan.checkpoint else {}
        self.episodes = None
        if inputs.runs_episodes:
            ends = end_tokens(section.model.path, self.tokenizer)
            self.episodes = stack.enter_context(plugin("episodes").start_episodes(config, session, load, ends, logs))
        never = placeholder_ids(load_settings(section.model))
        text = [token for token in self.prompts.ids[0] if token not in never]
        probe = probe_ids(text, required(section.rollout.max_model_len))
        group, self.engine = start_devices(config, session, worker, logs, probe, saved)
        self.engine.client.handles = store.handles
        self.engine.check_memory = plugin("room")(config, logs).check
        self.scorers.wait_until_loaded()
        if self.episodes is not None:
            self.episodes.wait_until_ready(trainer.startup_timeout)
        # With full determinism a response depends on all responses sampled with it, even interrupted ones.
        whole, carries = section.rollout.full_determinism, continues_rollouts(trainer.v1, section.rollout)
        spool: tuple = ()
        if trainer.spool_samples and not (whole and carries):
            taught = [asdict(config.distillation)] if config.distillation.endpoints else []
            engine = engine_fingerprint(section.model, section.rollout, *taught)
            spool = (directory / "spool", engine, score_fingerprint(config.reward, plan.identity.data))
        self.store = stack.enter_context(ResponseStore(*spool, whole_steps=whole, carries=carries))
        rank_plan = RankPlan(worker.models, required(inputs.policy), inputs.critic)
        rank_plan = fitting_plan(group, rank_plan, trainer.step_timeout)
        return TrainWorkers(group, rank_plan, section.rollout.dtype, trainer.step_timeout, store.handles)

    def build(self, workers: TrainWorkers, tracker: Tracker) -> tuple[Task, dict[str, Stateful]]:
        config, rollout, trainer = self.config, self.config.actor_rollout_ref.rollout, self.config.trainer
        stop_ids = end_tokens(config.actor_rollout_ref.model.path, self.tokenizer)
        client = self.wrap_client(self.engine.client)
        contexts = self._contexts(stop_ids) if config.distillation.reads_contexts else None
        parts = self.episodes, client, rollout.seed, self.pictures
        conversations = self.episodes and plugin("episodes").Conversations(*parts)
        rate, scorer = None, self.inputs.scorer_tokenizer
        if scorer is not None:
            rate = RewardModel(workers, scorer, config.reward, position_limit(workers.models[REWARD_MODEL].model))
        runner = EpisodeRunner(
            client,
            self.scorers,
            rollout.seed,
            Shaping() if rate else Shaping.of(config.reward),
            conversations,
            function_scores=has_functions(config.reward) and not uses_built_in(config.reward),
            add_environment_reward=config.reward.add_environment_reward,
            taught=partial(TaughtSource, config.distillation, contexts=contexts)
            if config.distillation.endpoints
            else None,
        )
        reward, evaluator = config.reward, None
        guard = FaultGuard(reward.on_error, reward.max_fault_rate, reward.max_fault_steps)
        experience = self._experience(runner, stop_ids, guard, contexts)
        experience.rate, experience.read_ahead = rate, self.prompts.reader and self.prompts.read_ahead
        if self.inputs.validation:
            sampling = Sampling.of_validation(rollout, stop_ids)
            parts = self.engine, self.inputs.validation, runner, sampling, rollout.val_kwargs.n, guard
            evaluator = Evaluator(*parts, rate)
        sample_log = SampleLog(
            tracker,
            training_dir=trainer.rollout_data_dir,
            validation_dir=trainer.validation_data_dir,
            replay_dir=Path(trainer.default_local_dir).expanduser() / "replay",
            shown=trainer.log_val_generations,
            with_tokens=trainer.rollout_tokens,
            most=trainer.max_rollout_data_gb and trainer.max_rollout_data_gb * 1e9,
            decode=lambda ids: self.tokenizer.batch_decode([[token] for token in ids]),
            fetch=Group.fetch,
            **({"transcript": conversations.transcript} if conversations else {}),
        )
        self.stack.callback(sample_log.flush)
        if self.resume.checkpoint:
            sample_log.delete_after(self.resume.done)
        task = RLTask(
            self.algorithm,
            experience,
            self.engine,
            workers,
            evaluator,
            sample_log,
        )
        parts = {
            "experience": experience,
            "algorithm": self.algorithm,
            "workers": workers,
            "engines": self.engine.fleet,
        }
        return task, parts

    def _experience(
        self, runner: EpisodeRunner, stop_ids: tuple[int, ...], guard: FaultGuard, contexts: Contexts | None
    ) -> Experience:
        config, data = self.config, self.config.data
        rollout, filter_groups, group_filter = config.actor_rollout_ref.rollout, config.algorithm.filter_groups, None
        if filter_groups.enable and rollout.n > 1:
            metric = filter_groups.metric or "score"
            limit, least = filter_groups.max_num_gen_batches, config.actor_rollout_ref.actor.ppo_mini_batch_size
            group_filter = GroupFilter(metric, limit, data.gen_batch_size, least)
        total = self.resume.total_prompts
        plan = SamplingPlan(
            prompts_per_step=data.train_batch_size,
            samples_per_prompt=rollout.n,
            sampling=Sampling.of(rollout, stop_ids),
            group_filter=group_filter,
            reward_keys=tuple(config.algorithm.gdpo_reward_keys),
            mask_truncated=config.algorithm.mask_truncated,
            greedy_baseline="greedy_rewards" in self.algorithm.entry.reads,
            vocabulary=len(self.tokenizer),
            prompts_in_all=sys.maxsize if total is None else total,
        )
        parts = self.engine, self.prompts, self.order, runner, guard, plan, self.store
        if not continues_rollouts(config.trainer.v1, rollout):
            return SynchronousExperience(*parts, contexts=contexts)
        engines = len(self.engine.fleet)
        experience = AsynchronousExperience(
            *parts,
            contexts=contexts,
            bound=config.trainer.v1.sampler.max_off_policy_threshold,
            most=most_in_flight(config.trainer.v1, rollout, data.train_batch_size),
            slots=engines * rollout.max_num_seqs,
            fixed=engines if rollout.full_determinism else 0,
            overlaps=config.separate and not rollout.full_determinism,
        )
        if isinstance(self.engine, SeparateEngine):
            self.engine.pause = experience.pause
        self.stack.callback(experience.close)
        return experience

    def _contexts(self, stop_ids: tuple[int, ...]) -> Contexts:
        config, policy, tokenizer = self.config, self.config.actor_rollout_ref.model, self.tokenizer
        drops = bool(tokenizer.chat_template) and plugin("dialogue")(tokenizer, stop_ids).strips_reasoning
        budget = required(self.inputs.policy).updates.budget
        limits = {"drops_reasoning": drops, "most": budget.tokens if budget.rows is None else sys.maxsize}
        return Contexts.of(config.distillation, policy, config.data, tokenizer, **limits)

    def schedule(self, steps: int) -> Schedule:
        trainer = self.config.trainer
        validates = self.inputs.validation is not None
        return Schedule(
            steps,
            validate_every=trainer.test_freq,
            validate_first=validates and (trainer.val_before_train or trainer.val_only),
            validate_only=trainer.val_only,
            max_skipped_updates=trainer.max_skipped_updates,
        )


def start_devices(
    config: PPOConfig,
    session: RaySession,
    worker: WorkerConfig,
    logs: Path,
    probe: list[int],
    saved: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Group, HybridEngine]:
    """Start training ranks and rollout servers at the same time; returns when both are ready for the first sync.
    `saved` is the state of the checkpoint to resume from."""
    section, limit = config.actor_rollout_ref, config.trainer.startup_timeout
    timeout = control_limit(config.trainer.step_timeout)
    workers = start_train_workers(session, logs)
    engine, limits = plugin(f"engine.{section.rollout.name}"), {"startup_timeout": limit, "timeout": timeout}
    fleet = RolloutFleet(session, engine, section.model, section.rollout, logs=logs, **limits)
    info(f"logs of all processes: {logs}")
    ranks, servers = len(workers), len(fleet.servers)
    parts = f"{ranks} training rank{'s' * (ranks > 1)} and {servers} rollout server{'s' * (servers > 1)}"
    with stage(f"starting {parts}"):
        Activity.is_now("processes")
        located = workers.start(TrainWorker.location)
        places = gather(located, "train worker.location", limit, workers.logs, key=START_LIMIT)
        fleet.load_state_dict(saved)
        Activity.is_now("engines")
        starting = fleet.start(None if config.separate else [place["gpus"] for place in places])
        # An engine measures the free memory as it starts: nothing else may use the device at the same time.
        first = session.device == "cuda" and not config.separate
        if first:
            fleet.finish_start(starting)
            starting = []
            fleet.sleep()
        Activity.is_now("weights of the trainers" if first else "engines and weights of the trainers")
        building = workers.start(TrainWorker.build, worker, f"{places[0]['address']}:{places[0]['port']}")
        gc.collect()  # while they work
        fleet.finish_start(starting, building, workers.logs)
        if session.device == "cpu" and not config.separate:
            fleet.sleep()
    encoded, pixels = Encoded(probe), {}
    if vision := worker.models["actor"].vision:
        sample, half = vision.sample[:1], len(probe) // 2
        encoded = with_pictures(load_settings(section.model), sample, probe[:half], probe[half:])
        pixels = {digest_of(picture): picture for picture in sample}
    kind, engine_kind = (BroadcastSync, SeparateEngine) if config.separate else (ColocatedSync, HybridEngine)
    dtype = section.actor.fsdp_config.dtype or "float32"
    options = {"probe": encoded, "pixels": pixels, "train_dtype": dtype, "timeout": timeout}
    sync = kind(workers, fleet.servers, section.rollout, **options)
    engine = engine_kind(workers, fleet, sync, timeout=timeout)
    return engine.trainers, engine


def probe_ids(prompt_ids: list[int], context: int = PROBE_LENGTH + 1) -> list[int]:
    """The fixed sequence that verifies a weight sync: the end of the first prompt, repeated if it is short. It leaves
    room in the `context` for the one token that the engine samples."""
    length = min(PROBE_LENGTH, context - 1)
    repeated = prompt_ids * (length // len(prompt_ids) + 1)
    return repeated[-length:]
