"""Agents as functions: the same rows as an environment's, rewards, faults, and agents in processes of their own."""

import asyncio
import pickle
import textwrap
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest

from hybridrl.agents.endpoint import agent, app
from hybridrl.agents.endpoint.agent import Agents
from hybridrl.agents.environments.episode_loop import EpisodeRun
from hybridrl.agents.environments.pool import EpisodeDispatch
from hybridrl.agents.environments.worker import DispatchCall, EpisodeSettings, EpisodeSpec, EpisodeWorker, WorkerPolicy
from hybridrl.compat.verl.loops import AgentLoopOutput, VerlLoop
from hybridrl.core.carried import Encoded
from hybridrl.core.experience.trajectory import Trajectory
from hybridrl.core.rollout import Completion, Request, RolloutClient, Sampling, request_seed
from tests.agents.endpoint.conftest import completion_of
from tests.agents.environments.test_worker import QUIET
from tests.agents.environments.test_worker import run as run_episodes
from tests.agents.sections import agent_of, environments_of
from tests.core.rollout.test_client import FakeServer
from tests.integration.agents import Echo, EchoLoop, echo
from tests.rewards.test_pool import wait_until

MESSAGES = [{"role": "user", "content": "Guess."}]
HEAD = """
    from openai import AsyncOpenAI, OpenAI
    async def ask(base_url, api_key, http_client, messages):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        return await client.chat.completions.create(model="policy", messages=messages)
"""
LOOP = """
    async def run(data, *, base_url, api_key, http_client):
        messages = list(data["messages"])
        for _ in range(data["turns"]):
            answer = await ask(base_url, api_key, http_client, messages)
            text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"You said {text}"}]
        return data.get("reward")
"""


