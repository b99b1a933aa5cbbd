"""SGLang itself behind the interface of engines; `scripts/test.sh --sglang` runs this, and other tests of real engines,
where it is installed.

What is known to go wrong with SGLang, from public bug reports, and what happens here. "vLLM alike": nothing in it
depends on the engine. `tests/failures.yaml` names the tests.

- the package is not importable, or of another version -> rejected before the start: `doctor` names the environment
  and the command.
- a class or function of it has moved -> rejected before the start: every name that is imported is looked up in the
  installed source.
- a kernel package is missing, or does not support the device -> the default is SGLang's own choice; on a CPU any
  other than `torch_native` is rejected.
- two GPU generations need two attention backends -> `engine_kwargs.sglang.attention_backend`.
- no kernel image for the device -> vLLM alike: the start fails with SGLang's error, which `hybridrl why` shows.
- multi-turn is the only mode, or the engine has no tokenizer -> impossible: one path for both, and the tokenizer is
  the model's.
- a training backend without this engine -> impossible: there is one.
- allocation strings that do not add up -> translated from AReaL's, or rejected with the legal numbers.
- slow -> little cache, few engines, no prefix cache: metrics and the advice of a run; prefixes are shared by default.
- an argument that this version does not have -> rejected with the nearest name.
- a prefix that is not cached is reported as an error -> a metric: `rollout/prefix_cache_hit_share`.
- the token limit is reported as an error -> a response that is cut off, counted.
- the queue is full -> requests wait in the client.
- a request is aborted without a reason -> interrupted ones continue; SGLang's own reason is in the error, and the
  server is tried again.
- a request asks for more tokens than the context has -> shortened to what is left; a prompt that is too long is
  rejected.
- pausing an engine that does not run, or with active requests -> both do nothing harmful: what runs is ended and
  continued.
- waking what does not sleep -> nothing happens; SGLang's process would end.
- the cache holds keys of old weights after waking -> it is emptied with every sync, which fails if a request still
  has a part of it.
- the update of weights fails in silence -> every flag is read; digests, the number of the sync and the probe prove
  the rest.
- a scheduler dies and takes the server with it -> its error becomes the server's; the server is rebuilt and its
  responses are sampled again, with the same seeds.
- a rebuilt engine repeats samples of a group -> impossible: a seed is a request's, not the engine's.
"""

import asyncio
import json
import textwrap
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import load_ppo_config
from hybridrl.core.rollout import Completion, Request, RequestFault, Sampling
from hybridrl.core.rollout.engine import Goal, continuation
from hybridrl.core.weights.buckets import SharedBuffer, buffer_bytes, digest, plan_buckets
from hybridrl.doctor.machine import ENGINES, missing_symbols
from hybridrl.plugins import load
from hybridrl.runtime.environment import worker_environment
from tests.integration.answers import PROMPT
from tests.integration.conftest import ENGINE
from tests.integration.test_run import finish, metrics, start

if ENGINE != "sglang":
    pytest.skip("bash scripts/test.sh --sglang", allow_module_level=True)

PROBE = [1, 20, 30, 40, 50]
PLANTED = {
    "stale loader": "from hybridrl.core.rollout.sglang import worker\nworker.load_bucket = lambda *_: None\n",
    "false flag": "from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater\n"
    "WeightUpdater.update_weights_from_tensor = lambda *_, **__: (False, 'planted')\n",
}
STOPS = {
    "stale loader": "differs from the trainer in the log-probs of a fixed sequence",
    "false flag": "SGLang has not updated its weights: planted",
}


