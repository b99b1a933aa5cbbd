"""Episodes in processes of their own with real engines: the same bits as single responses, and fresh log-probs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hybridrl.batch import Batch
from hybridrl.data.prompts import Prompt
from hybridrl.environments.episode_loop import Limits
from hybridrl.environments.pool import EpisodeWorkers
from hybridrl.environments.settings import EnvironmentSettings
from hybridrl.environments.worker import EpisodeSettings
from hybridrl.experience.batching import group_by_prompt, to_batch
from hybridrl.experience.episodes import Episode, EpisodeRunner
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rollout import Sampling
from tests.integration.agents import TOKENS, TURNS
from tests.integration.answers import largest_gap

FILE = Path(__file__).with_name("agents.py")
SAMPLING = Sampling(max_tokens=24, stop_ids=(2,))
PROMPTS, SAMPLES = 3, 4


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


@pytest.fixture
def prompts(tokenizer) -> list[Prompt]:
    texts = [f"What is {number}+{number}?" for number in range(PROMPTS)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    options = {"add_generation_prompt": True, "return_dict": False}
    ids = [tokenizer.apply_chat_template(chat, **options) for chat in chats]
    return [Prompt(row, ids[row], chats[row], "any", "1", {}) for row in range(PROMPTS)]


@pytest.fixture(scope="module")
def workers_of(session, tiny, tmp_path_factory) -> Callable[[str | None], Iterator[EpisodeWorkers]]:
    """Open processes whose episodes run in a class of agents.py."""

    @contextmanager
    def open_workers(name: str) -> Iterator[EpisodeWorkers]:
        load = partial(AutoTokenizer.from_pretrained, str(tiny / "model"))
        environments = EnvironmentSettings(environment=f"{FILE}:{name}")
        settings = EpisodeSettings(load, environments, Limits(prompt=32, response=24, context=56), (2,))
        logs = [str(tmp_path_factory.mktemp("logs") / "episodes.log")]
        with EpisodeWorkers(session, settings, 1, logs) as workers:
            workers.wait_until_ready(120)
            yield workers

    return open_workers


def episodes(config, engine, tokenizer, prompts, workers: EpisodeWorkers | None, version: int) -> list[Episode]:
    engine.to_rollout(version)
    with ScorerPool(config.reward) as scorers:
        runner = EpisodeRunner(engine.client, Decoding(scorers, tokenizer), 3, None, workers)
        found, _ = runner.run(prompts, SAMPLES, SAMPLING, range(PROMPTS))
    engine.to_training()
    return found


class Decoding:
    """The scorers of this process; they decode responses as the scoring actors do."""

    in_one_call = False

    def __init__(self, scorers: ScorerPool, tokenizer) -> None:
        self.scorers, self.tokenizer = scorers, tokenizer

    def submit(self, requests):
        for request in requests:
            request.solution = self.tokenizer.decode(request.response_ids, skip_special_tokens=True)
        return self.scorers.submit(requests)


def batch_of(found: list[Episode]) -> Batch:
    return to_batch(group_by_prompt(found, range(PROMPTS)))


def test_an_episode_of_one_turn_is_the_single_response_bit_for_bit(config, parts, tokenizer, prompts, workers_of):
    engine, _ = parts
    single = batch_of(episodes(config, engine, tokenizer, prompts, None, 0))
    with workers_of("OneResponse") as workers:
        conversations = batch_of(episodes(config, engine, tokenizer, prompts, workers, 0))
    for (name, axis, value), (other, _, same) in zip(single._filled(), conversations._filled(), strict=True):
        assert (name, value.dtype) == (other, same.dtype)
        assert torch.equal(value, same), (name, axis)


def test_log_probs_of_eight_turns_are_those_of_the_trainer(config, parts, tokenizer, prompts, workers_of):
    engine, workers = parts
    with workers_of("Counter") as episode_workers:
        found = episodes(config, engine, tokenizer, prompts, episode_workers, 1)
    assert {one.score.detail for one in found} == {""}
    batch = batch_of(found)
    assert batch.response_mask.sum() <= PROMPTS * SAMPLES * TURNS * TOKENS
    assert {len(one.trajectory.turns) for one in found} == {TURNS}
    assert batch.token_rewards.reshape(-1).max() == TURNS - 1
    assert len({tuple(one.trajectory.turns[3].sampled.tolist()) for one in found}) > 1
    assert largest_gap(workers, batch) < 1e-4