class Counting:
    """A policy that responds with a number that depends on the prompt and on how often it was asked."""

    def __init__(self, tokenizer: Any, delay: float = 0.0) -> None:
        self.tokenizer, self.delay, self.asked, self.limits = tokenizer, delay, 0, []

    async def generate(self, prompt: Encoded, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        self.asked += 1
        self.limits.append(max_tokens)
        await asyncio.sleep(self.delay)
        return completion_of(self.tokenizer, f"{self.asked}{sum(prompt.ids)}", max_tokens)


@pytest.fixture
def run(tmp_path, tokenizer, kit_of):
    """Run an agent's code on rows; returns the trajectories."""

    def run(code: str, *rows: dict, policy=None, limits=(), needs_reward=True, **settings: Any) -> list[Trajectory]:
        (tmp_path / "agent.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(code))
        agent = agent_of(**{"path": str(tmp_path / "agent.py"), "name": "run"} | settings)
        agents = Agents(agent, None, None, kit_of(**dict(limits)), needs_reward=needs_reward)

        async def all_of_them():
            episodes = (agents.run(policy or Counting(tokenizer), MESSAGES, row) for row in rows)
            found = await asyncio.gather(*episodes)
            await agents.open.aclose()
            return found

        return asyncio.run(all_of_them())

    return run


def assert_equal_rows(found: Trajectory, expected: Trajectory, *more: str) -> None:
    ((one,), (other,)) = expected.rows(), found.rows()
    for name in ("prompt_ids", "response_ids", "log_probs", "mask", *more):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_an_agent_gives_the_rows_of_the_same_loop_as_an_environment(run, tokenizer, kit_of):
    row, asked, by_agent = {"turns": 3, "reward": 0.5}, Counting(tokenizer), Counting(tokenizer)
    expected = asyncio.run(EpisodeRun(kit_of(), asked, Echo({}, row)).run(MESSAGES))
    (found,) = run(LOOP, row, policy=by_agent)
    assert_equal_rows(found, expected, "rewards")
    assert (found.reward, found.stop, found.fault, found.text) == (0.5, "completed", None, expected.text)
    assert list(found.messages) == list(expected.messages) and asked.limits == by_agent.limits


def test_the_column_enable_thinking_of_a_row_holds_in_its_session(run, tokenizer):
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template += QUIET
    rows = {"turns": 2, "reward": 1.0, "enable_thinking": False}, {"turns": 2, "reward": 1.0}
    found = run(LOOP, *rows, limits={"tokenizer": tokenizer})
    texts = [tokenizer.decode([*one.rows()[0].prompt_ids, *one.rows()[0].response_ids]) for one in found]
    assert [text.count("<quiet>") for text in texts] == [2, 0]


def test_an_agent_loop_of_verl_gives_the_rows_of_the_same_loop_as_an_environment(tokenizer, kit_of):
    row, kit = {"turns": 3, "reward": 0.5}, kit_of()
    expected = asyncio.run(EpisodeRun(kit, Counting(tokenizer), Echo({}, row)).run(MESSAGES))
    sections = {"actor_rollout_ref": {"rollout": {}}, "data": {"max_prompt_length": 64, "max_response_length": 64}}
    loop = VerlLoop(EchoLoop, {}, row).run(Counting(tokenizer), MESSAGES, tokenizer, sections, {}, kit.dialogue)
    found = VerlLoop.trajectory(asyncio.run(loop), np.array([3]), tokenizer)
    assert_equal_rows(found, expected)
    assert (found.reward, len(found.turns), found.text) == (0.5, 3, expected.text)


def test_tokens_of_an_agent_loop_have_the_versions_of_their_weights(tokenizer):
    rows = [AgentLoopOutput(prompt_ids=[1], response_ids=[2, 3, 4, 5], response_mask=[1, 1, 0, 1], metrics={})]
    rows[0].response_logprobs = [-0.5] * 4
    found = VerlLoop.trajectory(rows, np.array([3, 4, 5]), tokenizer)
    assert [turn.token_versions.tolist() for turn in found.turns] == [[3, 4], [5]]
    fewer = VerlLoop.trajectory(rows, np.array([4, 3, 4, 5]), tokenizer)  # the loop left out some that were sampled
    assert [turn.token_versions.tolist() for turn in fewer.turns] == [[3, 3], [3]]


def test_rewards_by_completion_are_those_of_its_turns(run):
    code = """
        async def run(data, **endpoint):
            first = await ask(messages=data["messages"], **endpoint)
            history = [*data["messages"], first.choices[0].message.model_dump(exclude_none=True)]
            second = await ask(messages=[*history, {"role": "user", "content": "Again."}], **endpoint)
            return {first.id: 0.25, second.id: 1}
    """
    (found,) = run(code, {}, turn_discount=0.5)
    assert [turn.reward for turn in found.turns] == [0.25, 0.5] and found.reward == 0.75


@pytest.mark.parametrize("returned", ["float('nan')", "'good'", "10**400", "{first.id: float('inf')}", "[1.0]"])
def test_a_returned_reward_that_is_no_finite_number_is_a_fault_with_the_agent(run, returned):
    code = f"""
        async def run(data, **endpoint):
            first = await ask(messages=data["messages"], **endpoint)
            return {returned}
    """
    (found,) = run(code, {})
    assert (found.fault, found.reward) == ("environment", None)
    assert "agent.py:run is not a finite number: it returned" in found.detail


def test_an_agent_may_set_rewards_through_the_endpoint(run):
    code = """
        async def run(data, *, base_url, api_key, http_client):
            await ask(base_url, api_key, http_client, data["messages"])
            place, key = base_url.removesuffix("/v1") + "/rl/set_reward", {"Authorization": f"Bearer {api_key}"}
            (await http_client.post(place, json={"reward": 0.75}, headers=key)).raise_for_status()
    """
    (found,) = run(code, {})
    assert found.reward == 0.75 and found.fault is None


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (LOOP, "no reward"),
        ("async def run(data, **endpoint): return 1.0", "no turns"),
        ("async def run(data, **endpoint): raise KeyError('gone')", "raised:KeyError"),
        ("def other(): pass", "raised:ConfigError"),
    ],
)
def test_an_episode_that_says_nothing_of_the_policy_is_excluded_by_name(run, code, fault):
    (found,) = run(code, {"turns": 1})
    assert (found.fault, found.stop) == (fault, "fault") and found.detail


