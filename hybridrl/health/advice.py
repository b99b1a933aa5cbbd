"""Advice at the end of a run: on its time, with settings to try, and on whether it ended too early.

Pure functions of the metrics. They return None unless a proposal is worth trying.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

from hybridrl.tracking.sink import PHASES, STEP_SECONDS, line_seconds, phase_seconds

Metrics = Mapping[str, float]

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
SCORE_RANGE = "critic/score"
SCORE = f"{SCORE_RANGE}/mean"
LEAST_STEPS, LEAST_QUARTER = 5, 10  # least steps for advice about time, and in the last quarter of the score's curve


@dataclass(frozen=True)
class RunHistory:
    """The steps of a run without the first (a warm-up), with its configuration (PPOConfig or SFTConfig)."""

    steps: list[Metrics]
    config: Any

    def mean(self, name: str) -> float:
        """Return a metric's mean over the steps that have it; 0 if none has."""
        values = [value for step in self.steps if math.isfinite(value := step.get(name, math.nan))]
        return fmean(values) if values else 0.0

    def largest(self, name: str) -> float:
        return max((step.get(name, 0.0) for step in self.steps), default=0.0)


def advise(steps: Mapping[int, Metrics], config: Any) -> list[str]:
    """Return advice on the run's reward, time, memory and length, at most one sentence each."""
    done = [metrics for step, metrics in sorted(steps.items()) if step > 0 and STEP_SECONDS in metrics]
    run = RunHistory(done[1:], config)
    parts = _about_reward(done), _about_time(run), _about_memory(run), _about_length(run)
    return [sentence for sentence in parts if sentence]


def _about_reward(steps: Sequence[Metrics]) -> str | None:
    """Report that nothing could be learned, if all responses of all steps, including the first, had the same score."""
    ends = {step.get(name, math.nan) for step in steps for name in (f"{SCORE_RANGE}/min", f"{SCORE_RANGE}/max")}
    if len(steps) < 2 or len(ends) != 1 or not math.isfinite(score := ends.pop()):
        return None
    return (
        f"the score was {score:g} for every response of all {len(steps)} steps, so nothing could be learned; "
        "see what the reward gives to right and wrong responses: hybridrl rescore RUN"
    )


def _about_time(run: RunHistory) -> str | None:
    """Return the proposal for the longest phase that has a proposal."""
    total = sum(map(line_seconds, run.steps))
    if len(run.steps) < LEAST_STEPS or not total:
        return None
    shares = dict.fromkeys(PHASES, 0.0)
    for metrics in run.steps:
        for phase, seconds in phase_seconds(metrics).items():
            shares[phase] += seconds / total
    for phase, share in sorted(shares.items(), key=lambda item: -item[1]):
        least, proposals = PROPOSALS.get(phase, (1.0, ()))
        for propose in proposals if share >= least else ():
            if proposal := propose(run):
                return f"{phase} took {share:.0%} of the time: {proposal}"
    return None


def _preemptions(run: RunHistory) -> str | None:
    """The cache is too small for the started requests: a part of them is computed twice."""
    count, running = run.mean("rollout/preemptions"), run.mean("rollout/running_requests/mean")
    if count < max(1.0, 0.05 * running):
        return None
    cause = f"engines preempted {count:.0f} requests per step for lack of cache and computed them again"
    return f"{cause}; {_more_cache(run) or f'set {ROLLOUT}.max_num_seqs={max(int(running), 1)}'}"


def _queue(run: RunHistory) -> str | None:
    """Requests wait: for a slot if the cache has space, for the cache if it is full."""
    rollout = run.config.actor_rollout_ref.rollout
    waiting, cache = run.mean("rollout/waiting_requests/max"), run.largest("rollout/kv_cache_usage/max")
    running = run.mean("rollout/running_requests/max")
    if waiting < 0.5 * running or not running:
        return None
    if cache < 0.5 and running > 0.9 * rollout.max_num_seqs:
        requests = int(min(2.0, 0.9 / max(cache, 0.01)) * rollout.max_num_seqs)
        cause = f"up to {waiting:.0f} requests waited while at most {cache:.0%} of the cache was in use"
        return f"{cause}; set {ROLLOUT}.max_num_seqs={requests}"
    if cache > 0.9 and running < 0.9 * rollout.max_num_seqs:
        cause = f"up to {waiting:.0f} requests waited for a full cache, which holds {running:.0f} at a time"
        wider = f"set {ROLLOUT}.tensor_model_parallel_size={2 * rollout.tensor_model_parallel_size}"
        return f"{cause}; {_more_cache(run) or wider}"
    return None


def _more_cache(run: RunHistory) -> str | None:
    share = run.config.actor_rollout_ref.rollout.gpu_memory_utilization
    return f"set {ROLLOUT}.gpu_memory_utilization={share + 0.1:.2g}" if share <= 0.75 else None


