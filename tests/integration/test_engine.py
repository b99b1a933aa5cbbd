"""The switch with real vLLM and FSDP2: fresh weights, proven; lost servers replaced with nothing lost."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridrl.agents.endpoint.agent import Agents
from hybridrl.agents.environments.conversations import Conversations
from hybridrl.agents.environments.episode_loop import EpisodeLimits
from hybridrl.agents.environments.pool import EpisodeWorkers
from hybridrl.agents.environments.worker import EpisodeSettings
from hybridrl.core.batch import Batch
from hybridrl.core.experience.batching import group_by_prompt, to_batch
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.trajectory import Episode
from hybridrl.core.hybrid_engine import Mode
from hybridrl.core.rollout import Completion, ModeError, Request, Sampling, request_seed
from hybridrl.core.rollout.engine import RolloutEngine
from hybridrl.core.rollout.fleet import EngineGroup
from hybridrl.core.weights.sync import StaleWeights
from hybridrl.data.prompts import Prompt
from hybridrl.required import required
from hybridrl.rewards.pool import ScorerPool
from tests.agents.sections import agent_of, environments_of
from tests.integration.agents import REWARD, TURNS
from tests.integration.answers import (
    PROMPT,
    SAMPLING,
    generate,
    generate_disturbed,
    largest_gap,
    requests,
    rows,
    sending,
    tokens,
    update,
)
from tests.integration.conftest import ENGINE

FILE = Path(__file__).with_name("agents.py")
LIMITS = EpisodeLimits(prompt=32, response=416, context=448)
ENDS = tuple(range(2, 100))  # so many that a random model ends its turns after a few tokens
EIGHT = "turns: 8, tokens: 3"
PROMPTS, SAMPLES = 4, 4
VLLM_READS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": False,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": True,
}


def test_engine_and_trainer_agree_before_and_after_an_update(parts):
    engine, workers = parts
    wanted = requests()
    engine.to_rollout(0)
    before = generate(engine, wanted)
    engine.to_training()
    batch = rows(wanted, before)
    assert largest_gap(workers, batch) < 1e-4
    update(workers, batch)
    assert largest_gap(workers, batch) > 0.1, "the update must change the policy for this test to mean anything"
    engine.to_rollout(1)
    after = generate(engine, wanted)
    engine.to_training()
    assert tokens(after) != tokens(before)
    assert largest_gap(workers, rows(wanted, after)) < 1e-4
    assert engine.take_metrics()["training/probe_log_prob_diff"] < 1e-4


def read_by_libraries(_: object) -> dict[str, object]:
    """Return what torch, OpenMP and vLLM have read in this process, by the variables that say it."""
    read = {"TORCH_COMPILE_DISABLE": torch._dynamo.config.disable, "OMP_NUM_THREADS": torch.get_num_threads()}
    read |= {"LD_PRELOAD": "libjemalloc" in Path("/proc/self/maps").read_text()}
    return read | {name: getattr(import_module("vllm.envs"), name) for name in VLLM_READS}


@pytest.mark.skipif(ENGINE != "vllm", reason="SGLang computes in processes of its own, which read what they start with")
def test_a_server_s_libraries_have_read_what_is_set_for_it(parts):
    engine, _ = parts
    expected = {"TORCH_COMPILE_DISABLE": True, "OMP_NUM_THREADS": max(len(os.sched_getaffinity(0)) // 2, 1)}
    expected |= {"LD_PRELOAD": True} | VLLM_READS
    for server in engine.fleet.servers.actors:
        assert ray.get(server.__ray_call__.remote(read_by_libraries), timeout=60) == expected


def test_a_response_to_a_prompt_longer_than_a_cache_block_does_not_use_the_old_cache(parts):
    engine, workers = parts
    wanted = [Request(0, s, [*PROMPT * 4], request_seed(2, 0, s), SAMPLING) for s in range(2)]
    engine.to_rollout(1)
    first = generate(engine, wanted)
    engine.to_training()
    update(workers, rows(wanted, first))
    engine.to_rollout(2)
    second = generate(engine, wanted)
    engine.to_training()
    assert largest_gap(workers, rows(wanted, second)) < 1e-4


def test_a_stop_text_ends_a_response_with_the_token_that_completes_it(parts, tokenizer):
    engine, _ = parts
    engine.to_rollout(1)
    whole = generate(engine, requests())
    texts = ("a", "ser\n")  # the second is several tokens, or one
    stopped = generate(engine, [replace(one, sampling=replace(SAMPLING, stop=texts)) for one in requests()])
    engine.to_training()
    ended = 0
    for key, response in whole.items():
        ids = response.token_ids.tolist()
        lengths = [n for n in range(1, len(ids) + 1) if any(text in tokenizer.decode(ids[:n]) for text in texts)]
        length = min(lengths, default=len(ids))
        assert stopped[key].token_ids.tolist() == ids[:length]
        assert stopped[key].log_probs.tolist() == pytest.approx(response.log_probs[:length].tolist(), abs=1e-5)
        assert stopped[key].truncated == (response.truncated and not lengths)
        ended += bool(lengths) and length < len(ids)
    assert ended >= 2, "some responses must be ended by a text for this test to mean anything"


def test_a_call_in_the_wrong_mode_raises_and_switching_to_the_present_mode_does_nothing(parts):
    engine, workers = parts
    with pytest.raises(ModeError, match="generate was called while the devices are in training mode"):
        generate(engine, requests(1, 1))
    engine.to_rollout(3)
    batch = rows(requests(1), generate(engine, requests(1)))
    with pytest.raises(ModeError, match="forward was called while the devices are in rollout mode"):
        workers.forward_log_probs(batch)
    engine.take_metrics()
    engine.to_rollout(3)
    assert "timing_s/update_weights" not in engine.take_metrics()
    assert engine.mode is Mode.ROLLOUT
    engine.to_training()
    engine.to_training()
    assert engine.mode is Mode.TRAINING


def test_weights_that_were_not_synced_stop_the_run(parts):
    engine, workers = parts
    wanted = requests(2)
    engine.to_rollout(4)
    responses = generate(engine, wanted)
    engine.to_training()
    update(workers, rows(wanted, responses))
    stale = pytest.raises(StaleWeights, match="computes with the weights of weight sync")
    with sending(engine, lambda indices: None), stale:
        engine.to_rollout(5)
    finish = partial(EngineGroup.broadcast, engine.fleet.servers, RolloutEngine.finish_sync, timeout=60)
    stale = pytest.raises(StaleWeights, match="differs from the trainer in the log-probs")
    with sending(engine, lambda indices: finish(engine.sync.sync_id, 5)), stale:
        engine.to_rollout(5)
    engine.to_rollout(5)
    engine.to_training()


async def test_an_engine_tells_how_many_tokens_it_has_sampled_while_it_samples(parts):
    engine, _ = parts
    engine.to_rollout(5)
    request = Request(0, 0, PROMPT, 1, replace(SAMPLING, ignore_eos=True))

    servers = [lane.actor for lane in engine.client.lanes]
    before = sum(await asyncio.gather(*(server.check() for server in servers)))
    response, seen = engine.client.generate(request), []
    while not response.done():
        seen.append(sum(await asyncio.gather(*(server.check() for server in servers))) - before)
    length, sampled = len(response.result().token_ids), sum([await server.check() for server in servers]) - before
    assert sampled == length == SAMPLING.max_tokens
    assert seen == sorted(seen) and any(0 < count < length for count in seen)
    engine.to_training()


def server_processes() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if "RolloutServer" in command(process)]


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        (signal.SIGKILL, "killed by hand or by a scheduler"),
        pytest.param(signal.SIGSTOP, "killed, as it had sampled no token for", marks=pytest.mark.slow),
    ],
)
def test_a_server_lost_while_generating_costs_no_response(parts, monkeypatch, caplog, how, cause):
    engine, _ = parts
    wanted = requests(8, 4)
    engine.to_rollout(6)
    undisturbed = tokens(generate(engine, wanted))
    restarts = engine.client.restarts
    if how is signal.SIGSTOP:  # it hangs, which only its silence shows
        monkeypatch.setattr(engine.client, "timeout", 5.0)
    target = server_processes()[0]
    disturbed = generate_disturbed(engine, wanted, lambda: os.kill(target.pid, how))
    again = tokens(generate(engine, wanted))
    assert tokens(disturbed) == undisturbed == again
    assert engine.client.restarts == restarts + 1
    (warning,) = (line for line in caplog.messages if "was lost" in line)
    assert cause in warning
    target.wait(timeout=30)  # Ray first asks it to end, for five seconds
    assert len(server_processes()) == 2
    engine.to_training()


@pytest.mark.slow
def test_a_server_killed_asleep_is_rebuilt_when_it_is_needed(parts):
    engine, _ = parts
    engine.to_training()
    restarts = engine.client.restarts
    server_processes()[0].kill()
    engine.to_rollout(7)
    assert len(generate(engine, requests(2))) == 6
    assert engine.client.restarts == restarts + 1
    engine.to_training()


@pytest.mark.slow
def test_a_server_killed_during_a_weight_sync_is_rebuilt_and_gets_all_weights(parts):
    engine, workers = parts
    engine.to_training()
    restarts, send_all = engine.client.restarts, engine.sync.send_all
    victims = [server_processes()[0]]

    def send_to_the_dead(indices):
        while victims:
            victims.pop().kill()
        send_all(indices)

    with sending(engine, send_to_the_dead):
        engine.to_rollout(8)
    wanted = requests(2)
    responses = generate(engine, wanted)
    assert engine.client.restarts == restarts + 1
    engine.to_training()
    assert largest_gap(workers, rows(wanted, responses)) < 1e-4


# -- episodes in processes of their own --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tokenizer_of(tiny)


@pytest.fixture
def prompts(tokenizer) -> list[Prompt]:
    texts = [f"What is {number}+{number}?" for number in range(PROMPTS)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    options = {"add_generation_prompt": True, "return_dict": False}
    ids = [tokenizer.apply_chat_template(chat, **options) for chat in chats]
    return [Prompt(row, ids[row], chats[row], "any", "1", {}) for row in range(PROMPTS)]


@pytest.fixture(scope="module")
def workers(session, tiny, tmp_path_factory) -> Iterator[EpisodeWorkers]:
    """A process in which a row runs in the agent of agents.py, unless it names another form."""
    directory = tmp_path_factory.mktemp("episodes")
    loops = [f"{{name: echo, _target_: '{FILE}:EchoLoop'}}", f"{{name: counter, _target_: '{FILE}:Counter', {EIGHT}}}"]
    (directory / "loops.yaml").write_text("".join(f"- {loop}\n" for loop in loops))
    environments = environments_of(path=str(FILE), agent_loop_config_path=str(directory / "loops.yaml"))
    plain = {"actor_rollout_ref": {"rollout": {}}, "data": {"max_prompt_length": 32, "max_response_length": 416}}
    agents, load = partial(Agents, agent_of(path=str(FILE), name="echo"), 64, None), partial(tokenizer_of, tiny)
    settings = EpisodeSettings(load, environments, LIMITS, ENDS, configuration=plain, agents=agents)
    with EpisodeWorkers(session, settings, [str(directory / "episodes.log")]) as workers:
        workers.wait_until_ready(120)
        yield workers


def tokenizer_of(tiny: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny / "model")


def naming(prompts: list[Prompt], **columns: str) -> list[Prompt]:
    """The prompts with these columns."""
    return [replace(prompt, columns=columns) for prompt in prompts]


def episodes(config, engine, tokenizer, prompts, workers: EpisodeWorkers | None, version: int) -> list[Episode]:
    engine.to_rollout(version)
    with ScorerPool(config.reward) as scorers:
        conversations = workers and Conversations(workers, engine.client, 3)
        runner = EpisodeRunner(engine.client, Decoding(scorers, tokenizer), 3, conversations=conversations)
        sampling = Sampling(max_tokens=LIMITS.response, stop_ids=ENDS)
        found, _ = runner.run(prompts, SAMPLES, sampling, range(PROMPTS))
    engine.to_training()
    return found


def assert_equal(one: Batch, other: Batch) -> None:
    for (name, _, value), (name_there, _, there) in zip(one.filled(), other.filled(), strict=True):
        assert (name, value.dtype) == (name_there, there.dtype)
        # SGLang's sums depend on what else is in a batch, in the last bits.
        close = {"rtol": 0.0, "atol": 1e-5 if ENGINE == "sglang" and value.is_floating_point() else 0.0}
        torch.testing.assert_close(value, there, **close, msg=lambda text, name=name: f"{name}: {text}")


class Decoding:
    """The scorers of this process; they decode responses as the scoring actors do."""

    per = "response"

    def __init__(self, scorers: ScorerPool, tokenizer) -> None:
        self.scorers, self.tokenizer = scorers, tokenizer

    def score(self, requests, scored):
        for request in requests:
            request.solution = self.tokenizer.decode(request.response_ids, skip_special_tokens=True)
        self.scorers.score(requests, scored)


def batch_of(found: list[Episode]) -> Batch:
    return to_batch(group_by_prompt(found))


def test_an_episode_of_one_turn_is_the_single_response_bit_for_bit(config, parts, tokenizer, prompts, workers):
    engine, _ = parts
    single = batch_of(episodes(config, engine, tokenizer, prompts, None, 0))
    one_turn = naming(prompts, env_class=f"{FILE}:OneResponse")
    assert_equal(single, batch_of(episodes(config, engine, tokenizer, one_turn, workers, 0)))


def test_a_loop_gives_one_batch_as_environment_as_agent_loop_and_as_agent(config, parts, tokenizer, prompts, workers):
    engine, _ = parts
    batches = []
    for form in ({"env_class": f"{FILE}:Echo"}, {"agent_name": "echo"}, {}):
        found = episodes(config, engine, tokenizer, naming(prompts, **form), workers, 0)
        assert {(one.score.detail, len(one.trajectory.turns)) for one in found} == {("", TURNS)}
        batches.append(batch_of(found))
    assert_equal(batches[0], batches[1])
    assert_equal(batches[0], batches[2])


@pytest.mark.slow
def test_a_server_killed_while_agents_wait_for_it_costs_no_episode(
    config, parts, tokenizer, prompts, workers, monkeypatch
):
    engine, _ = parts
    restarts, victims, sample = engine.client.restarts, [server_processes()[0]], engine.client.generate

    def kill_once(request, begun=None):
        if request.turn == 1 and victims:
            victims.pop().kill()
        return sample(request, begun)

    undisturbed = batch_of(episodes(config, engine, tokenizer, prompts, workers, 0))
    monkeypatch.setattr(engine.client, "generate", kill_once)
    found = episodes(config, engine, tokenizer, prompts, workers, 0)
    assert engine.client.restarts == restarts + 1 and not victims
    assert {one.score.value for one in found} == {REWARD}
    assert_equal(undisturbed, batch_of(found))


def test_log_probs_of_eight_turns_are_those_of_the_trainer(config, parts, tokenizer, prompts, workers):
    engine, trainers = parts
    found = episodes(config, engine, tokenizer, naming(prompts, agent_name="counter"), workers, 1)
    assert {one.score.detail for one in found} == {""}
    batch = batch_of(found)
    assert required(batch.response_mask).sum() <= PROMPTS * SAMPLES * 8 * 3
    assert {len(one.trajectory.turns) for one in found} == {8}
    assert len({tuple(one.trajectory.turns[3].sampled.tolist()) for one in found}) > 1
    assert largest_gap(trainers, batch) < 1e-4


def test_each_part_of_a_response_that_is_continued_over_two_syncs_has_the_log_probs_of_its_weights(parts):
    engine, workers = parts
    sampling = replace(SAMPLING, max_tokens=400, ignore_eos=True)
    wanted = [Request(0, sample, PROMPT, 50 + sample, sampling) for sample in range(3)]
    loop, first = asyncio.new_event_loop(), engine.version + 1
    lengths, gaps = [0, 0, 0], []

    async def sample_some(begin) -> list:
        futures = begin()
        await asyncio.sleep(0.2)
        await engine.client.interrupt()
        return futures

    def compare(parts: list[Completion]) -> None:
        """Compare the tokens sampled last, and those before, with the trainer's weights; then update these."""
        engine.to_training()
        batch = rows(wanted, {(0, sample): part for sample, part in enumerate(parts)})
        gap = (workers.forward_log_probs(batch).old_log_probs - batch.rollout_log_probs).abs().numpy()
        new = np.concatenate(
            [np.arange(len(part.token_ids)) >= done for part, done in zip(parts, lengths, strict=True)]
        )
        gaps.append((gap[new].max(), gap[~new].max() if lengths[0] else 1.0))
        lengths[:] = [len(part.token_ids) for part in parts]
        update(workers, batch)

    def begun() -> list[Completion]:
        parts = {request.sample: required(part) for request, part in engine.client.paused()}
        return [parts[sample] for sample in range(3)]

    engine.to_rollout(first)
    futures = loop.run_until_complete(sample_some(lambda: [engine.client.generate(request) for request in wanted]))
    compare(begun())
    engine.to_rollout(first + 1)
    loop.run_until_complete(sample_some(engine.client.resume))
    compare(begun())
    engine.to_rollout(first + 2)

    async def end() -> list[Completion]:
        engine.client.resume()
        return await asyncio.gather(*futures)

    whole = loop.run_until_complete(end())
    loop.close()
    compare(whole)
    for of_its_weights, of_others in gaps:
        assert of_its_weights < 1e-4 < 0.1 < of_others, "updates must change the policy for this to mean anything"
    for response in whole:
        assert len(response.token_ids) == 400
        assert sorted(set(np.unique(response.versions).tolist())) == [first, first + 1, first + 2]