def test_with_a_reward_function_an_agent_needs_no_reward(run):
    (found,) = run(LOOP, {"turns": 2}, needs_reward=False)
    assert found.reward is None and found.fault is None and "You said" in found.text


def test_an_agent_that_does_not_handle_a_full_context_ends_with_it(run):
    code = """
        async def run(data, *, base_url, api_key, http_client):
            await ask(base_url, api_key, http_client, data["messages"])
            post = {"json": {"reward": 1}, "headers": {"Authorization": f"Bearer {api_key}"}}
            await http_client.post(base_url.removesuffix("/v1") + "/rl/set_reward", **post)
            await ask(base_url, api_key, http_client, [*data["messages"], {"role": "user", "content": "x" * 300}])
    """
    (found,) = run(code, {}, limits={"context": 200})
    assert (found.stop, found.fault, found.reward) == ("context_overflow", None, 1.0)


def test_an_agent_is_stopped_at_the_time_limit_of_an_episode(run, tokenizer):
    began = time.monotonic()
    (found,) = run(LOOP, {"turns": 1, "reward": 1.0}, policy=Counting(tokenizer, delay=30), limits={"timeout": 0.5})
    assert (found.fault, time.monotonic() - began < 10) == ("no turns", True)


@pytest.mark.parametrize(("mode", "seconds"), [("inline", 0.5), pytest.param("process", 6, marks=pytest.mark.slow)])
def test_the_time_limit_of_an_agent_does_not_count_how_long_the_policy_is_held(run, tokenizer, mode, seconds):
    limits, policy = {"timeout": seconds, "held": True}, Counting(tokenizer, delay=seconds + 0.3)
    (found,) = run(LOOP, {"turns": 1, "reward": 1.0}, policy=policy, limits=limits, mode=mode)
    assert (found.fault, found.stop, found.reward) == (None, "completed", 1.0)


def test_plain_functions_and_classes_are_agents(run):
    plain = """
        def run(data, *, base_url, api_key, http_client):
            client = OpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
            client.chat.completions.create(model="policy", messages=data["messages"])
            return 1.0
    """
    kind = """
        class Solver:
            async def run(self, data, **endpoint):
                await ask(messages=data["messages"], **endpoint)
                return 2.0
    """
    assert [run(plain, {})[0].reward, run(kind, {}, name="Solver")[0].reward] == [1.0, 2.0]


def test_requests_of_one_agent_at_the_same_time_are_sampled_one_after_another(run, tokenizer):
    class Single(Counting):
        running = 0

        async def generate(self, *arguments, **options):
            assert not self.running
            self.running += 1
            completion = await super().generate(*arguments, **options)
            self.running -= 1
            return completion

    code = """
        import asyncio
        async def run(data, **endpoint):
            await asyncio.gather(*(ask(messages=data["messages"], **endpoint) for _ in range(3)))
            return 1.0
    """
    (found,) = run(code, {}, policy=Single(tokenizer, delay=0.01))
    assert found.fault is None and len(found.rows()) == 3


def test_an_agent_in_a_process_of_its_own_has_openais_variables(run):
    code = """
        import os, sys
        def run(data, *, base_url, api_key, http_client):
            print("this is no result")
            assert (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]) == (base_url, api_key)
            assert "torch" not in sys.modules
            if data["fails"]:
                raise ValueError("no idea")
            OpenAI(http_client=http_client).chat.completions.create(model="policy", messages=data["messages"])
            return 1.0
    """
    good, bad = run(code, {"fails": False}, {"fails": True}, mode="process")
    assert good.reward == 1.0 and good.fault is None
    assert bad.fault == "raised:RuntimeError" and "ValueError: no idea" in bad.detail


FORKS = """
    import os, subprocess, sys, time
    def run(data, *, base_url, api_key, http_client):
        for end in data["ends"]:
            if end == "session": subprocess.Popen(["sleep", "600"], start_new_session=True)
            elif os.fork() == 0:
                match end:
                    case "exit": sys.exit(0)
                    case "raise": raise ValueError
                    case "return": return -1.0
                    case "stay": time.sleep(600)
        OpenAI(http_client=http_client).chat.completions.create(model="policy", messages=data["messages"])
        return 1.0
"""


