"""`hybridrl doctor replay RUN [--step N]`: computes a step again from the checkpoint before it, and names the
rows that moved the gradient.

A run keeps the batch of a step with which a diagnosis begins, in DIR/replay. The run must have ended, as its devices
are used again. Weights are those before the step if the checkpoint of the step before it was retained.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hybridrl.checkpoint.files import faults
from hybridrl.checkpoint.store import Checkpoint, list_checkpoints
from hybridrl.config import ConfigError
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.batch import Batch, spans
from hybridrl.core.training.planning import MiniBatch
from hybridrl.core.training.worker import TrainWorker
from hybridrl.core.training.worker_group import TrainWorkers
from hybridrl.doctor import Result, config_of_run
from hybridrl.runs.prepare import decoder_elsewhere
from hybridrl.runs.ranks import training_ranks
from hybridrl.runs.sample_log import read_batch, replays
from hybridrl.tracking.console import info
from hybridrl.tracking.report import read_metrics

SHOWN_CHARACTERS = 160
NOISY = 4.0  # times more responses needed than an update has


def run(options: argparse.Namespace) -> Result:
    rows = replay(options.directory, options.step)
    return Result(rows, [line for row in rows[: options.rows] for line in lines(row)])


def replay(directory: Path, step: int | None) -> list[dict[str, object]]:
    """Return each row of the step with its share of the gradient, the largest first. Raises ConfigError."""
    paths = {int(path.stem): path for path in replays(directory / "replay")}
    if not paths or (step is not None and step not in paths):
        asked = "no step" if step is None else f"step {step} is not among those"
        raise ConfigError(f"{directory}: {asked} of which the batch was kept ({', '.join(map(str, paths)) or 'none'})")
    step = max(paths) if step is None else step
    saved = weights_before(directory, step)
    config = config_of_run(directory)
    batch, pictures = read_batch(paths[step])
    logs = directory / "replay" / "logs"
    logs.mkdir(exist_ok=True)
    with training_ranks(config, directory, logs, pictures) as workers:
        if saved is not None:
            workers.load(saved.path, {"actor": ["model"]})
        weights = f"the weights after step {saved.step}" if saved else "the weights before the first step"
        inexact = f" (it had those after step {step - 1})" if saved and saved.step < step - 1 else ""
        info(f"step {step} again, {len(batch)} rows, with {weights}{inexact}")
        again = workers.forward_log_probs(batch)
        norms, updates = response_norms(workers, again, step)
    logged = read_metrics(directory).get(step, {}).get("actor/grad_norm")
    if logged is not None:
        info(f"actor/grad_norm of the step was {logged:.4g}")
    info(noise(norms, updates, config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size))
    return described(again.by_episode(), norms, decoder_elsewhere(config.data, config.actor_rollout_ref.model))


def response_norms(workers: TrainWorkers, batch: Batch, step: int) -> tuple[list[float], list[tuple[list[int], float]]]:
    """Return the norm of each response's share of the policy's gradient, in the mini-batch that has it in the first
    epoch; and the responses of each of these mini-batches with the norm of its gradient. An episode is one response,
    whatever the number of its rows (`Batch.by_episode`)."""
    episode = torch.arange(len(batch)) if batch.episode is None else batch.episode
    response = episode.unique_consecutive(return_inverse=True)[1]
    group, plan = workers.group, workers.policy
    masks, devices = plan.loss.masks, plan.updates.budget.devices
    shared = group.share(batch.with_episode_tokens(masks).only(*plan.loss.reads, *workers.models["actor"].reads))
    mini_batches = plan.updates.mini_batches(batch.group, step)
    norms, whole = [0.0] * (int(response.max()) + 1), []
    for rows in map(list, mini_batches[: len(mini_batches) // plan.updates.epochs]):
        totals, of_response = Divisors.of(batch.select(rows), masks), dict[int, list[int]]()
        for row, number in zip(rows, response[rows].tolist(), strict=True):
            of_response.setdefault(number, []).append(row)
        numbers, parts = [*of_response], [*of_response.values(), rows]
        # One row at a time: the ranks of the first sequence-parallel group have it, all others nothing.
        alone = [MiniBatch([[row] for row in part], totals) for part in parts]
        nothing = [MiniBatch([[] for _ in part], totals) for part in parts]
        calls = [(shared, alone if rank < devices else nothing, plan.loss) for rank in range(len(group))]
        *of_parts, total = group.scatter(TrainWorker.gradient_norms, calls, timeout=workers.timeout)[0]
        for number, norm in zip(numbers, of_parts, strict=True):
            norms[number] = norm
        whole.append((numbers, total))
    return norms, whole


def noise(norms: list[float], updates: Sequence[tuple[list[int], float]], prompts: int, of_update: int) -> str:
    """Describe the number of responses at which noise and signal of an update's gradient are equal (the simple noise
    scale of McCandlish et al. 2018), the present number, and the key to set if it is too low. A step has `prompts`.

    A response's share of the gradient of N responses is (G + e) / N, with e of variance S: the squared norms of the
    shares add up to (|G|^2 + S) / N, and that of the gradient is |G|^2 + S / N. The noise scale is S / |G|^2.
    """
    size = sum(len(responses) for responses, _ in updates) / len(updates)
    alone = sum(norms[number] ** 2 for responses, _ in updates for number in responses) / len(updates)
    together = sum(total**2 for _, total in updates) / len(updates)
    if size < 2 or not alone:
        return "the noise of the gradient cannot be estimated from this step"
    variance = (alone * size - together) / (1 - 1 / size)
    signal = together - variance / size
    change = "actor_rollout_ref.rollout.n or data.train_batch_size higher"
    if of_update < prompts:
        change = f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}"
    if signal <= 0:
        return f"the gradient of an update, of {size:.0f} responses, is nothing but noise; set {change}"
    needed = max(variance / signal, 0.0)
    text = f"signal and noise are equal in a gradient of {needed:.0f} responses, and an update has {size:.0f}"
    return text if needed <= NOISY * size else f"{text}: most of it is noise; set {change}"


def weights_before(directory: Path, step: int) -> Checkpoint | None:
    """Return the last intact checkpoint before a step, healthy or not; None before the first. Raises ConfigError."""
    before = {item.step: item for item in list_checkpoints(directory) if item.step < step and not faults(item.path)}
    if not before and step > 1:
        raise ConfigError(f"{directory} has no intact checkpoint of a step before {step}")
    return before[max(before)] if before else None


def described(batch: Batch, norms: list[float], decode: Callable[[list[int]], str]) -> list[dict[str, object]]:
    """Return a description of every response, that with the largest gradient first."""
    gaps, total = (batch.old_log_probs - batch.rollout_log_probs).abs(), sum(norm**2 for norm in norms) or 1.0
    rows = []
    for row in sorted(range(len(batch)), key=lambda row: -norms[row]):
        part = batch.select([row])
        places = spans(batch.response_lengths, batch.position.new_tensor([row]))
        places = places[batch.sampled_mask[places]]  # what the policy read has no log-prob of the engine
        rows.append(
            {
                "position": int(batch.position[row]),
                "sample": int(batch.sample[row]),
                "gradient": norms[row],
                "share": norms[row] ** 2 / total,
                "score": float(batch.rewards[row]),
                "advantage": float(part.trained_mean(part.advantages)[0]),
                "tokens": len(places),
                "least_log_prob": float(batch.old_log_probs[places].min()),
                "largest_gap": float(gaps[places].max()),
                "prompt": decode(part.prompt_ids.tolist()),
                "response": decode(part.response_ids.tolist()),
            }
        )
    return rows


def lines(row: dict[str, object]) -> list[str]:
    """Return a row for people."""
    measured = ("score", "advantage", "tokens", "least_log_prob", "largest_gap")
    numbers = [f"{name.replace('_', ' ')} {row[name]:.3g}" for name in measured]
    text = " ".join(f"{row['prompt']} -> {row['response']}".split())
    return [
        f"gradient {row['gradient']:.3g} ({row['share']:.0%}), position {row['position']}, sample {row['sample']}",
        f"    {', '.join(numbers)}",
        f"    {text[:SHOWN_CHARACTERS]}",
    ]
