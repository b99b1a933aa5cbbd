"""Metrics of a step's rows, under verl's names, and a check that engine and trainer compute the same log-probs of the
sampled tokens from the same weights."""

from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from hybridrl.core.batch import Batch
from hybridrl.required import required

# The largest accepted mean difference of a token's log-prob, by the coarser type of engine and trainer.
LIMITS = {"float32": 1e-2, "bfloat16": 0.2, "float16": 0.1}


def batch_metrics(batch: Batch, scored: Tensor | None = None) -> dict[str, float]:
    """Scores, rewards, advantages, values, lengths and groups of a step's episodes; metrics of empty fields are left
    out. Lengths and repetition count the tokens that the policy wrote. The entropy is over the tokens in `scored`, the
    response mask before rejections; all other metrics are over the present response mask."""
    tokens, repeated, batch = int(batch.lengths.sum()), repeated_ngrams(batch), batch.by_episode()
    trained, lengths = required(batch.response_mask), batch.sampled_lengths
    scored = trained if scored is None else scored
    metrics = (
        _spread("critic/score", required(batch.rewards))
        | _spread("critic/rewards", batch.per_row(required(batch.token_rewards)))
        | _spread("critic/advantages", required(batch.advantages)[trained])
        | _spread("critic/returns", required(batch.returns)[trained])
        | value_metrics(batch)
        | _spread("response_length", lengths)
        | _quantiles("response_length", lengths)
        | _spread("prompt_length", batch.prompt_lengths)
    )
    metrics["response_length/clip_ratio"] = _mean(required(batch.truncated))
    metrics["response/repeated_ngrams"] = repeated
    metrics |= zero_signal(batch)
    if batch.entropies is not None and scored.any():
        metrics["actor/entropy"] = _mean(batch.entropies[scored])
    metrics["perf/total_num_tokens"] = tokens
    metrics["perf/response_tokens"] = int(lengths.sum())
    return metrics


def value_metrics(batch: Batch) -> dict[str, float]:
    """The critic's values of the written tokens, and the share of the returns' variance that they explain."""
    if batch.values is None:
        return {}
    values, returns = batch.values[batch.response_mask], required(batch.returns)[batch.response_mask]
    metrics = _spread("critic/values", values)
    if len(values) > 1:
        metrics["critic/vf_explained_var"] = float(1 - (returns - values).var() / (returns.var() + 1e-5))
    return metrics


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """Difference between rollout log-probs and training log-probs of the sampled tokens, given the same weights.
    Covers the tokens in the response mask: pass the mask before rejections. Rows without such tokens are ignored, and
    so are tokens that were sampled with older weights."""
    batch = fresh_only(batch)
    if batch.old_log_probs is None or batch.rollout_log_probs is None or not required(batch.response_mask).any():
        return {}
    # In double precision: in single, k3 and chi-squared of a mean log-ratio of 1e-4 are rounding error.
    tokens = required(batch.response_mask)
    rows = batch.per_row(tokens.long()) > 0
    rollout = torch.where(tokens, batch.rollout_log_probs, 0.0).double()
    trainer = torch.where(tokens, batch.old_log_probs, 0.0).double()
    log_ratio = trainer - rollout
    probs = torch.stack([rollout[tokens].exp(), trainer[tokens].exp()])
    difference = (probs[0] - probs[1]).abs()
    varied = (probs.amax(dim=1) > probs.amin(dim=1)).all()
    rollout_log_ppl, training_log_ppl = -batch.trained_mean(rollout)[rows], -batch.trained_mean(trainer)[rows]
    gap = training_log_ppl - rollout_log_ppl
    metrics = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": difference.max(),
        "training/rollout_probs_diff_mean": difference.mean(),
        "training/rollout_probs_diff_std": difference.std(unbiased=False),
        "training/rollout_actor_probs_pearson_corr": torch.corrcoef(probs)[0, 1] if varied else 1.0,
        "training/log_probs_diff_max": log_ratio[tokens].abs().max(),
        "rollout_corr/kl": -log_ratio[tokens].mean(),  # KL(engine || trainer)
        "rollout_corr/k3_kl": (log_ratio.exp() - log_ratio - 1)[tokens].mean(),
        "rollout_corr/training_ppl": training_log_ppl.exp().mean(),
        "rollout_corr/training_log_ppl": training_log_ppl.mean(),
        "rollout_corr/rollout_ppl": rollout_log_ppl.exp().mean(),
        "rollout_corr/rollout_log_ppl": rollout_log_ppl.mean(),
        "rollout_corr/log_ppl_diff": gap.mean(),
        "rollout_corr/log_ppl_abs_diff": gap.abs().mean(),
        "rollout_corr/log_ppl_diff_max": gap.max(),
        "rollout_corr/log_ppl_diff_min": gap.min(),
        "rollout_corr/ppl_ratio": gap.exp().mean(),
        "rollout_corr/chi2_token": _mean_square_ratio(log_ratio[tokens]) - 1,  # chi-squared(trainer || engine)
        "rollout_corr/chi2_seq": _mean_square_ratio(batch.per_row(log_ratio)[rows]) - 1,
    }
    return {name: float(value) for name, value in metrics.items()}


def fresh_only(batch: Batch) -> Batch:
    """Return the rows with a response mask of only the tokens that the step's own weights have sampled."""
    if batch.staleness is None:
        return batch
    return replace(batch, response_mask=required(batch.response_mask) & (batch.staleness == 0))


