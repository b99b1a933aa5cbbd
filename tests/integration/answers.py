"""Answers from real engines, and rows to learn from, for tests of the switch."""

from hybridrl.batch import Batch
from hybridrl.data.prompts import Prompt
from hybridrl.experience.batching import in_groups, to_batch
from hybridrl.experience.episodes import Sample
from hybridrl.hybrid_engine import HybridEngine
from hybridrl.rewards.score import Score
from hybridrl.rollout import Completion, Request, Sampling, request_seed
from hybridrl.training.worker_group import TrainWorkers

PROMPT = [1, 20, 30, 40, 50, 60, 70]
SAMPLING = Sampling(max_tokens=16, stop_ids=(2,))


def requests(prompts: int = 6, samples: int = 3) -> list[Request]:
    return [Request(p, s, [*PROMPT, 3 + p], request_seed(1, p, s)) for p in range(prompts) for s in range(samples)]


def generate(engine: HybridEngine, wanted: list[Request]) -> dict[tuple[int, int], Completion]:
    found = [completion for batch in engine.pool.generate(wanted, SAMPLING) for completion in batch]
    assert len(found) == len(wanted)
    return {(completion.prompt, completion.sample): completion for completion in found}


def rows(wanted: list[Request], answers: dict[tuple[int, int], Completion]) -> Batch:
    """Answers as a batch, with a reward that differs within a group."""
    samples = []
    for request in wanted:
        prompt = Prompt(request.prompt, request.prompt_ids, "", "", "", {})
        answer = answers[request.prompt, request.sample]
        samples.append(Sample(prompt, request.sample, answer, "", Score(float(request.sample))))
    return to_batch(in_groups(samples, range(len(samples))))


def update(workers: TrainWorkers, batch: Batch) -> None:
    batch.advantages = (batch.rewards - 1.0)[batch.response_row]
    workers.update_policy(batch, 1)


def largest_gap(workers: TrainWorkers, batch: Batch) -> float:
    scored = workers.log_probs(batch)
    return float((scored.old_log_probs - batch.rollout_log_probs).abs().max())


def tokens(answers: dict[tuple[int, int], Completion]) -> dict[tuple[int, int], list[int]]:
    return {key: answer.token_ids.tolist() for key, answer in sorted(answers.items())}
