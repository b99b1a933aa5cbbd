"""The client of the rollout servers, with servers that generate in this process: every branch, without Ray."""

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import numpy as np
import pytest

from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START
from hybridrl.core.cluster.dispatch import ActorLost, in_lists
from hybridrl.core.rollout import (
    Completion,
    Goal,
    ModeError,
    Request,
    RequestFault,
    RolloutClient,
    RolloutFailure,
    Sampling,
)
from hybridrl.core.rollout.client import ServerState
from hybridrl.core.rollout.engine import RejectedRequest
from hybridrl.core.rollout.suspects import PendingRequest, Suspects
from hybridrl.required import required

SAMPLING = Sampling(max_tokens=4, stop_ids=(0,))


class FakeServer:
    """Responds with [prompt, sample, seed], to the last request first. It dies at `take` once it has returned `dies`
    responses, and hangs if it is to; `well` makes it survive its failure."""

    def __init__(self, number: int = 0, *, dies: int | None = None, hangs: bool = False, well: bool = False) -> None:
        self.number, self.dies, self.hangs, self.well = number, dies, hangs, well
        self.submitted: list[list[tuple[int, int]]] = []
        self.handles: list[object] = []
        self.queue: list[tuple[int, Request]] = []
        self.killed = asyncio.Event()
        self.per_take = 100
        self.most = 0
        self.returned = 0

    def submit(self, requests: list[tuple[int, Request]], goal=None, handles=None) -> None:
        self.handles.append(handles)
        self.submitted.append([(request.prompt, request.sample) for _, request in requests])
        self.queue += requests
        self.most = max(self.most, len(self.queue))

    async def take(self) -> list[tuple[int, Completion]]:
        if self.hangs:
            await self.killed.wait()
            raise ActorLost("the actor was killed", "ray.kill")
        await asyncio.sleep(0)
        if self.dies is not None and self.returned >= self.dies:
            raise ActorLost("Traceback ...\nEngineDeadError", "the engine died")
        finished = [self.queue.pop() for _ in range(min(self.per_take, len(self.queue)))]
        self.returned += len(finished)
        return [(ticket, respond(request)) for ticket, request in finished]

    async def check(self) -> int:
        if not self.well:
            raise ActorLost("dead", "dead")
        return 3 * self.returned

    async def activity(self) -> str:
        return "VLLM::EngineCore (pid 7) stopped (state T)"

    def kill(self) -> None:
        self.killed.set()

    @property
    def given(self) -> list[tuple[int, int]]:
        return [name for call in self.submitted for name in call]


def respond(request: Request) -> Completion:
    tokens = np.array([request.prompt, request.sample, request.seed])
    return Completion(tokens, np.zeros(3, dtype=np.float32), False, 0)


def requests(prompts: int, samples: int = 2) -> list[Request]:
    return [Request(p, s, [p], 10 * p + s, SAMPLING) for p in range(prompts) for s in range(samples)]


def client(servers: list[FakeServer], revive: Callable[[int], FakeServer] | None = None, **options) -> RolloutClient:
    settings = {"capacity": 100, "timeout": 60.0, "retries": 2} | options
    return RolloutClient(servers, revive or (lambda index: FakeServer(10 + index)), **settings)


def rebuilt(made: RolloutClient) -> FakeServer:
    server = made.lanes[0].actor
    assert isinstance(server, FakeServer)
    return server


def expected(wanted: list[Request]) -> list[list[int]]:
    return [[request.prompt, request.sample, request.seed] for request in wanted]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def test_the_servers_are_well_while_one_of_them_can_be_sampled_from():
    async def of(*servers: FakeServer) -> str:
        return await client([*servers]).check()

    well, dead = FakeServer(well=True), FakeServer()
    assert [asyncio.run(of(well, well)), asyncio.run(of(dead, well))] == ["", ""]
    assert "server 0 is dead or does not respond; rollout server 1" in asyncio.run(of(dead, dead))


def test_every_request_gets_its_response_however_they_finish():
    wanted = requests(7, 3)
    servers = [FakeServer(), FakeServer()]
    servers[0].per_take, servers[1].per_take = 1, 2
    assert tokens(client(servers).generate_all(wanted)) == expected(wanted)