def _wide_engines(run: RunHistory) -> str | None:
    """Devices that share an engine exchange data for every token; more engines do not."""
    size, cache = (
        run.config.actor_rollout_ref.rollout.tensor_model_parallel_size,
        run.largest("rollout/kv_cache_usage/max"),
    )
    if size < 2 or not 0 < cache < 0.25:
        return None
    cause = f"engines of {size} devices used at most {cache:.0%} of their cache, so more and smaller ones are faster"
    return f"{cause}; set {ROLLOUT}.tensor_model_parallel_size={size // 2}"


def _tail(run: RunHistory) -> str | None:
    """A few long responses occupy the devices while all others are done."""
    tail, almost_all = run.mean("rollout/tail_share"), run.mean("response_length/p99")
    limit = run.config.data.max_response_length
    if run.mean("episode/observed_tokens/mean"):  # the limit includes these
        return None
    if tail < 0.4 or not 0 < almost_all < 0.8 * limit or run.mean("response_length/max") < 0.9 * limit:
        return None
    return (
        f"in {tail:.0%} of it fewer than half of the requests still ran, for responses of up to {limit} tokens "
        f"while 99% have at most {almost_all:.0f}; set data.max_response_length={round(1.1 * almost_all)}"
    )


def _weight_sync(run: RunHistory) -> str | None:
    seconds, step = run.mean("timing_s/update_weights"), run.mean(STEP_SECONDS)
    if seconds < 10 and (seconds < 1 or seconds < 0.1 * step):
        return None
    size, model = run.mean("perf/weights_gb"), run.config.actor_rollout_ref.model
    cause = f"a weight sync takes {seconds:.1f} s for {size:.2f} GB ({run.mean('perf/weights_gb_per_s'):.2g} GB/s)"
    buckets = run.config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
    if size * 1000 > 32 * buckets:
        return f"{cause}; set {ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes={4 * buckets}"
    if not model.lora_rank:
        return f"{cause}; an adapter alone is sent much faster: set {MODEL}.lora_rank=32"
    return f"{cause}; set {MODEL}.lora.merge=false, which sends the adapter alone" if model.lora.merge else None


def _saving(run: RunHistory) -> str | None:
    every = run.config.trainer.save_freq
    seconds = run.mean("timing_s/save_checkpoint")
    return f"a save stops training for {seconds:.1f} s; set trainer.save_freq={2 * every}" if every > 0 else None


def _validation(run: RunHistory) -> str | None:
    every = run.config.trainer.test_freq
    seconds = run.mean("timing_s/testing")
    return f"a validation takes {seconds:.1f} s; set trainer.test_freq={2 * every}" if every > 0 else None


def _reward(run: RunHistory) -> str | None:
    seconds, workers = run.mean("timing_s/reward"), run.config.reward.num_workers
    return f"each step waits {seconds:.1f} s for scores; set reward.num_workers={2 * workers}" if seconds >= 1 else None


# Phase -> its least share of the time for a proposal, and its proposals, the best one first.
PROPOSALS: dict[str, tuple[float, tuple[Callable[[RunHistory], str | None], ...]]] = {
    "rollout": (0.3, (_preemptions, _queue, _wide_engines, _tail)),
    "switch": (0.0, (_weight_sync,)),
    "reward": (0.2, (_reward,)),
    "validation": (0.3, (_validation,)),
    "saving": (0.1, (_saving,)),
}


def _about_memory(run: RunHistory) -> str | None:
    """Return a fix if a trainer's allocator reserved much more GPU memory than its tensors ever needed."""
    reserved, used = run.largest("perf/max_memory_reserved_gb"), run.largest("perf/max_memory_allocated_gb")
    total = max(
        (step.get("perf/device_used_gb", 0.0) + step.get("perf/device_free_gb", 0.0) for step in run.steps), default=0.0
    )
    if reserved - used <= 0.15 * total:
        return None
    return (
        f"torch held up to {reserved:.1f} GiB of a GPU for tensors of at most {used:.1f} GiB: its memory may be "
        "fragmented; try PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:256 in the environment"
    )


def _about_length(run: RunHistory) -> str | None:
    """Return a fix if the score was still rising in the last quarter of the run."""
    scores = [step[SCORE] for step in run.steps if math.isfinite(step.get(SCORE, math.nan))]
    count = len(scores) // 4
    if count < LEAST_QUARTER:
        return None
    before, last = scores[-2 * count : -count], scores[-count:]
    rise, error = fmean(last) - fmean(before), math.sqrt((variance(before) + variance(last)) / count)
    if rise < 3 * error or rise < 0.05 * (max(scores) - min(scores)):
        return None
    trainer, epochs = run.config.trainer, int(run.steps[-1].get("training/epoch", 0)) + 1
    key = "total_training_steps" if trainer.total_training_steps else "total_epochs"
    return (
        f"the score was still rising when the run ended, from {fmean(before):.3g} to {fmean(last):.3g} over its last "
        f"{2 * count} steps, in epoch {epochs}; to go further, set trainer.{key}={2 * getattr(trainer, key)}"
    )