class Served:
    """An engine with the weights of a model of transformers, and its loop."""

    def __init__(self, config: Any) -> None:
        section = config.actor_rollout_ref
        self.model = AutoModelForCausalLM.from_pretrained(section.model.path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(section.model.path)
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        self.state = {name: value for name, value in self.model.state_dict().items() if name not in tied}
        self.buckets = plan_buckets([(name, value.shape, value.dtype) for name, value in self.state.items()], 1 << 20)
        self.buffer = SharedBuffer(buffer_bytes(self.buckets), torch.device("cpu"))
        self.loop = asyncio.new_event_loop()
        self.engine: Any = load("engine.sglang").build("cpu", section.model, section.rollout, 1)
        self.run(self.engine.connect())
        self.run(self.sync(1))

    def run(self, call: Coroutine) -> Any:
        return self.loop.run_until_complete(call)

    async def sync(self, number: int, wrong: int = 0) -> None:
        await self.engine.begin_weights()
        for bucket in self.buckets:
            bucket.clear_gaps(self.buffer.tensor)
            for tensor in bucket.tensors:
                tensor.view(bucket.view(self.buffer.tensor)).copy_(self.state[tensor.name])
            digests = [digest(bucket.view(self.buffer.tensor)) + wrong]
            await self.engine.load_bucket(bucket, [self.buffer.handle], digests, False)
        await self.engine.finish_weights()
        await self.engine.finish_sync(number, number)

    def sample(self, *requests: Request) -> list[Completion]:
        async def together() -> list[Completion]:
            return await asyncio.gather(*map(self.engine.generate, requests))

        return self.run(together())

    def log_probs(self, request: Request, response: Completion) -> torch.Tensor:
        """The distribution [tokens, vocabulary] that each token of a response was sampled from."""
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids.tolist()]])
        with torch.no_grad():
            logits = self.model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        return torch.log_softmax(logits / (request.sampling.temperature or 1.0), -1)


@pytest.fixture(scope="module")
def served(overrides, tmp_path_factory) -> Iterator[Served]:
    more = {"trainer.n_gpus_per_node": 1, "actor_rollout_ref.rollout.max_num_seqs": 16}
    config = load_ppo_config(overrides(tmp_path_factory.mktemp("run"), more))
    environment = worker_environment("cpu", 1) | load("engine.sglang").environment(config.actor_rollout_ref.rollout)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        served = Served(config)
        yield served
        served.engine.engine.shutdown()


def request(sample: int = 0, prompt: int = 0, **sampling: Any) -> Request:
    options = {"max_tokens": 16, "stop_ids": ()} | sampling
    return Request(prompt, sample, [*PROMPT, 3 + prompt], 100 * prompt + sample, Sampling(**options))


def test_log_probs_are_those_of_the_model_at_the_temperature_and_of_all_tokens_with_top_p(served):
    wanted = [request(0), request(1, temperature=0.6), request(2, top_p=0.5), request(3, top_k=3)]
    for one, response in zip(wanted, served.sample(*wanted), strict=True):
        whole = served.log_probs(one, response)
        expected = whole.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=1e-5, rtol=0)
        assert (len(response.token_ids), response.truncated, response.versions) == (16, True, 1)
        if one.sampling.top_k == 3:
            assert all(token in row.topk(3).indices for token, row in zip(response.token_ids, whole, strict=True))
    expected = served.log_probs(
        Request(0, 0, PROBE[:1], 0, Sampling(1, ())), SimpleNamespace(token_ids=np.array(PROBE[1:]))
    )
    scored = torch.tensor(served.run(served.engine.score(PROBE)))
    torch.testing.assert_close(scored, expected[range(4), PROBE[1:]], atol=1e-5, rtol=0)


def test_a_seed_decides_a_response_whatever_else_is_sampled_and_samples_of_a_group_differ(served):
    wanted = [request(sample, prompt) for prompt in range(2) for sample in range(8)]
    together = [response.token_ids.tolist() for response in served.sample(*wanted)]
    assert len(set(map(tuple, together))) == len(wanted)
    backwards = [response.token_ids.tolist() for response in served.sample(*reversed(wanted))]
    assert together == backwards[::-1]
    assert served.sample(wanted[5])[0].token_ids.tolist() == together[5]


def test_the_draw_has_the_model_s_probabilities(served):
    sharp = {"max_tokens": 1, "temperature": 0.25}
    drawn = served.sample(*(request(sample, **sharp) for sample in range(1500)))
    counts = np.bincount([response.token_ids[0] for response in drawn], minlength=served.model.config.vocab_size)
    expected = 1500 * served.log_probs(request(**sharp), drawn[0])[0].exp().numpy()
    frequent = expected > 5
    deviations = (counts - expected)[frequent] / np.sqrt(expected[frequent])
    assert frequent.sum() > 5 and np.abs(deviations).max() < 5 and deviations.std() < 2