def test_samples_of_a_prompt_go_together_to_the_least_loaded_server():
    servers = [FakeServer(), FakeServer()]
    wanted = [*requests(1, 4), *requests(4, 2)[2:]]
    client(servers).generate_all(wanted)
    assert servers[0].given == [(0, 0), (0, 1), (0, 2), (0, 3), (3, 0), (3, 1)]
    assert servers[1].given == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_requests_of_one_turn_of_the_loop_travel_in_one_call_per_server():
    servers = [FakeServer(), FakeServer()]
    client(servers).generate_all(requests(50))
    assert [len(server.submitted) for server in servers] == [1, 1]


def test_no_server_gets_more_prompts_than_its_capacity():
    servers = [FakeServer(), FakeServer()]
    for server in servers:
        server.per_take = 1
    wanted = requests(20, 2)
    assert tokens(client(servers, capacity=4).generate_all(wanted)) == expected(wanted)
    assert [server.most for server in servers] == [5, 5]  # 3 and both samples of one prompt more


async def test_callers_come_and_go_at_any_time():
    made, order = client([FakeServer(), FakeServer()]), []

    async def caller(number: int) -> list[int]:
        await asyncio.sleep(0.001 * (number % 3))
        first = await made.generate(Request(number, 0, [number], number, SAMPLING))
        second = await made.generate(Request(number, 0, [*first.token_ids.tolist(), 5], 100 + number, SAMPLING))
        order.append(number)
        return second.token_ids.tolist()

    found = await asyncio.gather(*map(caller, range(12)))
    assert found == [[number, 0, 100 + number] for number in range(12)]
    assert sorted(order) == list(range(12))


def test_a_caller_that_gives_up_disturbs_nobody():
    made = client([FakeServer()])

    async def two() -> Completion:
        first, second = (made.generate(request) for request in requests(1))
        first.cancel()
        return await second

    assert asyncio.run(two()).token_ids.tolist() == [0, 1, 1]
    assert tokens(made.generate_all(requests(1))) == expected(requests(1))


async def test_responses_that_arrive_together_come_in_one_list():
    server = FakeServer()
    server.per_take = 3

    futures = map(client([server]).generate, requests(4))
    found = [[index for index, _ in arrived] async for arrived in in_lists(futures)]
    assert found == [[7, 6, 5], [4, 3, 2], [1, 0]]


def test_a_round_that_was_abandoned_leaves_nothing_behind():
    server = FakeServer()
    server.per_take = 1
    made, wanted = client([server], capacity=2), requests(4)

    async def abandon() -> None:
        async for _ in in_lists(map(made.generate, wanted)):
            raise ValueError("the scorers are closed")

    with pytest.raises(ValueError, match="the scorers are closed"):
        asyncio.run(abandon())
    server.per_take = 100  # responses of the abandoned round arrive as well
    assert tokens(made.generate_all(wanted)) == expected(wanted)


def test_generating_while_the_engines_sleep_raises():
    made = client([FakeServer()])
    made.available = False
    with pytest.raises(ModeError, match="generate was called while the devices are in training mode"):
        made.generate_all(requests(1))


# Pictures.


def seeing(number: int, *digests: int) -> Request:
    starts = np.arange(len(digests), dtype=np.int32)
    carried = {PICTURE_DIGEST: np.array(digests, np.int64), PICTURE_START: starts}
    return Request(number, 0, [number], number, SAMPLING, carried=carried)


def test_a_call_has_the_handle_of_each_picture_that_its_requests_name_once():
    server, asked = FakeServer(), []

    def handles(digests: Iterable[int]) -> dict[int, str]:
        asked.append(sorted(digests))
        return {digest: f"handle {digest}" for digest in asked[-1]}

    made = client([server], handles=handles)
    wanted = [seeing(0, 5), seeing(1, 6, 5), *requests(3)[4:]]
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert asked[:2] == [[5], [5, 6]] and server.handles == [{5: "handle 5", 6: "handle 6"}]
    made.generate_all(requests(1))
    assert server.handles[1:] == [None], "and a call without pictures is as it always was"


def test_a_rebuilt_server_gets_the_handles_of_what_it_retries():
    made, wanted = (
        client([FakeServer(dies=0)], handles=lambda digests: {digest: digest for digest in digests}),
        seeing(0, 5),
    )
    assert tokens(made.generate_all([wanted])) == expected([wanted])
    assert rebuilt(made).handles == [{5: 5}]


def test_pictures_that_no_store_has_are_an_error():
    with pytest.raises(KeyError, match="5"):
        client([FakeServer()]).generate_all([seeing(0, 5)])


