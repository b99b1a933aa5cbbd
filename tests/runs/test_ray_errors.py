"""What a run does with every error that Ray has, wherever one arrives: it restarts or rebuilds by name.

Ray is a stand-in whose calls fail; the callers are those of a run."""

import asyncio
import inspect
import os
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from types import SimpleNamespace

import pytest
from ray import exceptions
from ray.exceptions import RayError, RayTaskError

from hybridrl.agents.environments.pool import EpisodeDispatch
from hybridrl.checkpoint.saver import Save, SavePlan, Saver, SaveTimes
from hybridrl.checkpoint.store import SaveFailed, Store
from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.core.cluster import Group, OutOfMemory, WorkerDied, gather
from hybridrl.core.cluster.dispatch import ActorLost
from hybridrl.core.hybrid_engine import HybridEngine
from hybridrl.core.rollout import Request, RolloutClient
from hybridrl.core.rollout.fleet import RolloutFleet
from hybridrl.core.rollout.ladder import MemoryLadder
from hybridrl.core.training.worker import TrainWorker
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.required import required
from hybridrl.rewards.actors import RemoteScorer, ReplacedActor
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.process import ScorerDied
from hybridrl.rewards.score import ScoringRequest
from hybridrl.runs.attempts import with_restarts
from hybridrl.runtime import stacks
from hybridrl.tracking.faults import code_of
from tests.core.cluster.test_group import Call, FakeRay, replace_ray
from tests.core.rollout.test_client import SAMPLING, respond
from tests.core.rollout.test_ladder import Section
from tests.core.test_hybrid_engine import Fleet, Ranks, Sync
from tests.sections import keys_of_run

ROWS = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
MONITOR = (
    "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.7) where the task was "
    "running was 62.0GB / 64GB (0.97), which exceeds the memory usage threshold of 0.95."
)
TASK = '\x1b[36mray::Worker.work()\x1b[39m\n  File "worker.py", line 3, in work\nValueError: no such row'