def test_stop_tokens_and_the_longest_response_end_one(served):
    (greedy,) = served.sample(request(temperature=0.0))
    stop = greedy.token_ids.tolist()[4]
    first = greedy.token_ids.tolist().index(stop) + 1
    (stopped,) = served.sample(request(temperature=0.0, stop_ids=(stop,)))
    assert stopped.token_ids.tolist() == greedy.token_ids.tolist()[:first] and not stopped.truncated
    (ignoring,) = served.sample(request(temperature=0.0, stop_ids=(stop,), ignore_eos=True))
    assert ignoring.token_ids.tolist() == greedy.token_ids.tolist()
    context = served.engine.context
    (longest,) = served.sample(replace(request(max_tokens=10_000), prompt_ids=[5] * (context - 3)))
    assert len(longest.token_ids) == 3 and longest.truncated


def test_a_stop_text_that_an_interruption_cuts_ends_the_response(served):
    (greedy,) = served.sample(request(temperature=0.0))
    ids = greedy.token_ids.tolist()
    cut = next(
        n for n in range(1, 15) if served.tokenizer.decode(ids[n - 1 : n]) and served.tokenizer.decode(ids[n : n + 1])
    )
    text = served.tokenizer.decode(ids[cut - 1 : cut + 1])
    whole = request(temperature=0.0, stop=(text,))
    begun = replace(greedy, token_ids=greedy.token_ids[:cut], log_probs=greedy.log_probs[:cut], interrupted=True)
    (rest,) = served.sample(continuation(whole, begun))
    assert text in served.tokenizer.decode([*ids[:cut], *rest.token_ids.tolist()]) and not rest.truncated
    assert rest.token_ids.tolist() == ids[cut : cut + len(rest.token_ids)]


def test_an_interruption_returns_what_each_response_has(served):
    async def interrupted() -> list[Completion]:
        running = [asyncio.ensure_future(served.engine.generate(request(n, max_tokens=40))) for n in range(20)]
        while await served.engine.check() < before + 20:
            await asyncio.sleep(0)
        await served.engine.interrupt()
        return await asyncio.gather(*running)

    before = served.run(served.engine.check())
    parts = served.run(interrupted())
    lengths = [len(part.token_ids) for part in parts]
    assert 0 < max(lengths) < 40 and min(lengths) == 0  # at most sixteen run at a time
    assert all(part.interrupted and len(part.log_probs) == len(part.token_ids) for part in parts)
    (again,) = served.sample(request(0, max_tokens=40))
    assert again.token_ids.tolist()[: lengths[0]] == parts[0].token_ids.tolist()


def test_a_token_that_is_sampled_during_an_interruption_may_end_its_response(served):
    stops = tuple(range(0, served.model.config.vocab_size, 4))

    async def interrupted() -> list[Completion]:
        wanted = [request(sample, max_tokens=40, stop_ids=stops) for sample in range(64)]
        running = [asyncio.ensure_future(served.engine.generate(one)) for one in wanted]
        while await served.engine.check() < before + 40:
            await asyncio.sleep(0)
        await served.engine.interrupt()
        return await asyncio.gather(*running)

    for _ in range(3):
        before = served.run(served.engine.check())
        parts = served.run(interrupted())
        assert any(part.interrupted and len(part.token_ids) for part in parts)
        assert all(part.interrupted is (not {*part.token_ids.tolist()} & {*stops}) for part in parts)


def test_requests_that_nobody_waits_for_end_before_weights_arrive(served):
    async def abandoned() -> None:
        task = asyncio.ensure_future(served.engine.generate(request(max_tokens=40)))
        before = await served.engine.check()
        while await served.engine.check() == before:
            await asyncio.sleep(0)
        task.cancel()
        await served.sync(1)

    served.run(asyncio.wait_for(abandoned(), 60))