async def test_the_rest_of_an_interrupted_response_has_its_pictures():
    server, request = PatientServer(), seeing(0, 5)
    made = client([server], handles=lambda digests: {digest: digest for digest in digests})
    future = made.generate(request)
    await settled()
    server.step()
    await made.interrupt()
    made.resume()
    await settled()
    server.step(3)
    assert (await future).token_ids.tolist() == [0, 1, 2, 3]
    assert [rest.pictures for rest in server.requests] == [[(5, 0)], [(5, 0)]] and server.handles == [{5: 5}, {5: 5}]


def test_the_same_tokens_with_another_picture_are_not_fatal_with_a_fatal_request():
    suspects, loop = Suspects(), asyncio.new_event_loop()
    fatal, *others = (
        PendingRequest(number, loop.create_future(), replace(seeing(number, digest), prompt_ids=[1, 2]))
        for number, digest in enumerate((5, 5, 6))
    )
    suspects.window, suspects.fatal = 1, [(fatal, "it died")]
    for job in others:
        job.suspect = True
    waiting = deque(others)
    assert suspects.withhold(waiting, []) == [] and [job.request.pictures for job in waiting] == [[(6, 0)]]
    loop.close()


# Lost servers.


def test_what_a_dead_server_had_not_finished_is_retried(caplog):
    dying = FakeServer(dies=3)
    dying.per_take = 1
    revived = []

    def revive(index: int) -> FakeServer:
        revived.append((index, FakeServer()))
        return revived[-1][1]

    made, wanted = client([dying, FakeServer()], revive), requests(8)
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert [index for index, _ in revived] == [0]
    assert (made.restarts, made.retried) == (1, {"died": 5, "memory": 0, "silent": 0})
    assert "rollout server 0 was lost (the engine died); rebuilding it and retrying 5 requests" in caplog.messages


def slowly(seconds: float) -> Callable[[int], FakeServer]:
    """A rebuild of a server that takes so long."""

    def revive(index: int) -> FakeServer:
        time.sleep(seconds)
        return FakeServer()

    return revive


def test_other_servers_take_over_while_one_is_rebuilt():
    healthy, wanted = FakeServer(), requests(4)
    made = client([FakeServer(dies=0), healthy], slowly(0.2))
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert sorted(healthy.given) == [(request.prompt, request.sample) for request in wanted]
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert made.restarts == 1 and rebuilt(made).given, "the rebuild was completed after the first round"


def test_without_another_server_requests_wait_for_the_rebuilt_one():
    made, wanted = client([FakeServer(dies=0)]), requests(3)
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert rebuilt(made).given == [(request.prompt, request.sample) for request in wanted]


@pytest.mark.parametrize(("retries", "count"), [(2, 2), (0, 1), (0, 8)])
def test_a_server_lost_too_often_ends_all_requests_with_the_last_reason(retries, count):
    made = client([FakeServer(dies=0)], lambda index: FakeServer(dies=0), retries=retries)
    message = (
        rf"rollout server 0 was lost {retries + 1} times .*request_retries={retries}\); started again, the run samples "
        r"only the missing responses of the step; the last reason:\nTraceback ...\nEngineDeadError"
    )
    with pytest.raises(RolloutFailure, match=message):
        made.generate_all(requests(count))
    assert (made.restarts, made.load) == (retries, 0)


def test_a_server_that_cannot_be_rebuilt_ends_all_requests():
    def revive(index: int) -> FakeServer:
        raise RuntimeError("no memory left")

    with pytest.raises(RuntimeError, match="no memory left"):
        client([FakeServer(dies=0), FakeServer(hangs=True)], revive).generate_all(requests(4))


def test_a_server_replaced_between_rounds_counts_as_a_restart():
    made, new = client([FakeServer(), FakeServer()]), FakeServer()
    made.replace(1, new)
    wanted = requests(2)
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert made.restarts == 1 and new.given == [(1, 0), (1, 1)]


def test_a_server_that_is_not_revived_gets_nothing_until_it_is_replaced():
    healthy, wanted = FakeServer(), requests(4)
    made, new = client([FakeServer(dies=0), healthy], lambda index: None), FakeServer()
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert sorted(healthy.given) == [(request.prompt, request.sample) for request in wanted]
    assert made.restarts == 0 and made.lanes[0].state is ServerState.WAITING_FOR_WEIGHTS
    made.replace(0, new)
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert made.restarts == 1 and new.given