def test_an_agent_in_a_process_of_its_own_may_fork_and_leaves_nothing(run, started):
    found = run(FORKS, {"ends": ["exit", "raise", "return", "stay", "session"]}, {"ends": []}, mode="process")
    assert [(one.fault, one.reward) for one in found] == [(None, 1.0)] * 2
    assert wait_until(lambda: not started())


def test_an_agent_changes_its_own_row_and_messages_only(run):
    code = """
        async def run(data, **endpoint):
            data["extra"]["seen"].append(1)
            data["messages"][0]["content"] += "!"
            await ask(messages=data["messages"], **endpoint)
            return float(len(data["extra"]["seen"]) + data["messages"][0]["content"].count("!"))
    """
    row = {"extra": {"seen": []}}
    assert [one.reward for one in run(code, row, row, row)] == [2.0] * 3
    assert row == {"extra": {"seen": []}} and MESSAGES[0]["content"] == "Guess."


OWNER = {"Authorization": "Bearer secret"}


@pytest.fixture
def online(kit_of):
    """Agents outside the run, and a client of their endpoint: `async with online() as (agents, client)`."""

    @asynccontextmanager
    async def serve(**limits: Any) -> AsyncIterator[tuple[Agents, httpx.AsyncClient]]:
        agents = Agents(agent_of(mode="online", port=0), 64, "secret", kit_of(**limits))
        async with httpx.AsyncClient(base_url=await agents.start(), trust_env=False, timeout=30) as client:
            yield agents, client
        await agents.open.aclose()

    return serve


def key_of(taken: httpx.Response) -> dict[str, Any]:
    """The headers of an agent that has taken an episode."""
    return {"headers": {"Authorization": f"Bearer {taken.json()['api_key']}"}}


async def test_agents_outside_the_run_take_its_episodes_and_end_them(tokenizer, online):
    rows = [{"turns": 2, "reward": 0.5, "array": np.arange(3)}, {"turns": 1, "reward": 1.0, "file": b"\xff"}]

    async def outside(client: httpx.AsyncClient) -> dict[str, Any]:
        taken = await client.post("/rl/start_session", headers=OWNER)
        row, own = taken.json()["row"], key_of(taken)
        await echo(row, base_url=f"{client.base_url}/v1", api_key=taken.json()["api_key"], http_client=None)
        await client.post("/rl/set_reward", json={"reward": row["reward"]}, **own)
        return (await client.post("/rl/end_session", **own)).json() | {"row": row}

    async with online() as (agents, client):
        refused = await client.post("/rl/start_session", headers={"Authorization": "Bearer other"})
        episodes = asyncio.gather(*(agents.run(Counting(tokenizer), MESSAGES, row) for row in rows))
        ended = await asyncio.gather(outside(client), outside(client))
        found = await episodes
        with mock.patch.object(agent, "CLAIM_SECONDS", 0.1):
            none_left = await client.post("/rl/start_session", headers=OWNER)
    assert [(one.reward, len(one.turns), one.fault) for one in found] == [(0.5, 2, None), (1.0, 1, None)]
    assert [one["row"].get("array") for one in ended] == [[0, 1, 2], None] and ended[0]["row"]["messages"] == MESSAGES
    assert ended[1]["row"]["file"] == "_w=="  # in base64
    assert (refused.status_code, none_left.status_code, none_left.json()["error"]["code"]) == (401, 429, "no_episode")


async def test_an_episode_whose_agent_never_ends_it_has_a_time_limit_from_when_it_was_taken(tokenizer, online):
    async with online(timeout=0.2) as (agents, client):
        episode = asyncio.create_task(agents.run(Counting(tokenizer), MESSAGES, {}))
        await asyncio.sleep(0.5)
        assert not episode.done()
        await client.post("/rl/start_session", headers=OWNER)
        found = await episode
    assert found.fault == "no turns"