def test_held_requests_start_together_and_end_once_the_goal_is_reached(served):
    async def held() -> list[Completion]:
        await served.engine.take_stats()
        await served.engine.hold()
        running = [asyncio.ensure_future(served.engine.generate(one)) for one in wanted]
        await asyncio.sleep(0)
        assert (await served.engine.take_stats()).tokens == 0
        await served.engine.release(Goal([({0, 1}, 1)]))
        return await asyncio.gather(*running)

    wanted = [request(0, 0, max_tokens=4), request(0, 1, max_tokens=40)]
    lengths = {len(served.run(held())[1].token_ids) for _ in range(3)}
    short, long = served.run(held())
    assert lengths == {len(long.token_ids)}, "an engine stops after the same iteration every time"
    assert (len(short.token_ids), short.interrupted, long.interrupted) == (4, False, True)
    stats = served.run(served.engine.take_stats())
    assert stats.tokens == 4 + len(long.token_ids) and max(stats.seconds) == 2 and stats.busy > 0


MALFORMED = {
    "temperature": -1.0, "top_p": 0.0, "top_k": 2.5, "repetition_penalty": 0.0, "min_tokens": 17, "max_tokens": 0,
    "stop": ("",), "min_p": 0.1, "presence_penalty": None, "frequency_penalty": float("nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_what_would_end_the_engine_is_rejected_and_the_engine_lives(served, name):
    with pytest.raises(RequestFault):
        served.sample(request(**{name: MALFORMED[name]}))
    assert len(served.sample(request(top_k=2**40, stop=("never sampled",)))[0].token_ids) == 16


def test_a_response_follows_a_json_schema(served):
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]})
    (response,) = served.sample(request(json_schema=schema, stop_ids=(served.tokenizer.eos_token_id,), max_tokens=40))
    assert set(json.loads(served.tokenizer.decode(response.token_ids, skip_special_tokens=True))) == {"n"}


def test_bytes_that_differ_and_a_flag_that_says_no_are_errors_and_the_next_sync_works(served, monkeypatch):
    with pytest.raises(RuntimeError, match="the bucket's digests differ"):
        served.run(served.sync(2, wrong=1))
    assert served.run(served.engine.held_sync()) == 1
    served.run(served.engine.finish_weights())

    async def refused(_: Any) -> tuple[bool, str]:
        return False, "planted"

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="has not updated its weights: planted"):
        patch.setattr(served.engine.front, "update_weights_from_tensor", refused)
        served.run(served.sync(3))
    served.run(served.sync(4))
    assert served.run(served.engine.held_sync()) == 4


def test_every_argument_on_either_device_is_one_of_sglang_s(served, config):
    from sglang.srt.server_args import ServerArgs

    from hybridrl.core.rollout.sglang.engine import sglang_arguments

    section = config.actor_rollout_ref
    adapted = replace(section.model, lora_rank=8)
    for device in ("cpu", "cuda"):
        names = sglang_arguments(device, adapted, section.rollout, 1)
        assert set(names) <= set(ServerArgs.__struct_fields__)


def test_the_installed_sglang_has_every_name_that_is_imported_from_it():
    assert missing_symbols(ENGINES / "sglang", "sglang") == []


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_of_the_weights_stops_a_run_by_name(overrides, tmp_path, planted):
    code = textwrap.indent(PLANTED[planted], "    ")
    (tmp_path / "planted.py").write_text(f"import sys\nif 'sglang.srt.managers.scheduler' in sys.modules:\n{code}")
    library = {"actor_rollout_ref.model.external_lib": f"[{tmp_path / 'planted.py'}]", "trainer.n_gpus_per_node": 1}
    output = finish(start("main_ppo", overrides(tmp_path / "run", library)), status=1)
    assert STOPS[planted] in output


@pytest.mark.slow
def test_a_run_trains_with_an_adapter_and_responses_under_way(overrides, tmp_path):
    more = {
        "actor_rollout_ref.model.lora_rank": 4,
        "trainer.v1.trainer_mode": "colocate_async",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 3,
    }
    finish(start("main_ppo", overrides(tmp_path / "run", more)))
    found = metrics(tmp_path / "run")
    assert max(values.get("training/log_probs_diff_max", 0.0) for values in found.values()) < 1e-4
    assert max(found) == 3