# Requests at fault.


class Particular(FakeServer):
    """Rejects the requests in `rejected`, and dies of those in `fatal` once it has them, by prompt and sample. It
    returns one response at a time."""

    def __init__(self, fatal: Collection = (), rejected: Collection = ()) -> None:
        super().__init__(well=True)
        self.fatal, self.rejected = fatal, rejected

    async def take(self) -> list[tuple[int, Completion | RequestFault]]:
        await asyncio.sleep(0)
        if any((request.prompt, request.sample) in self.fatal for _, request in self.queue):
            raise ActorLost("Traceback ...\nEngineDeadError", "the engine died")
        ticket, request = self.queue.pop(0)
        rejected = (request.prompt, request.sample) in self.rejected
        return [(ticket, RejectedRequest("no such id") if rejected else respond(request))]


def outcomes(made: RolloutClient, wanted: list[Request]) -> list[list[int] | str]:
    """The response to each request, or the kind of its fault."""

    async def outcome(request: Request) -> list[int] | str:
        try:
            return (await made.generate(request)).token_ids.tolist()
        except RequestFault as fault:
            return fault.kind

    async def gather() -> list[list[int] | str]:
        return await asyncio.gather(*map(outcome, wanted))

    return asyncio.run(gather())


def test_a_request_that_a_server_rejects_fails_alone(caplog):
    made, wanted = client([Particular(rejected=[(1, 0), (3, 1)])]), requests(4)
    expected_, faulty = expected(wanted), {2, 7}
    assert outcomes(made, wanted) == ["rejected" if n in faulty else one for n, one in enumerate(expected_)]
    assert made.restarts == 0
    assert caplog.messages == ["no such id; its episode is excluded"], "the first is reported, the others are counted"


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("fatal", range(8))
def test_a_request_of_which_servers_die_is_found_and_fails_alone(fatal, fixed, servers, caplog):
    wanted = [Request(number, 0, [number], number, SAMPLING) for number in range(8)]
    makes = lambda index: Particular([(fatal, 0)])  # noqa: E731
    made = client([makes(index) for index in range(servers)], makes, fixed=fixed, retries=3)
    assert outcomes(made, wanted) == ["engine died" if n == fatal else one for n, one in enumerate(expected(wanted))]
    assert made.restarts <= 7
    assert outcomes(made, wanted[:fatal]) == expected(wanted[:fatal]), "the others go on at full speed"
    message = r"an engine died \d times during a request with 1 prompt tokens: the engine died; its episode is excluded"
    assert sum(bool(re.fullmatch(message, one)) for one in caplog.messages) == 1


def test_all_samples_of_a_fatal_prompt_fail_and_no_other(caplog):
    fatal, wanted = [(1, sample) for sample in range(6)], requests(3, 6)
    made = client([Particular(fatal)], lambda index: Particular(fatal), retries=3)
    assert outcomes(made, wanted) == ["engine died" if 6 <= n < 12 else one for n, one in enumerate(expected(wanted))]
    assert made.restarts <= 6


@pytest.mark.parametrize("fatal", [(0, 1), (3, 8), (14, 15)])
def test_no_request_is_excluded_in_place_of_another(fatal):
    wanted = [Request(number, 0, [number], number, SAMPLING) for number in range(16)]
    makes = lambda index: Particular([(number, 0) for number in fatal])  # noqa: E731
    made = client([makes(0), makes(1)], makes, retries=3)
    assert outcomes(made, wanted) == ["engine died" if n in fatal else one for n, one in enumerate(expected(wanted))]


def test_a_fatal_request_that_is_alone_fails_after_two_deaths_and_the_next_is_sampled():
    made = client([Particular([(0, 0)])], lambda index: Particular([(0, 0)]))
    assert outcomes(made, requests(1, 1)) == ["engine died"]
    assert outcomes(made, requests(2)[2:]) == expected(requests(2)[2:])
    assert made.restarts == 2


def test_servers_that_die_of_every_request_end_the_run_although_calls_are_short():
    made, ended = client([FakeServer(dies=0)], lambda index: FakeServer(dies=0)), 0
    with pytest.raises(RolloutFailure, match="rollout server 0 was lost 3 times"):
        for prompt in range(3):
            ended += outcomes(made, [Request(prompt, 0, [prompt], 0, SAMPLING)]) == ["engine died"]
            asyncio.run(asyncio.sleep(0.05))
    assert ended == 1


