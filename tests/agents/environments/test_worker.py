"""A process that runs episodes, in this process: what one episode sends or reads costs no other."""

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from hybridrl.agents.environments.episode_loop import EpisodeLimits
from hybridrl.agents.environments.worker import EpisodeSettings, EpisodeSpec, EpisodeTicket, EpisodeWorker
from hybridrl.core.carried import Encoded
from hybridrl.core.experience.trajectory import Trajectory
from hybridrl.core.rollout import Completion, Request, RequestFault, Sampling
from hybridrl.core.rollout.engine import FatalRequest, RejectedRequest
from tests.agents.sections import environments_of

LIMITS = EpisodeLimits(prompt=100, response=300, context=400)
SAMPLING = Sampling(60, (0,))
ENVIRONMENT = '''
from hybridrl.agents.environments import Environment, Step


class Reads(Environment):
    """Has the policy read the row's text, once or as a new context, and ends."""

    def reset(self, messages):
        return [{"role": "user", "content": self.row["first"]}] if "first" in self.row else messages

    def step(self, response):
        message = {"role": "user", "content": self.row.get("text", "more")}
        if response.turn:
            return Step(done=True)
        return Step(replace=[message]) if self.row.get("replaces") else Step([message])
'''
CHANGES = """
from hybridrl.agents.environments import Environment, Step

class Changes(Environment):
    def reset(self, messages):
        messages[0]["content"] += "!"
        self.row["deep"]["list"].append(1)
        self.config["deep"]["list"].append(1)
        return messages

    def step(self, response):
        return Step(done=True, reward=len(self.row["deep"]["list"]) + len(self.config["deep"]["list"]))
"""
AGENT = """
async def agent(*_):
    raise AssertionError("the runner of this test runs it")
"""


def make_worker(
    tokenizer, tmp_path, limits: EpisodeLimits = LIMITS, loops: str | None = None, **more: object
) -> EpisodeWorker:
    """A worker whose rows run in an agent if there are `agents`, in `loops` of verl, or in the environment."""
    (tmp_path / "reads.py").write_text(ENVIRONMENT)
    (tmp_path / "agent.py").write_text(AGENT)
    kind: dict[str, str] = {"environment": f"{tmp_path}/reads.py:Reads"}
    if "agents" in more:
        kind = {"path": f"{tmp_path}/agent.py", "name": "agent"}
    if loops is not None:
        kind = {"agent_loop_config_path": loops}
    settings = EpisodeSettings(lambda: tokenizer, environments_of(**kind), limits, (tokenizer.eos_token_id,), **more)
    worker = EpisodeWorker.__new__(EpisodeWorker)  # without an actor's log
    worker.begin(settings)
    return worker


def run(
    worker: EpisodeWorker,
    rows: Sequence[dict],
    answer: Callable[[Request], Completion | RequestFault],
    *,
    on_end: Callable[[dict], object] = len,
    sampling: Sampling = SAMPLING,
) -> list[Trajectory]:
    """Run an episode per row; return their ends. `on_end` is called with the tickets of those that have ended."""

    async def collect() -> dict[EpisodeTicket, Trajectory]:
        message, ended = [{"role": "user", "content": "Go."}], {}
        specs = [(n, EpisodeSpec(n, 0, message, row, sampling, 7, n)) for n, row in enumerate(rows)]
        await worker.give("call", pickle.dumps((specs, [])))
        while len(ended) < len(rows):
            turns = []
            for ticket, what in pickle.loads(await worker.take("call")):
                if isinstance(what, Request):
                    turns.append((ticket, answer(what)))
                else:
                    ended[ticket] = what
            on_end(ended)
            await worker.give("call", pickle.dumps(([], turns)))
        return ended

    ended = asyncio.run(asyncio.wait_for(collect(), 60))
    return [ended[ticket] for ticket in range(len(rows))]


def sampled(tokenizer, _: Request) -> Completion:
    ids = np.array([*tokenizer("ok")["input_ids"], tokenizer.eos_token_id])
    return Completion(ids, np.zeros(len(ids), np.float32), False, 1)


@pytest.mark.parametrize("fault", [RejectedRequest("the prompt has the token id 999"), FatalRequest("it died")])
def test_a_turn_that_no_engine_can_sample_costs_its_episode_only(tokenizer, tmp_path, fault):
    worker = make_worker(tokenizer, tmp_path)
    answer = lambda request: fault if (request.prompt, request.turn) == (1, 1) else sampled(tokenizer, request)  # noqa: E731
    first, second, third = run(worker, [{}, {}, {}], answer)
    assert (second.stop, second.fault, second.detail) == ("fault", fault.kind, str(fault))
    assert len(second.turns) == 1 and [len(one.turns) for one in (first, third)] == [2, 2]
    assert first.fault is None and third.fault is None


QUIET = "{% if add_generation_prompt and enable_thinking is false %}{{ '<quiet>' }}{% endif %}"
LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