def off_policy_metrics(batch: Batch) -> dict[str, float]:
    """Staleness of the episodes in steps, under verl's names: of their newest and oldest tokens, and the number of
    steps that their tokens span; also the mean over all tokens that the policy wrote. Empty if all tokens are sampled
    with the step's own weights by construction."""
    if batch.staleness is None or not required(batch.response_mask).any():
        return {}
    tokens, row = batch.staleness[batch.response_mask], batch.response_row[batch.response_mask]
    index = row if batch.episode is None else batch.episode[row]
    index = index.unique(return_inverse=True)[1]
    count = int(index.max()) + 1
    oldest = tokens.new_zeros(count).scatter_reduce(0, index, tokens, "amax", include_self=False)
    newest = tokens.new_zeros(count).scatter_reduce(0, index, tokens, "amin", include_self=False)
    return (
        _spread("training/off_policy/trajectory_staleness", newest)
        | _spread("training/off_policy/trajectory_staleness_worst", oldest)
        | _spread("training/off_policy/trajectory_spans", oldest - newest + 1)
        | {"training/off_policy/token_staleness": _mean(tokens)}
        | {"partial/continued_share": _mean(oldest > newest)}
    )


def throughput_metrics(metrics: dict[str, float], devices: int) -> dict[str, float]:
    """Tokens per second per device, and milliseconds per token of each phase, from a step's other metrics."""
    seconds, total = metrics["timing_s/step"], metrics["perf/total_num_tokens"]
    throughput = {"perf/time_per_step": seconds, "perf/throughput": total / (seconds * devices)}
    for phase in ("gen", "ref", "values", "adv", "update_critic", "update_actor"):
        tokens = "response_tokens" if phase == "gen" else "total_num_tokens"
        if f"timing_s/{phase}" in metrics:
            per_token = metrics[f"timing_s/{phase}"] / metrics[f"perf/{tokens}"]
            throughput[f"timing_per_token_ms/{phase}"] = 1000 * per_token
    return throughput


def repeated_ngrams(batch: Batch, size: int = 4, rows: int = 256) -> float:
    """Share of n-grams of `size` tokens that repeat an earlier one of the same response, over the first `rows` rows.
    Each turn counts as a response: the format of a call, which every turn repeats, does not count, nor do tokens of
    the environment."""
    lengths = batch.response_lengths[:rows]
    row, written = torch.arange(len(lengths)).repeat_interleave(lengths), batch.sampled_mask[: int(lengths.sum())]
    begins = torch.ones_like(written)  # starts of stretches that the policy wrote without a break
    begins[1:] = (row[1:] != row[:-1]) | ~written[:-1]
    turn = begins.cumsum(0)[written]
    ids = batch.response_ids[: len(row)].long()[written]
    count = max(len(turn) - size + 1, 0)
    code = turn[:count].clone()  # hash of turn and tokens; collisions in 2**64 are very unlikely
    for shift in range(size):
        code = code * 6364136223846793005 + ids[shift : shift + count] + 1
    code = code[turn[:count] == turn[size - 1 :]] if count else code
    return 1 - len(code.unique()) / len(code) if len(code) else 0.0


def zero_signal(batch: Batch) -> dict[str, float]:
    """Number and share of groups without signal: all their responses have the same score. Empty if each prompt has a
    single response, which has no others to be compared with."""
    groups, index = batch.group.unique(return_inverse=True)
    if len(groups) == len(batch):
        return {}
    largest = torch.full((len(groups),), -torch.inf).scatter_reduce(0, index, required(batch.rewards), "amax")
    smallest = torch.full((len(groups),), torch.inf).scatter_reduce(0, index, required(batch.rewards), "amin")
    count = int((largest == smallest).sum())
    return {"critic/zero_signal_groups": count, "critic/zero_signal_share": count / len(groups)}


def _mean_square_ratio(log_ratio: Tensor) -> Tensor:
    return (2 * log_ratio.clamp(-20, 20)).exp().mean()


def _mean(values: Tensor) -> float:
    return float(values.float().mean())


def _spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean, maximum and minimum; an empty dict if there are no values."""
    if not len(values):
        return {}
    values = values.float()
    return {f"{name}/{kind}": float(getattr(values, kind)()) for kind in ("mean", "max", "min")}


def _quantiles(name: str, values: Tensor) -> dict[str, float]:
    """The least values that half, 90% and 99% of them do not exceed; an empty dict if there are none."""
    ordered = values.sort().values
    return {
        f"{name}/p{share}": float(ordered[-(-share * len(ordered) // 100) - 1])
        for share in (50, 90, 99)
        if len(ordered)
    }


class Disagreement(RuntimeError):
    """The training log-probs of the sampled tokens differ from their rollout log-probs."""

    code = "disagreement"


@dataclass(frozen=True)
class Agreement:
    """At most this mean difference of a sampled token's log-prob, both computed in `dtype`."""

    limit: float
    dtype: str

    def check(self, batch: Batch) -> None:
        """Raise Disagreement if rows differ by more. Log-probs that are not finite are ignored here: updates skip
        them."""
        trainer, engine, written = batch.old_log_probs, batch.rollout_log_probs, fresh_only(batch).response_mask
        if trainer is None or engine is None or not required(written).any():
            return
        gap = float((trainer - engine)[written].double().abs().mean())
        if self.limit < gap < inf:
            raise Disagreement(
                f"the trainer's log-probs of the sampled tokens differ from the engine's by {gap:.2g} on average, with "
                f"equal weights in {self.dtype} (at most {self.limit:g}): the loss would correct for a policy that did "
                "not sample. Likely causes: dropout or another random operation in a model's own code, model code that "
                "engine and trainer read differently, a dtype of engine or trainer that the model does not support "
                "(rollout.dtype, fsdp_config.dtype), other experts of a mixture (set actor.router_replay.mode=R3), or "
                "a quantized engine or one with logits processors (rollout.engine_kwargs). Set "
                "actor_rollout_ref.rollout.max_log_prob_gap higher if the difference is "
                "intended"
            )