def test_after_one_death_all_requests_run_again_and_after_two_more_and_more_of_them():
    last, wanted = FakeServer(), requests(16)
    last.per_take, second = 1, FakeServer(dies=0)
    replacements = iter([second, last])
    made = client([FakeServer(dies=0)], lambda _: next(replacements), retries=3)
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert [len(call) for call in second.submitted] == [32]
    assert [len(call) for call in last.submitted][:4] == [1, 2, 2, 2], "one more with each response"
    assert made.restarts == 2


async def test_the_fault_of_a_request_costs_no_other_response():
    made = client([Particular(rejected=[(0, 1)])])
    first, rejected, *others = await asyncio.gather(*map(made.generate, requests(2)), return_exceptions=True)
    assert isinstance(rejected, RejectedRequest)
    assert tokens([first, *others]) == [[0, 0, 0], [1, 0, 10], [1, 1, 11]]


# Silence.


class Slow(FakeServer):
    """Returns nothing for 0.5 s; meanwhile its engine samples tokens, if it works."""

    def __init__(self, *, works: bool) -> None:
        super().__init__()
        self.works, self.sampled = works, 0

    async def take(self) -> list[tuple[int, Completion]]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.killed.wait(), 0.5)
        if self.killed.is_set():
            raise ActorLost("the actor was killed", "ray.kill")
        return await super().take()

    async def check(self) -> int:
        if self.killed.is_set():
            raise ActorLost("dead", "dead")
        self.sampled += self.works
        return self.sampled


@pytest.mark.parametrize("dead", [FakeServer(hangs=True), Slow(works=False)], ids=["no reply", "no new tokens"])
def test_a_server_that_samples_nothing_for_too_long_is_killed_and_rebuilt(dead, capsys, caplog):
    made, wanted = client([dead, FakeServer()], timeout=0.1), requests(6)
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert dead.killed.is_set() and made.restarts == 1
    assert made.retried == {"died": 0, "memory": 0, "silent": 6}
    assert "rollout server 0 was lost (killed, as it had sampled no token for 0." in caplog.text
    warning = capsys.readouterr().out.partition("\n")[0]  # log records may follow, if anything shows them
    assert re.fullmatch(
        r"warning: rollout server 0 has sampled no token for 0\.\d+ s, with 6 requests unfinished "
        r"\(actor_rollout_ref\.rollout\.request_timeout=0\.1\); killing it: VLLM::EngineCore \(pid 7\) stopped .*",
        warning,
    )


def test_silence_is_reported_with_the_place_of_the_server_long_before_the_limit(capsys):
    made, wanted = client([Slow(works=False)], timeout=30.0), requests(4)
    made.silent_seconds, made.look_seconds = 0.05, 0.01
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert made.restarts == 0
    reports = capsys.readouterr().out.splitlines()
    assert 3 <= len(reports) <= 4, "after 0.05, 0.1, 0.2 and 0.4 s"
    place = " s, with 8 requests unfinished: VLLM::EngineCore (pid 7) stopped (state T) [server-silent]"
    assert all(line.endswith(place) for line in reports)


def test_a_server_that_samples_is_not_reported_however_long_its_responses_take(capsys):
    made = client([Slow(works=True)], timeout=30.0)
    made.silent_seconds, made.look_seconds = 0.2, 0.01
    made.generate_all(requests(4))
    assert not capsys.readouterr().out


def test_a_server_that_responds_while_it_is_examined_is_not_killed():
    class Examined(Slow):
        responded = asyncio.Event()

        async def take(self) -> list[tuple[int, Completion]]:
            finished = await super().take()
            self.responded.set()
            return finished

        async def activity(self) -> str:
            self.responded.clear()
            await self.responded.wait()
            return "in generate"

    server, wanted = Examined(works=False), requests(2)
    server.per_take = 1
    made = client([server], timeout=0.4)
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert not server.killed.is_set() and made.restarts == 0


def test_a_server_is_hung_however_many_responses_come_from_others():
    class Steady(FakeServer):
        async def take(self) -> list[tuple[int, Completion]]:
            await asyncio.sleep(0.02)
            return await super().take()

    dead, steady = FakeServer(hangs=True), Steady()
    steady.per_take = 1
    made, wanted = client([dead, steady], timeout=0.1), requests(20)
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert dead.killed.is_set() and len(steady.given) == 40, "the other was still at work, and took over"