@pytest.mark.parametrize("how", ["disconnects", "is ended by the owner"])
async def test_an_episode_whose_agent_is_lost_does_not_wait_for_its_time_limit(tokenizer, online, monkeypatch, how):
    monkeypatch.setattr(app, "LOST_SECONDS", 0.1)
    async with online(timeout=60) as (agents, client):
        episode = asyncio.create_task(agents.run(Counting(tokenizer, delay=0.5), MESSAGES, {}))
        taken = await client.post("/rl/start_session", headers=OWNER)
        if how == "disconnects":
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json={"messages": MESSAGES}, timeout=0.1, **key_of(taken))
        else:
            named = {"session_id": taken.json()["session_id"]}
            assert (await client.post("/rl/end_session", json=named, headers=OWNER)).status_code == 200
        found = await asyncio.wait_for(episode, 30)
    assert found.fault == "no turns"


@pytest.mark.parametrize("late", [False, True])
async def test_an_episode_whose_agent_sends_no_request_is_given_to_another(tokenizer, online, monkeypatch, late):
    monkeypatch.setattr(agent, "UNUSED_SECONDS", 0.3)
    monkeypatch.setattr(agent, "CLAIM_SECONDS", 1.0)
    async with online() as (agents, client):
        episode = asyncio.create_task(agents.run(Counting(tokenizer), MESSAGES, {}))
        taken = [await client.post("/rl/start_session", headers=OWNER)]
        if late:
            await asyncio.sleep(0.5)  # it may still begin, and keeps the episode
        else:
            taken.append(await client.post("/rl/start_session", headers=OWNER))
        keys = [key_of(one) for one in taken]
        asked = [await client.post("/v1/chat/completions", json={"messages": MESSAGES}, **key) for key in keys]
        taken.append(await client.post("/rl/start_session", headers=OWNER))
        await client.post("/rl/set_reward", json={"reward": 1}, **keys[-1])
        await client.post("/rl/end_session", **keys[-1])
        found = await asyncio.wait_for(episode, 30)
    assert [one.status_code for one in taken] == [200, *([] if late else [200]), 429]
    assert [one.status_code for one in asked] == ([200] if late else [401, 200])
    assert (found.reward, found.fault, len(found.turns)) == (1.0, None, 1)
    assert len({one.json().get("session_id") for one in taken[:-1]}) == 1


async def test_a_request_that_is_open_when_its_episode_ends_is_answered(tokenizer, online):
    async with online() as (agents, client):
        episode = asyncio.create_task(agents.run(Counting(tokenizer, delay=60), MESSAGES, {}))
        taken = await client.post("/rl/start_session", headers=OWNER)
        chat = client.post("/v1/chat/completions", json={"messages": MESSAGES}, **key_of(taken))
        asked = asyncio.create_task(chat)
        while not agents.policies[taken.json()["session_id"]].tasks:
            await asyncio.sleep(0.01)
        await client.post("/rl/end_session", **key_of(taken))
        await episode
        reply = await asked
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "session_closed")


