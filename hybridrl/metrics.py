"""What a step's rows say about it, under verl's names."""

import torch
from torch import Tensor

from hybridrl.batch import Batch


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Scores, rewards, advantages, lengths and groups of a step, and how engine and trainer agree."""
    written = batch.response_mask
    metrics = (
        _spread("critic/score", batch.rewards)
        | _spread("critic/rewards", batch.per_row(batch.token_rewards))
        | _spread("critic/advantages", batch.advantages[written])
        | _spread("critic/returns", batch.returns[written])
        | _spread("response_length", batch.response_lengths)
        | _spread("prompt_length", batch.prompt_lengths)
    )
    metrics["response_length/clip_ratio"] = _mean(batch.truncated)
    metrics["critic/zero_signal_groups"] = zero_signal_share(batch)
    if batch.entropies is not None:
        metrics["actor/entropy"] = _mean(batch.entropies[written])
    metrics["perf/total_num_tokens"] = int(batch.lengths.sum())
    metrics["perf/response_tokens"] = int(batch.response_lengths.sum())
    return metrics | mismatch_metrics(batch)


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """How the engine's log-probs of the sampled tokens differ from the trainer's, given the same weights."""
    if batch.old_log_probs is None or batch.rollout_log_probs is None:
        return {}
    rollout, trainer = batch.rollout_log_probs[batch.response_mask], batch.old_log_probs[batch.response_mask]
    log_ratio = trainer - rollout
    probs = torch.stack([rollout.exp(), trainer.exp()])
    difference = (probs[0] - probs[1]).abs()
    spread = probs.std(dim=1).min() > 0
    mean_rollout, mean_trainer = batch.written_mean(batch.rollout_log_probs), batch.written_mean(batch.old_log_probs)
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_std": float(difference.std(unbiased=False)),
        "training/rollout_actor_probs_pearson_corr": float(torch.corrcoef(probs)[0, 1]) if spread else 1.0,
        "training/log_probs_diff_max": float(log_ratio.abs().max()),
        "rollout_corr/kl": float(-log_ratio.mean()),
        "rollout_corr/k3_kl": float((log_ratio.exp() - log_ratio - 1).mean()),
        "rollout_corr/rollout_ppl": float((-mean_rollout).exp().mean()),
        "rollout_corr/training_ppl": float((-mean_trainer).exp().mean()),
        "rollout_corr/log_ppl_diff": float((mean_rollout - mean_trainer).mean()),
    }


def throughput_metrics(metrics: dict[str, float], devices: int) -> dict[str, float]:
    """Tokens a second a device, and milliseconds a token of each phase, from a step's other metrics."""
    seconds, total = metrics["timing_s/step"], metrics["perf/total_num_tokens"]
    found = {"perf/time_per_step": seconds, "perf/throughput": total / (seconds * devices)}
    for phase, tokens in (
        ("gen", "response_tokens"),
        ("ref", "total_num_tokens"),
        ("update_actor", "total_num_tokens"),
    ):
        if f"timing_s/{phase}" in metrics:
            per_token = metrics[f"timing_s/{phase}"] / metrics[f"perf/{tokens}"]
            found[f"timing_per_token_ms/{phase}"] = 1000 * per_token
    return found


def zero_signal_share(batch: Batch) -> float:
    """The share of groups in which all answers scored the same, so that nothing can be told from them."""
    groups, index = batch.group.unique(return_inverse=True)
    largest = torch.full((len(groups),), -torch.inf).scatter_reduce(0, index, batch.rewards, "amax")
    smallest = torch.full((len(groups),), torch.inf).scatter_reduce(0, index, batch.rewards, "amin")
    return _mean(largest == smallest)


def _mean(values: Tensor) -> float:
    return float(values.float().mean())


def _spread(name: str, values: Tensor) -> dict[str, float]:
    values = values.float()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