def test_a_server_whose_first_response_takes_longer_than_the_limit_is_not_killed():
    slow = Slow(works=True)
    made, wanted = client([slow], timeout=0.15), requests(4)
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert made.restarts == 0 and not slow.killed.is_set()


def test_the_time_of_a_rebuild_is_not_silence():
    slow = Slow(works=True)
    made = client([FakeServer(dies=0), slow], slowly(0.4), timeout=0.2)
    made.generate_all(requests(4))
    assert made.restarts == 1 and not slow.killed.is_set()


def test_a_lost_cluster_ends_all_requests():
    def check_cluster() -> None:
        raise ConnectionError("Ray's raylet ended")

    with pytest.raises(ConnectionError, match="raylet"):
        client([FakeServer(hangs=True)], timeout=0.05, check_cluster=check_cluster).generate_all(requests(1))


# full_determinism.


def test_fixed_every_server_gets_its_share_of_the_prompts_at_once_whatever_its_capacity():
    servers = [FakeServer(), FakeServer()]
    client(servers, fixed=True, capacity=1).generate_all(requests(4))
    assert servers[0].submitted == [[(0, 0), (0, 1), (2, 0), (2, 1)]]
    assert servers[1].submitted == [[(1, 0), (1, 1), (3, 0), (3, 1)]]


def test_fixed_a_lost_server_gets_its_whole_share_again():
    dying, new = FakeServer(dies=2), FakeServer()
    dying.per_take = 1
    made, wanted = client([FakeServer(), dying], lambda index: new, fixed=True), requests(4)
    assert tokens(made.generate_all(wanted)) == expected(wanted)
    assert new.submitted == dying.submitted == [[(1, 0), (1, 1), (3, 0), (3, 1)]]
    assert made.retried["died"] == 4
    made.generate_all(wanted)
    assert new.submitted[1:] == [[(1, 0), (1, 1), (3, 0), (3, 1)]]


# Speed.


def test_ten_thousand_requests_cost_little():
    servers = [FakeServer() for _ in range(4)]
    wanted, began = requests(1250, 8), time.process_time()
    client(servers, capacity=256).generate_all(wanted)
    assert time.process_time() - began < 3.0


# Interrupted and continued.


class PatientServer(FakeServer):
    """Samples tokens 0, 1, 2 ... of each request, one for all of them at each `step`; a response has `length` tokens in
    all, counted with those that its prompt already has. `version` is that of its weights."""

    def __init__(self, length: Callable[[Request], int] = lambda request: 4) -> None:
        super().__init__()
        self.length, self.version = length, 0
        self.parts: dict[int, tuple[Request, list[int]]] = {}
        self.requests: list[Request] = []
        self.goals: list[object] = []
        self.handles: list[object] = []
        self.ready: asyncio.Queue | None = None

    def submit(self, requests, goal=None, handles=None) -> None:
        self.ready = self.ready or asyncio.Queue()
        self.goals.append(goal)
        self.handles.append(handles)
        for ticket, request in requests:
            self.requests.append(request)
            self.parts[ticket] = request, []

    def step(self, tokens: int = 1) -> None:
        for _ in range(tokens):
            self._sample_one()

    def _sample_one(self) -> None:
        for ticket, (request, sampled) in list(self.parts.items()):
            sampled.append(request.begun + len(sampled))
            if request.begun + len(sampled) == self.length(request):
                self._end(ticket, interrupted=False)

    def interrupt(self) -> None:
        for ticket in list(self.parts):
            self._end(ticket, interrupted=True)

    def _end(self, ticket: int, *, interrupted: bool) -> None:
        _, sampled = self.parts.pop(ticket)
        log_probs = np.array([-0.1 * token for token in sampled], dtype=np.float32)
        part = Completion(np.array(sampled, dtype=np.int64), log_probs, False, self.version, interrupted)
        required(self.ready).put_nowait((ticket, part))

    async def take(self):
        finished = [await required(self.ready).get()]
        while not required(self.ready).empty():
            finished.append(required(self.ready).get_nowait())
        if None in finished:
            raise ActorLost("dead", "the actor died")
        return finished


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_interrupted_response_is_continued_with_the_version_of_each_token():
    server = PatientServer()
    made = client([server])

    future = made.generate(Request(3, 1, [7, 8], 42, SAMPLING))
    await settled()
    for version in (1, 2):  # interrupted after one token, and after another two
        server.step(version)
        await made.interrupt()
        assert not future.done()
        server.version = version
        made.resume()
        await settled()
    server.step()
    whole = await future
    assert whole.token_ids.tolist() == [0, 1, 2, 3]
    assert list(np.atleast_1d(whole.versions)) == [0, 1, 1, 2]
    assert np.allclose(whole.log_probs, [0.0, -0.1, -0.2, -0.3])
    assert not whole.interrupted
    assert [request.prompt_ids for request in server.requests] == [[7, 8], [7, 8, 0], [7, 8, 0, 1, 2]]
    assert [request.sampling.max_tokens for request in server.requests] == [4, 3, 1]
    assert [request.begun for request in server.requests] == [0, 1, 3]
    assert len({request.seed for request in server.requests}) == 3
    assert made.reprefilled == 3 + 5


