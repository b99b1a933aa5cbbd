"""Faults that end a run, each raised by the code that raises it in a run, and what `hybridrl why` says of it."""

import asyncio
import errno
import signal
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from hybridrl.checkpoint.resume import select_checkpoint
from hybridrl.checkpoint.store import Store
from hybridrl.config import PPOConfig
from hybridrl.core.algorithms.batch_metrics import Agreement
from hybridrl.core.cluster.group import OutOfMemory, gather
from hybridrl.core.experience.batching import Draws, GroupFilter
from hybridrl.core.experience.collector import NothingToLearnFrom
from hybridrl.core.rollout.ladder import MemoryLadder
from hybridrl.core.training.worker_group import TrainWorkers
from hybridrl.core.weights.sync import ColocatedSync
from hybridrl.health import HealthMonitor
from hybridrl.rewards.score import FaultGuard, Score, diagnosis
from hybridrl.runs.attempts import with_restarts
from hybridrl.runtime.guard import StopRequest
from tests.core.cluster.test_group import Call, Died, FakeRay, replace_ray, task_error
from tests.core.rollout.test_client import FakeServer, client, requests
from tests.runtime.test_guard import count_kills

Work = Callable[[Store, PPOConfig], object]  # done in step 3 of a run that saved step 2
DIED = Died("The actor died. connection error code 2. End of file.")
UPDATE = "train worker.update_policy"


def remote(
    what: str, *calls: Call, log: str = "train-1", logged: str = "", kills: int = 0, lost: str | None = None
) -> Work:
    """A remote call to two processes that ends so; the second has `logged`, and the kernel has killed `kills`."""

    def work(store: Store, config: PPOConfig) -> None:
        logs = [store.directory / "logs" / f"{name}.log" for name in (log[:-1] + "0", log)]
        logs[0].parent.mkdir()
        logs[1].write_text(logged)
        with pytest.MonkeyPatch.context() as patch:
            replace_ray(patch, FakeRay(), lost)
            count_kills(patch, store.directory / "vmstat", before=0)(f"oom_kill {kills}\n")
            gather([Call(), *calls], what, 0.01, list(map(str, logs)))

    return work


def stopped(store: Store, config: PPOConfig) -> None:
    with StopRequest(wait_for_step=True) as stop:
        signal.raise_signal(signal.SIGINT)
        raise KeyboardInterrupt(stop.reason)


def terminated(store: Store, config: PPOConfig) -> None:
    with StopRequest(wait_for_step=False):
        signal.raise_signal(signal.SIGTERM)


def unsaved(error: OSError) -> Work:
    def work(store: Store, config: PPOConfig) -> None:
        raise store.failed(3, error)

    return work


def damaged(store: Store, config: PPOConfig) -> None:
    (store.directory / "global_step_2" / "state.json").write_text("{}")
    select_checkpoint("auto", None, store.directory, "", lambda text: None)


def grader(store: Store, config: PPOConfig) -> None:
    detail = "KeyError: 'answer' (my_reward.py:7)"
    FaultGuard("stop", 0.5, 3).apply([Score(None, fault="raised:KeyError", detail=detail)])


def unscored(store: Store, config: PPOConfig) -> None:
    score = Score(None, fault="timeout", detail="no score within 10 s")
    raise NothingToLearnFrom(diagnosis([score] * 8))


def flat(store: Store, config: PPOConfig) -> None:
    """Dynamic sampling with two groups, in which every response scores the same."""
    draws = Draws(GroupFilter("score", max_batches=1), needed=2, left=8, data_size=8)
    groups = [[SimpleNamespace(score=Score(value))] * 4 for value in (0.0, 1.0)]
    draws.add(2, groups)
    draws.next_size()


def broken(store: Store, config: PPOConfig) -> None:
    TrainWorkers.stop_if_broken(SimpleNamespace(most_skipped_in_a_row=3), 3, store.directory, store.last)


def collapsed(store: Store, config: PPOConfig) -> None:
    monitor = HealthMonitor(actions={"policy-jump": "stop"})
    monitor.judge(3, {"actor/ppo_kl": 9.0, "actor/lr": 1e-6})
    monitor.act()


def crowded_update(store: Store, config: PPOConfig) -> None:
    """A lack of memory in micro-batches of several rows, and then of one."""
    sizes = iter([9000, None])

    def attempt(adjusted: dict) -> None:
        try:
            remote(UPDATE, Call(error=task_error("CUDA out of memory. Tried to allocate 2 GiB")))(store, config)
        except OutOfMemory as error:
            (store.directory / "logs" / "train-1.log").unlink()
            (store.directory / "logs").rmdir()
            error.tokens = next(sizes)
            raise

    with_restarts(attempt, config)


def crowded_engine(store: Store, config: PPOConfig) -> None:
    ladder = MemoryLadder(config.actor_rollout_ref.rollout, "cuda")
    while True:
        ladder.lower(ladder.settings, "rollout server 0: torch.OutOfMemoryError: CUDA out of memory")


def lost_server(store: Store, config: PPOConfig) -> None:
    client([FakeServer(dies=0)], lambda index: FakeServer(dies=0), retries=1).generate_all(requests(1))