@pytest.fixture
def worker(tmp_path, tokenizer, kit_of) -> EpisodeWorker:
    """What runs episodes in a process, with an agent for rows that name nothing else; two run at a time."""
    (tmp_path / "agent.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(LOOP))
    path, limits, ends = str(tmp_path / "agent.py"), kit_of().limits, (tokenizer.eos_token_id,)
    agents = partial(Agents, agent_of(path=path), 2, None)
    settings = EpisodeSettings(lambda: tokenizer, environments_of(path=path), limits, ends, agents=agents)
    worker = object.__new__(EpisodeWorker)  # without what its process needs
    worker.begin(settings)
    return worker


class Holding(FakeServer):
    """A rollout server that responds once it may."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.may = asyncio.Event()

    async def take(self) -> list:
        await self.may.wait()
        return await super().take()


def driver_of(worker: EpisodeWorker, client: RolloutClient) -> EpisodeDispatch:
    """The driver of a process of episodes that is this one."""

    def here(method):
        return SimpleNamespace(remote=lambda *given: asyncio.ensure_future(method(*given)))

    actor = mock.Mock(take=here(worker.take), give=here(worker.give), end=here(worker.end))
    workers = SimpleNamespace(actors=[actor], limit_of=lambda actor: 60, starting=set(), logs=["log"])
    return EpisodeDispatch(workers, check=client.check)


@pytest.mark.parametrize("well", [True, False])
async def test_the_health_of_a_run_is_that_of_its_engines_and_fine_while_the_policy_is_trained(worker, well):
    server = Holding(well=well)
    client, sampling = RolloutClient([server], FakeServer, capacity=9, timeout=60, retries=2), Sampling(4, (0,))
    spec = EpisodeSpec(0, 0, MESSAGES, {"turns": 1, "reward": 1.0}, sampling, 1, "key")
    async with httpx.AsyncClient(base_url=await worker.agents.start(), trust_env=False) as http:
        found = [await http.get("/health")]
        dispatch = driver_of(worker, client)
        (ended,) = dispatch.start([spec], client.generate)
        while not server.submitted and not ended.done():
            await asyncio.sleep(0.01)
        found += await asyncio.gather(http.get("/health"), http.get("/health"))
        server.may.set()
        trajectory = await ended
        found.append(await http.get("/health"))
        dispatch.close()
    await worker.agents.open.aclose()
    assert [one.status_code for one in found] == [200, *[200 if well else 503] * 2, 200] and trajectory.reward == 1.0
    if not well:
        assert found[1].json()["status"].endswith("sampled from: rollout server 0 is dead or does not respond")


@pytest.mark.parametrize(("columns", "turns"), [({}, 2), ({"agent_name": "single_turn_agent"}, 1)])
def test_rows_that_name_nothing_else_run_in_the_agent(worker, tokenizer, columns, turns):
    seeds = []

    def answer(request: Request) -> Completion:
        seeds.append(request.seed)
        return completion_of(tokenizer, "yes")

    (found,) = run_episodes(worker, [{"turns": 2, "reward": 1.0} | columns], answer)
    assert len(found.turns) == turns and found.fault is None
    assert seeds == [request_seed(7, 0, 0, *([turn] if turn else [])) for turn in range(turns)]


async def test_no_more_agents_of_a_call_run_at_a_time_than_are_allowed(worker, tokenizer):
    sampling = Sampling(max_tokens=50, stop_ids=(tokenizer.eos_token_id,))
    specs = [EpisodeSpec(0, sample, MESSAGES, {"turns": 1}, sampling, 1, "key") for sample in range(4)]

    async def asking(name: str) -> list[int]:
        return [ticket for ticket, _ in pickle.loads(await worker.take(name))]

    await worker.give("held", pickle.dumps((list(enumerate(specs)), [])))
    asked = await asking("held")
    asked += await asking("held") if len(asked) < 2 else []
    assert len(asked) == 2
    await worker.give("other", pickle.dumps(([(0, specs[0])], [])))  # does not wait for those that are held
    assert await asking("other") == [0]
    await worker.give("held", pickle.dumps(([], [(asked[0], completion_of(tokenizer, "yes"))])))
    (ended, *more), seen = await asking("held"), set(asked)
    seen |= {*more, *([] if more else await asking("held"))}
    assert ended == asked[0] and len(seen) == 3
    await worker.end("held")
    await worker.end("other")


def test_the_texts_that_end_a_turn_are_those_of_the_run_and_of_the_request(worker, tokenizer):
    asked = []

    class Call(DispatchCall):
        async def ask(self, ticket, request):
            asked.append(request.sampling)
            return completion_of(tokenizer, "yes")

    sampling = Sampling(max_tokens=50, stop_ids=(tokenizer.eos_token_id,), stop=("</search>",))
    policy = WorkerPolicy(worker.kit, Call(), 7, EpisodeSpec(0, 0, MESSAGES, {}, sampling, 1, "key"), sampling)
    asyncio.run(policy.generate(Encoded([1, 2]), max_tokens=9, stop=("</answer>",)))
    assert [(one.stop, one.max_tokens) for one in asked] == [(("</search>", "</answer>"), 9)]