@pytest.mark.parametrize("servers", [1, 2])
def test_a_cluster_that_is_lost_while_requests_are_interrupted_is_the_error_that_is_raised(servers):
    """Not the cancellation by which those are ended that wait for the servers."""

    def lost() -> None:
        raise RuntimeError("Ray's raylet ended")

    silent = [PatientServer() for _ in range(servers)]
    for server in silent:
        server.interrupt = lambda: None
    made = client(silent, timeout=0.04, check_cluster=lost)

    async def run() -> None:
        futures = [made.generate(request) for request in requests(servers)]
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="Ray's raylet ended"):
            await made.interrupt()
        assert all(isinstance(future.exception(), RuntimeError) for future in futures)

    asyncio.run(asyncio.wait_for(run(), 10))


async def test_a_response_without_a_token_is_requested_again_as_it_was():
    server = PatientServer()
    made = client([server])

    future = made.generate(Request(0, 0, [7], 42, SAMPLING))
    await settled()
    await made.interrupt()
    made.resume()
    await settled()
    server.step(4)
    await future
    assert server.requests[0] == server.requests[1]
    assert made.reprefilled == 0


def test_a_caller_of_another_loop_is_served_in_between():
    """As a validation is, in which training's requests wait."""
    server = PatientServer()
    made = client([server])
    loop = asyncio.new_event_loop()

    async def begin() -> asyncio.Future:
        future = made.generate(Request(0, 0, [7], 42, SAMPLING))
        await settled()
        server.step()
        await made.interrupt()
        later = made.generate(Request(1, 0, [9], 43, SAMPLING))  # a turn that an environment asks for meanwhile
        await settled()
        assert [request.prompt for request in server.requests] == [0]
        return asyncio.gather(future, later)

    async def validate() -> list[int]:
        server.ready = None
        future = made.generate(Request(0, 0, [1], 1, SAMPLING))
        await settled()
        server.step(4)
        return (await future).token_ids.tolist()

    async def end(both: asyncio.Future) -> list[list[int]]:
        server.ready = None
        made.resume()
        await settled()
        server.step(4)
        return [one.token_ids.tolist() for one in await both]

    both = loop.run_until_complete(begin())
    assert asyncio.run(validate()) == [0, 1, 2, 3]
    assert loop.run_until_complete(end(both)) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    loop.close()


def test_a_goal_holds_for_one_step_only():
    server, goal = PatientServer(), Goal([({0}, 1)])
    made = client([server], fixed=True)

    async def run() -> None:
        await made.interrupt()
        made.generate(Request(0, 0, [7], 42, SAMPLING))
        reached = asyncio.create_task(made.reach([goal]))
        await settled()
        server.interrupt()  # it stops by itself
        await reached

    asyncio.run(run())

    async def other() -> None:
        made.generate(Request(0, 0, [7], 42, SAMPLING))
        await settled()

    server.ready = None
    asyncio.run(other())
    assert server.goals == [goal, None]


async def test_a_server_that_dies_as_it_is_interrupted_loses_no_request():
    server, spare = PatientServer(), PatientServer()
    server.interrupt = lambda: required(server.ready).put_nowait(None)
    made = client([server])

    future = made.generate(Request(0, 0, [7], 42, SAMPLING))
    await settled()
    server.step()
    await made.interrupt()
    made.replace(0, spare)
    made.resume()
    await settled()
    spare.step(4)
    assert (await future).token_ids.tolist() == [0, 1, 2, 3]
    assert [request.begun for request in spare.requests] == [0]