def stale(store: Store, config: PPOConfig) -> None:
    servers = SimpleNamespace(only=lambda indices: SimpleNamespace(broadcast=lambda *_, timeout: [2]))
    ColocatedSync.verify(SimpleNamespace(servers=servers, sync_id=3, timeout=1.0), 0)


def disagreeing(store: Store, config: PPOConfig) -> None:
    log_probs, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    batch = SimpleNamespace(
        old_log_probs=log_probs, rollout_log_probs=log_probs - 1, response_mask=mask, staleness=None
    )
    Agreement(0.1, "float32").check(batch)


def out_of_turn(store: Store, config: PPOConfig) -> None:
    async def sample() -> None:
        asleep = client([FakeServer()])
        asleep.available = False
        await asleep.generate(requests(1)[0])

    asyncio.run(sample())


def mistaken(store: Store, config: PPOConfig) -> None:
    raise ZeroDivisionError("division by zero")


CHECK, RESUME, BUNDLE = "hybridrl doctor -cp", "hybridrl train -cp", "hybridrl bundle"
# What is done in step 3, and the code, cause and command of the verdict.
CAUSES: list[tuple[Work | None, str, str, str]] = [
    (None, "finished", "it finished after step 3", "hybridrl merge --local_dir"),
    (stopped, "stopped", "Ctrl-C stopped it in step 3 (the last healthy checkpoint is of step 2)", RESUME),
    (terminated, "stopped", "SIGTERM stopped it in step 3", RESUME),
    (unsaved(OSError(errno.ENOSPC, "No space left on device", "x.pt")), "disk-full",
     "the disk is full in step 3: step 3 could not be saved", "trainer.max_actor_ckpt_to_keep=1"),
    (unsaved(PermissionError(errno.EACCES, "Permission denied", "x.pt")), "save-failed",
     "a checkpoint could not be saved in step 3: step 3 could not be saved", RESUME),
    (damaged, "checkpoint-damaged", "none of its checkpoints is intact", "hybridrl checkpoints"),
    (grader, "reward-faults", "or episodes-*.log): KeyError: 'answer' (my_reward.py:7)", CHECK),
    (unscored, "nothing-to-learn-from", "8 of 8 responses could not be scored ({'timeout': 8})", CHECK),
    (flat, "no-signal", "there was nothing to learn from in step 3: dynamic sampling found 0 of 2 groups", CHECK),
    (broken, "broken-updates", "updates were not finite in step 3: 3 updates in a row had a loss or gradient",
     "actor_rollout_ref.actor.optim.lr=1e-07"),
    (collapsed, "unhealthy", "a diagnosis stopped it in step 3: trainer.on_diagnosis.policy-jump=stop: the update",
     "actor_rollout_ref.actor.optim.lr=1e-07"),
    (crowded_update, "device-memory", "train-1 ran out of memory: ValueError: CUDA out of memory. Tried to allocate 2 "
     "GiB (tried: actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4500 instead of 16384)", CHECK),
    (remote(UPDATE, Call(error=DIED), logged="CUDA error: out of memory\n"), "device-memory",
     "a device ran out of memory in step 3: train worker.update_policy: the process of train-1 died", CHECK),
    (crowded_engine, "device-memory", "(tried: max_num_seqs=256 gpu_memory_utilization=0.5; max_num_seqs=128 ", CHECK),
    (remote(UPDATE, Call(error=DIED), kills=2), "host-memory",
     "the machine ran out of memory in step 3: train worker.update_policy: the process of train-1 died", CHECK),
    (remote(UPDATE, Call(error=task_error("DefaultCPUAllocator: can't allocate memory"))), "host-memory",
     "train-1 ran out of memory: ValueError: DefaultCPUAllocator: can't allocate memory", CHECK),
    (remote(UPDATE, Call(error=DIED)), "worker-died", "a process of the run died in step 3: train worker.update_policy",
     RESUME),
    (remote(UPDATE, Call(error=task_error("CUDA error: an illegal memory access was encountered"))), "worker-died",
     "train-1 failed: ValueError: CUDA error: an illegal memory access", RESUME),
    (remote(UPDATE, Call(error=DIED), lost="raylet"), "worker-died", "Ray's raylet ended without a message", RESUME),
    (remote(UPDATE, Call(responds=False)), "no-response",
     "a process hung in step 3: train worker.update_policy: no response from train-1 within 0.01 s", RESUME),
    (remote(UPDATE, Call(error=task_error("no such row"))), "worker-failed",
     "a worker failed in step 3: train worker.update_policy: train-1 failed: ValueError: no such row", BUNDLE),
    (remote("start-up", Call(error=task_error("Engine core")), log="rollout-1", logged="KeyError: 'a'"),
     "engine-start", "a rollout engine could not start in step 3: start-up: rollout-1 failed:", "logs/rollout-1.log"),
    (lost_server, "rollout-failed", "rollout server 0 was lost 2 times during the same requests", "logs/rollout-0.log"),
    (stale, "stale-weights", "an engine did not compute with the trainer's weights in step 3: rollout server", BUNDLE),
    (disagreeing, "disagreement", "engine and trainer compute different log-probs in step 3: the trainer's", BUNDLE),
    (out_of_turn, "wrong-mode", "the program is at fault in step 3: generate was called while", BUNDLE),
    (mistaken, "unexpected", "the program is at fault in step 3: division by zero", BUNDLE),
]  # fmt: skip