def made(kind: type[RayError]) -> RayError:
    """Make an error as Ray does, whatever its constructor takes."""
    if kind is exceptions.OutOfMemoryError:
        return kind(MONITOR)
    if kind is exceptions.ActorDiedError:
        return kind()
    if kind is exceptions.CrossLanguageError:
        return kind(SimpleNamespace(language=1, formatted_exception_string="a Java exception"))
    needed = [
        parameter.name
        for parameter in list(inspect.signature(kind.__init__).parameters.values())[1:]
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return kind(*(None if name in ("actor_id", "owner_address") else f"some {name}" for name in needed))


KINDS = sorted(
    (
        kind
        for kind in vars(exceptions).values()
        if isinstance(kind, type) and issubclass(kind, RayError) and not issubclass(kind, RayTaskError)
    ),
    key=lambda kind: kind.__name__,
)
ERRORS = [pytest.param(made(kind), id=kind.__name__) for kind in KINDS]
ERRORS += [
    pytest.param(RayTaskError("work", TASK, made(kind)), id=f"an argument: {kind.__name__}")
    for kind in (exceptions.ObjectLostError, exceptions.OwnerDiedError)
]
every_error = pytest.mark.parametrize("error", ERRORS)
CALLS = ["update_policy", "update_critic", "forward", "offload", "load"]


class Actor:
    """An actor each of whose calls fails."""

    def __init__(self, error: RayError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *_, **__: Failing(error=self.error))


class Failing(Call):
    """A call that fails; it can be awaited as well."""

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        raise self.error


@pytest.fixture(autouse=True)
def ray(monkeypatch) -> None:
    replace_ray(monkeypatch, FakeRay())


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> PPOConfig:
    """A run that is restarted once."""
    directory = tmp_path_factory.mktemp("run")
    more = [f"trainer.default_local_dir={directory}", "trainer.max_restarts=1", f"{ROWS}=8"]
    return load_ppo_config([*keys_of_run(directory), *more])


def attempts(config: PPOConfig, fail: Callable[[], object]) -> int:
    """Count the attempts of a run whose first attempt fails so."""
    made: list[int] = []

    def attempt(_: object) -> None:
        made.append(1)
        if len(made) == 1:
            fail()

    with_restarts(attempt, deepcopy(config))
    return len(made)


@every_error
def test_a_call_of_the_training_ranks_that_gave_no_result_restarts_the_run(config, capsys, error):
    group = Group([Actor(error), Actor(error)], "train worker", ["/run/logs/train-0.log", "/run/logs/train-1.log"])
    for call in CALLS:
        assert attempts(config, lambda call=call: group.broadcast(getattr(TrainWorker, call), timeout=1)) == 2
        text = capsys.readouterr().out
        assert f"train worker.{call}: " in text and "train-0" in text and "Traceback" not in text


@every_error
def test_the_failure_has_a_typed_cause(error):
    with pytest.raises(WorkerDied) as raised:
        gather([Failing(error=error)], "train worker.update_policy", 1, ["/run/logs/train-3.log"])
    cause, root = raised.value.cause, error.cause if isinstance(error, RayTaskError) else error
    assert (required(cause).actor, required(cause).kind, required(cause).lost) == ("train-3", type(root).__name__, True)
    assert required(cause).text and "\n" not in required(cause).text
    assert (
        required(cause).out_of_memory
        is isinstance(root, exceptions.OutOfMemoryError)
        is isinstance(raised.value, OutOfMemory)
    )


def test_an_end_by_a_full_object_store_and_disk_has_the_code_of_a_full_disk():
    with pytest.raises(WorkerDied) as raised:
        gather([Failing(error=made(exceptions.OutOfDiskError))], "train worker.log_probs", 1)
    assert code_of(raised.value) == "disk-full"


def test_what_the_memory_monitor_kills_lowers_the_micro_batches_and_the_largest_processes_are_named(
    config, capsys, monkeypatch
):
    monkeypatch.setattr(stacks, "LARGEST", 10**6)  # this process may not be among the five largest
    group = Group([Actor(made(exceptions.OutOfMemoryError))], "train worker", ["/run/logs/train-0.log"])

    def fail() -> None:
        try:
            group.broadcast(TrainWorker.update_policy, timeout=1)
        except OutOfMemory as error:
            assert code_of(error) == "host-memory"
            error.tokens = 900
            raise

    lowered: list[dict] = []

    def attempt(adjusted: dict) -> None:
        lowered.append(dict(adjusted))
        if len(lowered) == 1:
            fail()

    with_restarts(attempt, deepcopy(config))
    assert lowered == [{}, {ROWS: [8, 4]}]
    text = capsys.readouterr().out
    assert "the process of train-0 died: Task was killed due to the node running low on memory" in text
    assert "the largest processes of the driver's machine now:" in text and "GiB" in text
    assert text.count("(pid ") > 1 and f" of this run (pid {os.getpid()})" in text


@every_error
def test_a_weight_sync_that_lost_a_server_rebuilds_it(error):
    calls: list[str] = []
    fleet = Fleet(calls)
    sync = Sync(calls, fleet)
    engine = HybridEngine(Ranks(calls), fleet, sync, timeout=1.0)
    servers, publish = Group([Actor(error)], "rollout server", ["/run/logs/rollout-0.log"]), sync.publish

    def lose_one(version: int) -> None:
        sync.publish, fleet.dead = publish, servers.failures(TrainWorker.offload, timeout=1)
        servers.broadcast(TrainWorker.offload, timeout=1)

    sync.publish = lose_one
    engine.to_rollout(1)
    assert "rebuild 0 asleep" in calls and calls[-1] == "verify"


class Server:
    """A server that responds to everything."""

    def submit(self, requests, goal=None) -> None:
        self.requests = requests

    async def take(self):
        return [(ticket, respond(request)) for ticket, request in self.requests]

    async def check(self) -> int:
        return 0


@every_error
def test_a_rollout_server_whose_responses_are_lost_is_rebuilt_whether_or_not_it_responds(error, monkeypatch):
    """With less memory if that is why it was killed."""
    fleet = RolloutFleet.__new__(RolloutFleet)
    fleet.rollout = Section()
    fleet.ladder = MemoryLadder(fleet.rollout, "cpu")
    fleet.built_with, fleet.oom_kills = {0: fleet.ladder.settings}, {0: 0}
    fleet.servers = SimpleNamespace(actors=[Actor(error)], logs=["/run/logs/rollout-0.log"])
    handle, rebuilt = fleet.handle(0), []

    async def well() -> int:
        return 7

    handle.check = well

    def revive(index: int) -> Server:
        rebuilt.append(index)
        return Server()

    client = RolloutClient([handle], revive, capacity=8, timeout=60.0, retries=2)
    (completion,) = client.generate_all([Request(0, 0, [1], 5, SAMPLING)])
    assert completion.token_ids.tolist() == [0, 0, 5] and rebuilt == [0]
    lacked = isinstance(error, exceptions.OutOfMemoryError)
    assert fleet.rollout.max_num_seqs == (128 if lacked else 256)
    assert client.retried == {"died": not lacked, "memory": lacked, "silent": 0}
    with pytest.raises(ActorLost) as lost:
        asyncio.run(handle.take())
    first, *table = str(lost.value).splitlines()
    assert first.startswith("rollout server 0 gave no result: ") or "the process of rollout server 0 died: " in first
    assert first.endswith("; its log: /run/logs/rollout-0.log") and bool(table) == lacked


@every_error
def test_a_scoring_actor_that_is_lost_ends_the_attempt_and_no_response_counts_as_a_fault(config, error):
    def score() -> None:
        actor = ReplacedActor(lambda: Actor(error), 1, "/run/logs/scoring-0.log")
        with ScorerPool(config.reward, scorers=[RemoteScorer(actor, 0, config.reward)]) as pool:
            futures: list[Future] = pool.submit([ScoringRequest("test", "4", "4", {})])
            futures[0].result(timeout=10)

    assert attempts(config, score) == 2


def test_a_scoring_actor_that_is_killed_for_lack_of_memory_is_replaced_once(config):
    actors = iter([Actor(made(exceptions.OutOfMemoryError)), Actor(made(exceptions.OutOfMemoryError))])
    with pytest.raises(ScorerDied, match=r"(?s)running low on memory.*all of this run: "):
        RemoteScorer(ReplacedActor(lambda: next(actors), 1, "/run/logs/scoring-0.log"), 0, config.reward).start()
    assert not [*actors]


class Models:
    """Models of which a save begins, and none is written."""

    updates_begun = 0

    def __init__(self, group: Group, late: bool) -> None:
        self.workers, self.late = TrainWorkers(group, RankPlan({}, None), "float32", 60.0), late

    def start_save(self, *arguments: object) -> None:
        if not self.late:
            self.workers.start_save(*arguments)

    def finished_save(self) -> bool:
        return self.workers.finished_save()


@every_error
@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_is_lost_in_a_save_is_the_cause_of_its_failure(tmp_path, error, late):
    """A run restarts for it, if no other call was lost before (tests/core/test_trainer.py)."""
    group = Group([Actor(error)], "train worker", ["/run/logs/train-0.log"])
    times = SaveTimes(1, None, None, None)
    plan = SavePlan({"actor": ["model"]}, times, lambda path: None, "", {})
    store = Store(tmp_path)
    saver = Saver(Models(group, late), store, plan, {}, SimpleNamespace(state_dict=dict))
    saver.completed(1, {}, "")
    saver.start(Save.KEPT)
    saver.finish()
    saver.close()
    store.close()
    assert isinstance(saver.failed, SaveFailed) and isinstance(saver.failed.__cause__, WorkerDied)


@every_error
async def test_an_episode_worker_that_is_lost_is_replaced_and_its_episodes_run_again(error):
    replaced: list[int] = []

    class Workers:
        logs, actors, starting = ["/run/logs/episodes-0.log"], [Actor(error)], set()

        def limit_of(self, actor: Actor) -> float:
            return 60.0

        def replacement(self, index: int, lost: object) -> Actor:
            replaced.append(index)
            return self.actors[0]

    dispatch = EpisodeDispatch(Workers())
    (ended,) = dispatch.start([None], lambda request: None)
    assert (await ended).fault == "died"  # as it is lost in the same environment a second time
    dispatch.close()
    assert replaced == [0, 0]


def test_sharing_rows_with_a_full_object_store_restarts_the_run(config, monkeypatch):
    class FullStore(FakeRay):
        def put(self, value: object) -> None:
            raise exceptions.ObjectStoreFullError("2 GiB")

    replace_ray(monkeypatch, FullStore())
    assert attempts(config, lambda: Group.share([1])) == 2
