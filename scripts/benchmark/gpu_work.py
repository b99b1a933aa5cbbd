"""The work of the GPU benchmark: the rows of an update, the requests of a rollout, and their cost."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hybridrl.core.batch import Batch, pack
from hybridrl.core.rollout import Completion, Request, Sampling, request_seed
from hybridrl.core.training.planning import Pieces, plan
from hybridrl.core.training.worker_group import TrainWorkers

PROMPT = 64
GROUP = 4  # rows of an update with one advantage's baseline, or more if more begin alike
# Operations per second in bfloat16 without sparsity, by a part of the GPU's name; the first match counts.
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}


@dataclass(frozen=True)
class Load:
    """The work of one GPU: `rows` of `width` tokens in an update, of which `prompt` are the prompt, equal in `alike`
    neighbouring rows; `responses` of `tokens` tokens in a rollout."""

    rows: int
    width: int
    responses: int
    tokens: int
    prompt: int = 1
    alike: int = 1

    def batch(self, gpus: int) -> Batch:
        """Return the rows of an update, with rewards."""
        count = self.rows * gpus
        lengths, numbers = torch.full((count,), self.width - self.prompt), torch.arange(count)
        prompts, size = torch.full((count, self.prompt), 4), max(GROUP, self.alike)
        prompts[:, 0] = 5 + numbers // self.alike % 240  # others begin with another token
        ids = torch.randint(5, 250, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0))
        return Batch(
            prompt_lengths=torch.full((count,), self.prompt),
            response_lengths=lengths,
            prompt_ids=prompts.flatten().int(),
            response_ids=ids.int(),
            group=numbers // size,
            position=numbers // size,
            sample=numbers % size,
            rewards=(numbers % 3).float(),
            truncated=torch.zeros(count, dtype=torch.bool),
            response_mask=torch.ones(len(ids), dtype=torch.bool),
        )

    def requests(self, gpus: int) -> list[Request]:
        """Return the requests of a rollout, eight per prompt."""
        prompts = [[5 + (7 * number + place) % 240 for place in range(PROMPT)] for number in range(240)]
        sampling = Sampling(self.tokens, (), ignore_eos=True)
        return [
            Request(n // 8, n % 8, prompts[n // 8 % 240], request_seed(0, n), sampling)
            for n in range(self.responses * gpus)
        ]


LOADS = {"cuda": Load(32, 512, 256, 256), "cpu": Load(8, 64, 16, 16)}


def sampled(responses: list[Completion], requests: list[Request]) -> Batch:
    """Return responses as rows with the engine's log-probs."""
    prompt_ids, prompt_lengths = pack([request.prompt_ids for request in requests], torch.int32)
    response_ids, response_lengths = pack([response.token_ids for response in responses], torch.int32)
    numbers = torch.arange(len(responses))
    return Batch(
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        group=numbers,
        position=numbers,
        sample=numbers,
        rollout_log_probs=pack([response.log_probs for response in responses], torch.float32)[0],
    )


def operations(shape: Mapping[str, int], parameters: int, tokens: int, width: int) -> float:
    """Return the operations of an update without recomputation: six per token and multiplied parameter, and those of
    attention, which covers half of a row on average. The embedding is multiplied only if it is the head as well."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    looked_up = 0 if shape.get("tie_word_embeddings", True) else shape["vocab_size"] * hidden
    return 6.0 * tokens * (parameters - looked_up + layers * hidden * width)


def peak_of(gpu: str) -> float | None:
    return next((value for part, value in PEAKS.items() if part in gpu), None)


def cuts(workers: TrainWorkers, batch: Batch) -> tuple[int, int]:
    """Return how many updates `update_policy` makes of a batch, and how many micro-batches each rank runs in total."""
    plans, ranks = workers.policy.updates, len(workers.group)
    lengths, mini_batches = batch.lengths.numpy(), plans.mini_batches(batch.group, 1)
    shares = [plan(Pieces.single(lengths, rows), ranks, plans.budget)[0] for rows in mini_batches]
    return len(shares), sum(map(len, shares))