class Once(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        out = await self.server_manager.generate(request_id="1", prompt_ids=ids, sampling_params=sampling_params)
        return AgentLoopOutput(prompt_ids=ids, response_ids=out.token_ids, response_mask=[1] * len(out.token_ids),
                               num_turns=2, metrics={})
"""


@pytest.mark.parametrize("kind", ["environment", "loop of verl"])
def test_the_column_enable_thinking_of_a_row_holds_for_each_turn_of_its_episode(tokenizer, tmp_path, monkeypatch, kind):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template += QUIET
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "once.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text("- name: once\n  _target_: once.Once\n")
    loop = kind != "environment"
    sections = {"data": {"max_prompt_length": 9, "max_response_length": 9}, "actor_rollout_ref": {"rollout": {}}}
    worker = make_worker(tokenizer, tmp_path, loops=f"{tmp_path}/loops.yaml" if loop else None, configuration=sections)
    prompts: list[str] = []

    def answer(request: Request) -> Completion:
        prompts.append(tokenizer.decode(request.prompt_ids))
        return sampled(tokenizer, request)

    row = {"agent_name": "once"} if loop else {}
    quiet, plain = run(worker, [row | {"enable_thinking": False}, row], answer)
    assert quiet.fault is None and plain.fault is None, (quiet.detail, plain.detail)
    assert sorted(prompt.count("<quiet>") for prompt in prompts) == ([0, 1] if loop else [0, 0, 1, 2])


def test_an_agent_that_ignores_the_fault_of_its_request_is_excluded_too(tokenizer, tmp_path):
    class Runner:
        concurrency = None

        async def run(self, policy, messages, row, *_) -> Trajectory:
            try:
                await policy.generate(Encoded([1, 2]), stop=[""])
            except RequestFault:
                return Trajectory([], "completed", text="", reward=1.0)

    worker = make_worker(tokenizer, tmp_path, agents=lambda kit, check: Runner())
    (ended,) = run(worker, [{}], lambda request: RejectedRequest("stop cannot contain an empty string"))
    assert (ended.stop, ended.fault) == ("fault", "rejected")


def test_what_an_agent_sends_reaches_the_driver_as_plain_values(tokenizer, tmp_path):
    class Text(str): ...

    class Number(int): ...

    class Runner:
        concurrency = None

        async def run(self, policy, messages, row, *_) -> Trajectory:
            await policy.generate(Encoded([Number(1), np.int32(2)]), max_tokens=Number(5), stop=[Text("end")])
            return Trajectory([], "completed", text="")

    requests: list[Request] = []
    worker = make_worker(tokenizer, tmp_path, agents=lambda kit, check: Runner())
    run(worker, [{}], lambda request: requests.append(request) or sampled(tokenizer, request))
    sampling = requests[0].sampling
    assert [type(one) for one in (*requests[0].prompt_ids, *sampling.stop)] == [int, int, str]
    assert sampling.max_tokens == 5


class Watching:
    """A tokenizer that waits with long texts until `free`, and keeps the length of the longest."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self.free, self.longest = tokenizer, threading.Event(), 0

    def __call__(self, text: str, **options):
        self.longest = max(self.longest, len(text))
        if len(text) > 60_000 and not self.free.wait(30):
            raise TimeoutError("no other episode ended meanwhile")
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str):
        return getattr(copy.copy(self.__dict__["_tokenizer"]), name)


@pytest.mark.parametrize(
    "long", [{"text": "a" * 70_000}, {"text": "a" * 70_000, "replaces": True}, {"first": "a" * 70_000}]
)
def test_other_episodes_end_while_a_long_text_is_encoded(tokenizer, tmp_path, long):
    watching = Watching(tokenizer)

    def on_end(ended: dict) -> None:
        if set(ended) >= {1, 2, 3}:
            watching.free.set()

    wide = EpisodeLimits(prompt=100_000, response=100_000, context=200_000)
    worker = make_worker(watching, tmp_path, wide)
    ends = run(worker, [long, {}, {}, {}], partial(sampled, tokenizer), on_end=on_end)
    assert watching.longest > 70_000
    assert [one.fault for one in ends] == [None] * 4 and [len(one.turns) for one in ends] == [2] * 4


@pytest.mark.parametrize(
    ("long", "stop", "fault"),
    [
        ({"text": "a" * 5_000_000}, "context_overflow", None),
        ({"text": "a" * 5_000_000, "replaces": True}, "context_overflow", None),
        ({"first": "a" * 5_000_000}, "fault", "environment"),
    ],
)
def test_a_text_that_cannot_fit_is_never_encoded(tokenizer, tmp_path, long, stop, fault):
    watching = Watching(tokenizer)
    (end,) = run(make_worker(watching, tmp_path), [long], partial(sampled, tokenizer))
    assert (end.stop, end.fault) == (stop, fault)
    assert watching.longest < 10_000


def test_a_text_is_only_left_out_unread_if_no_tokenizer_could_make_it_fit(tokenizer, tmp_path):
    dialogue = make_worker(tokenizer, tmp_path).kit.dialogue
    vocabulary = tokenizer.get_vocab()
    longest = max(map(len, vocabulary))
    text = max(vocabulary, key=lambda token: len(tokenizer.decode([vocabulary[token]])))
    many = [{"role": "user", "content": text * 10_000}]
    assert not dialogue.exceeds(many, 10_000), "each of its tokens may be the longest"
    assert dialogue.exceeds([{"role": "user", "content": "a" * (2 * 10_000 * longest + 1)}], 10_000)
    assert not dialogue.exceeds([{"role": "user", "content": " " * (2 * 10_000 * longest + 1)}], 10_000)


def test_an_environment_changes_its_own_row_messages_and_settings_only(tokenizer, tmp_path):
    worker, prompts = make_worker(tokenizer, tmp_path), []
    (tmp_path / "changes.py").write_text(CHANGES)
    settings = {"environment": f"{tmp_path}/changes.py:Changes", "environment_kwargs": {"deep": {"list": []}}}
    worker.environments = environments_of(**settings)
    answer = lambda request: prompts.append(request.prompt_ids) or sampled(tokenizer, request)  # noqa: E731
    assert [one.reward for one in run(worker, [{"deep": {"list": []}}] * 4, answer)] == [2.0] * 4
    assert all(ids == prompts[0] for ids in prompts)
