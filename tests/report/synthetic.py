"""Directories as runs leave them, made in a moment: metrics, samples, faults, configuration, logs and a checkpoint."""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hybridrl.checkpoint.files import write_manifest

HOSTILE = (
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\"><!--",
    "control \x00\x07\x1b[31m characters",
    "a lone surrogate \ud800 and \udfff",
    "reversed \u202eabc\u202c and \u2067isolated\u2069 \u200f marks",
    "a very long line " + "x" * 60_000,
    "\u2028 line separators \u2029 and `${template}` 'quotes' \"double\" &amp;",
)
CONFIG = """\
data:
  train_files: [train.parquet]
  train_batch_size: {prompts}
  max_response_length: 64
actor_rollout_ref:
  model: {{path: model}}
  actor: {{optim: {{lr: 1.0e-05}}}}
  rollout: {{n: {n}}}
algorithm: {{adv_estimator: grpo}}
trainer:
  total_training_steps: {steps}
  resume_mode: auto
  seed: {seed}
  logger_api_key: very-secret
"""


def write_run(
    directory: Path,
    *,
    steps: int = 12,
    prompts: int = 4,
    n: int = 4,
    validate_every: int = 4,
    rollouts_every: int = 1,
    seed: int = 0,
    resumed: Sequence[int] = (),
    end: str | None = "finished",
    record: Callable[..., dict[str, Any]] | None = None,
) -> Path:
    """Write a run that learns. `resumed`: steps at which it was started again; `end`: its last code, None if it was
    killed; `record`: what makes a sample, by default one of hybridrl."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    (directory / "config.yaml").write_text(CONFIG.format(prompts=prompts, n=n, steps=steps, seed=seed))
    validations = [step for step in range(steps + 1) if validate_every and step % validate_every == 0]
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(steps + 1):
            share = 1 - math.exp(-3 * step / max(steps, 1))
            line = {"step": step} | (metrics_of(step, share, draw) if step else {"timing_s/start_up": 3.0})
            if step in resumed:
                line["timing_s/start_up"] = 2.0
            if step in validations:
                line |= {"val-core/toy/sums/acc/mean@1": round(share, 3), "timing_s/testing": 0.4}
            file.write(json.dumps(line) + "\n")
    make = record or sample
    for step in range(1, steps + 1, rollouts_every):
        share = 1 - math.exp(-3 * step / max(steps, 1))
        write_samples(directory / "rollouts" / f"{step}.jsonl", step, prompts, n, share, draw, make)
    for step in validations:
        share = 1 - math.exp(-3 * step / max(steps, 1))
        write_samples(
            directory / "samples" / f"{step}.jsonl", step, 20, 1, share, random.Random(1), make, trained=False
        )
    write_faults(directory, steps, len(resumed), end)
    write_checkpoint(directory / f"global_step_{steps}", steps)
    logs = directory / "logs"
    logs.mkdir(exist_ok=True)
    (logs / "train-0.log").write_text("training\nready\n")
    return directory


def metrics_of(step: int, share: float, draw: random.Random) -> dict[str, float]:
    noise = draw.uniform(-0.05, 0.05)
    seconds = {"gen": 1.0 + abs(noise), "reward": 0.05, "old_log_prob": 0.3, "update_actor": 0.9, "switch": 0.1}
    return {
        "critic/score/mean": share + noise,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": share + noise,
        "critic/zero_signal_share": share / 2,
        "response_length/mean": 30 + 10 * share,
        "response_length/max": 64.0,
        "response_length/clip_ratio": 0.02,
        "response/repeated_ngrams": 0.03,
        "actor/entropy": 0.5 * (1.2 - share),
        "actor/ppo_kl": 1e-4,
        "actor/grad_norm": 0.3 + noise,
        "actor/pg_clipfrac": 0.01,
        "actor/skipped_updates": 0,
        "training/rollout_probs_diff_mean": 2e-7,
        "training/log_probs_diff_max": 1e-5,
        "perf/throughput": 4000.0,
        "rollout/tail_share": 0.3,
        "reward/faults": 0,
        **{f"timing_s/{name}": value for name, value in seconds.items()},
        "timing_s/step": sum(seconds.values()) + 0.05,
        **{f"perf/other_{number}": share * number for number in range(40)},
        "training/global_step": step,
    }


def write_samples(
    path: Path,
    step: int,
    prompts: int,
    n: int,
    share: float,
    draw: random.Random,
    make: Callable[..., dict[str, Any]],
    *,
    trained: bool = True,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for prompt in range(prompts):
        scores = [float(draw.random() < share) for _ in range(n)]
        mean, deviation = fmean(scores), stdev(scores) if n > 1 else 0.0
        for number, score in enumerate(scores):
            advantage = (score - mean) / deviation if deviation else 0.0
            lines.append(json.dumps(make(step, prompt, number, score, round(advantage, 4), trained)))
    path.write_text("".join(f"{line}\n" for line in lines))


def verl_sample(step: int, prompt: int, number: int, score: float, advantage: float, trained: bool) -> dict[str, Any]:
    """A sample as verl writes it."""
    question = f"user: What is {prompt} + {step % 5}?"
    answer = str(prompt + step % 5) if score else "no idea"
    return {"input": question, "output": f"#### {answer}", "gts": answer, "score": score, "step": step, "acc": score}


def sample(step: int, prompt: int, number: int, score: float, advantage: float, trained: bool) -> dict[str, Any]:
    """A sample of hybridrl; the first of a prompt has its tokens, and the last one of the last could not be graded."""
    known = verl_sample(step, prompt, number, score, advantage, trained)
    if not trained:
        known["input"] = f"user: What is {prompt} + 1?"
    episode: dict[str, Any] = {"data_source": "toy/sums", "row": 10 * step + prompt if trained else prompt}
    episode |= {"position": 100 * step + prompt if trained else prompt, "sample": number, "stop": "completed"}
    episode |= {"prompt_tokens": 9, "sampled_tokens": 20 + 3 * number, "observed_tokens": 0}
    if trained:
        episode |= {"trained": True, "advantage": advantage}
        if number == 0:
            episode["tokens"] = tokens(advantage)
        if prompt == 3 and number == 3:
            known["score"] = None
            episode |= {"fault": "timeout", "detail": "no score within 10 s", "trained": False}
            del episode["advantage"]
    return known | {"episode": episode}


def tokens(advantage: float) -> dict[str, list[Any]]:
    texts = ["####", " ", "7", "\n", "<|im_end|>", "tool text"]
    return {
        "ids": [10, 11, 12, 13, 2, 30],
        "texts": texts,
        "sampled": [1, 1, 1, 1, 1, 0],
        "log_probs": [-0.01, -0.5, -2.3, -0.1, -0.001, 0.0],
        "train_log_probs": [-0.0101, -0.5, -2.29, -0.1, -0.001, 0.0],
        "entropies": [0.02, 0.6, 1.9, 0.2, 0.01, 0.0],
        "advantages": [advantage] * 5 + [0.0],
    }


def conversation(step: int, prompt: int, number: int, score: float, advantage: float, trained: bool) -> dict[str, Any]:
    """A sample of several turns with a tool."""
    known = sample(step, prompt, number, score, advantage, trained)
    call = {"function": {"name": "calculator", "arguments": {"text": "1 + 2"}}}
    known["output"] = "<think>I add.</think>The sum is 3."
    known["episode"]["messages"] = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "<think>A tool helps.</think>", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "The sum is 3.", "reasoning_content": "I read the result."},
    ]
    record = {"name": "calculator", "arguments": {"text": "1 + 2"}, "result": "3", "outcome": "ok"}
    turn = {"observed_tokens": 9, "sampled_tokens": 12, "reward": None, "stop": "completed", "seconds": [0.2, 0.1]}
    known["episode"]["turns"] = [turn | {"calls": [record | {"seconds": 0.1, "reward": None}]}, turn | {"calls": []}]
    return known


def hostile(step: int, prompt: int, number: int, score: float, advantage: float, trained: bool) -> dict[str, Any]:
    """A sample whose texts would break a page that did not escape them."""
    known, text = sample(step, prompt, number, score, advantage, trained), HOSTILE[(prompt + number) % len(HOSTILE)]
    known |= {"input": f"user: {text}", "output": text, "gts": text, text[:20]: text[:200]}
    known["episode"] |= {"data_source": text[:40], "stop": text[:40]}
    return known


def write_metrics(directory: Path, steps: list[dict]) -> None:
    lines = [json.dumps({"step": step, **metrics}) for step, metrics in enumerate(steps, start=1)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def write_faults(directory: Path, step: int, restarts: int, end: str | None) -> None:
    def fault(code: str, step: int, text: str = "", end: bool = False) -> str:
        time = "2024-11-24T10:00:00.000+00:00"
        return json.dumps(
            {"time": time, "step": step, "code": code, "text": text, "tail": [], "memory": {}, "end": end}
        )

    lines = [fault("begun", 0) for _ in range(1 + restarts)]
    lines += [fault("warning", min(step, 2), "the reward is slow")]
    if end is not None:
        lines.append(fault(end, step, "" if end == "finished" else "train-0 died: RuntimeError: no luck", end=True))
    (directory / "faults.jsonl").write_text("".join(f"{line}\n" for line in lines))


def write_checkpoint(path: Path, step: int) -> None:
    (path / "actor").mkdir(parents=True)
    (path / "actor" / "weights").write_bytes(b"x" * 1000)
    (path / "actor" / ".metadata").write_bytes(b"model.head optimizer.state.head.step")
    state = {
        "step": step,
        "healthy": True,
        "recovery": False,
        "metrics": {},
        "published": 1,
        "code": {"torch": "2.13.0"},
    }
    (path / "state.json").write_text(json.dumps(state))
    write_manifest(path)
