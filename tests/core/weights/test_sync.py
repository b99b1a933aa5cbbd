"""Weight sync between colocated ranks and servers, with fakes that record their calls."""

from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.core.batch import token_rows
from hybridrl.core.carried import Encoded
from hybridrl.core.weights.buckets import Bucket, SyncPlan, Tensor
from hybridrl.core.weights.sync import BroadcastSync, ColocatedSync, StaleWeights, WeightSync

MODEL, ADAPTER = [Bucket([], 64), Bucket([], 128, start=64)], [Bucket([], 8)]
WHOLE_MODEL = SyncPlan(MODEL, [])
PROBE = [5, 6, 7]
LOG_PROBS = [-1.0, -2.0]


class Workers:
    """Remote workers that respond at once; calls are recorded as (workers, method, arguments)."""

    def __init__(self, calls: list, actors: list[str]) -> None:
        self.calls, self.actors, self.about = calls, actors, []

    def __len__(self) -> int:
        return len(self.actors)

    def only(self, ranks):
        part = copy(self)
        part.actors = [self.actors[rank] for rank in ranks]
        return part

    def broadcast(self, method, *args, timeout):
        return self.finish(self.start_each(method, [args] * len(self)), method, timeout=timeout)

    def scatter(self, method, parts, *, timeout):
        return self.finish(self.start_each(method, parts), method, timeout=timeout)

    failures = broadcast

    def start_each(self, method, parts):
        for actor, part in zip(self.actors, parts, strict=True):
            self.calls.append((actor, method.__name__, part))
        return [(actor, part) for actor, part in zip(self.actors, parts, strict=True)]

    def finish(self, refs, method, *, timeout, about=""):
        self.about.append(f"{method.__name__}{about}")
        return [getattr(self, method.__name__)(actor, *part) for actor, part in refs]


class Ranks(Workers):
    plan = WHOLE_MODEL
    updates = 0
    rounding = 0.0

    def plan_weights(self, rank, dtype, limit):
        assert (dtype, limit) == ("float32", 2 << 20)
        return self.plan

    def forward(self, rank, name, row, micro_batches, spec, rounding):
        return [[log_prob + self.rounding * bool(rounding) for log_prob in LOG_PROBS]], 0

    def fill_bucket(self, rank, bucket, shared):
        return (f"memory of {rank}" if shared else None, bucket.bytes + self.updates)

    def release_buckets(self, rank, reader_died=False):
        return None

    def listen(self, rank):
        return f"{rank}:1"

    def join_engines(self, rank, address, size, seconds):
        return None

    def send_bucket(self, rank, bucket):
        return None


class Servers(Workers):
    held: dict[str, int]  # ids of syncs
    offset = 0.0

    def finish_sync(self, server, sync_id, version):
        self.held[server] = sync_id

    def held_sync(self, server):
        return self.held[server]

    def score(self, server, token_ids):
        assert token_ids == PROBE
        return [log_prob + self.offset for log_prob in LOG_PROBS]

    def begin_weights(self, server):
        return None

    finish_weights = begin_weights

    def join_trainer(self, server, address, first_rank, size, seconds):
        return None

    def load_bucket(self, server, bucket, handles, digests, adapter):
        return None


def built(plan: SyncPlan = WHOLE_MODEL, tp_size: int = 1, kind: type[WeightSync] = ColocatedSync) -> tuple[Any, list]:
    calls: list = []
    rollout = SimpleNamespace(
        tensor_model_parallel_size=tp_size,
        dtype="float32",
        checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=2),
    )
    ranks, servers = Ranks(calls, ["r0", "r1"]), Servers(calls, ["s0", "s1"][: 2 // tp_size])
    ranks.plan, servers.held = plan, {}
    sync = kind(ranks, servers, rollout, probe=Encoded(PROBE), train_dtype="float32", timeout=1.0)
    calls.clear()
    return sync, calls


def of(calls: list, *methods: str) -> list:
    return [(actor, method) for actor, method, _ in calls if method in methods]


def arguments(calls: list, name: str) -> list:
    return [(actor, part) for actor, method, part in calls if method == name]


def test_each_server_reads_its_ranks_memory_and_the_next_bucket_is_filled_meanwhile():
    sync, calls = built()
    sync.publish(4)
    assert arguments(calls, "load_bucket")[:2] == [
        ("s0", (MODEL[0], ["memory of r0"], [64], False)),
        ("s1", (MODEL[0], ["memory of r1"], [64], False)),
    ]
    order = [method for actor, method, _ in calls if actor in ("r0", "s0")]
    filled_and_loaded = ["fill_bucket", "load_bucket"] * len(MODEL)
    ended = ["finish_weights", "finish_sync", "release_buckets"]
    assert order == ["forward", "forward", "begin_weights", *filled_and_loaded, *ended]
    assert ("s1", "finish_sync", (1, 4)) in calls


def test_an_error_names_the_bucket_that_was_on_its_way():
    named = [Bucket([Tensor(name, [1], "float32", 0, 4) for name in names], 64) for names in (["a", "b", "c"], ["d"])]
    sync, _ = built(SyncPlan(named, []))
    sync.publish(4)
    buckets = [" (bucket 1 of 2: a ... c)", " (bucket 2 of 2: d ... d)"]
    for workers, method in ((sync.trainers, "fill_bucket"), (sync.servers, "load_bucket")):
        named_calls = [line for line in workers.about if line.startswith(f"{method} (")]
        assert named_calls == [f"{method}{about}" for about in buckets]


def test_a_tensor_parallel_server_gets_the_memory_of_all_its_ranks():
    sync, calls = built(tp_size=2)
    sync.publish(0)
    [(_, first), _] = arguments(calls, "load_bucket")
    assert first == (MODEL[0], ["memory of r0", "memory of r1"], [64, 64], False)


def test_a_version_published_again_has_a_new_id():
    sync, calls = built()
    sync.publish(4)
    sync.publish(4)
    assert [part for actor, method, part in calls if method == "finish_sync" and actor == "s0"] == [(1, 4), (2, 4)]


def test_the_base_of_an_adapter_is_sent_once_to_each_server():
    sync, calls = built(SyncPlan(MODEL, ADAPTER))
    sync.publish(0)
    calls.clear()
    sync.publish(1)
    assert of(calls, "begin_weights") == []
    assert [part[3] for _, method, part in calls if method == "load_bucket"] == [True, True]
    calls.clear()
    sync.servers.actors[1] = "new"
    sync.restore(1)
    adapters = [(actor, part[3]) for actor, part in arguments(calls, "load_bucket")]
    assert adapters == [("new", False), ("new", False), ("new", True)]
    assert ("new", "finish_sync", (2, 1)) in calls


@pytest.mark.parametrize("plan", [WHOLE_MODEL, SyncPlan(MODEL, ADAPTER)])
def test_equal_weights_have_equal_digests_in_every_process_and_updated_weights_others(plan):
    sync, _ = built(plan)
    sync.publish(0)
    first = sync.weights
    sync.restore(1)
    assert sync.weights == first
    again, _ = built(plan)
    again.publish(7)
    assert again.weights == first
    sync.trainers.updates = 1
    sync.publish(1)
    assert sync.weights != first


def test_all_ranks_take_part_where_one_server_is_restored_and_log_probs_are_those_of_the_sync():
    sync, calls = built()
    sync.publish(0)
    calls.clear()
    sync.restore(1)
    assert of(calls, "fill_bucket") == [("r0", "fill_bucket"), ("r1", "fill_bucket")] * 2
    assert {actor for actor, method, _ in calls if method == "load_bucket"} == {"s1"}
    assert of(calls, "forward") == []
    sync.verify(1)
    assert of(calls, "score") == [("s1", "score")]


def test_equal_log_probs_pass_and_their_largest_gap_is_reported_once():
    sync, _ = built()
    sync.publish(0)
    sync.servers.offset = 5e-5
    sync.verify()
    assert sync.take_metrics()["training/probe_log_prob_diff"] == pytest.approx(5e-5, rel=1e-2)
    assert sync.take_metrics() == {}


def test_the_bytes_that_a_sync_publishes_are_counted_and_of_an_adapter_only_its_own():
    sync, _ = built(SyncPlan(MODEL, ADAPTER))
    sync.publish(0)
    sync.restore(1)  # a lost server's weights are no sync
    assert sync.take_metrics() == {"perf/weights_gb": (64 + 128 + 8) / 1e9}
    sync.publish(1)
    assert sync.take_metrics() == {"perf/weights_gb": 8 / 1e9}


def test_other_log_probs_stop_the_run():
    sync, _ = built()
    sync.publish(0)
    sync.servers.offset = 0.5
    message = (
        r"after the weight sync, rollout server 0 differs from the trainer in .* by 0.5 on average and 0.5 at most"
        r".*0.0001"
    )
    with pytest.raises(StaleWeights, match=message):
        sync.verify()


def test_a_model_that_rounds_more_is_allowed_a_multiple_of_it_in_all_syncs_but_no_more():
    """Its rounding is measured once, with the first weights, in the coarser type of engine and trainer."""
    sync, calls = built()
    sync.trainers.rounding, sync.servers.offset, sync.rounded = 1e-3, 3e-3, "bfloat16"
    sync.publish(0)
    sync.rounded = "float32"  # whose limits are smaller
    sync.verify()
    sync.publish(1)
    sync.verify()
    types = [part[4] for actor, part in arguments(calls, "forward") if actor == "r0"]
    assert types == ["", "bfloat16", ""]
    sync.servers.offset = 5e-3
    with pytest.raises(StaleWeights, match=r"\(0.004 and 0.008 are allowed\)"):
        sync.verify()


def test_what_is_allowed_grows_with_the_log_probs_of_a_collapsed_policy():
    sync, _ = built()
    sync.publish(0)
    sync.expected = torch.tensor([-100.0, -300.0])
    sync.servers.score = lambda server, ids: [-100.0015, -300.0015]
    sync.verify()
    sync.servers.score = lambda server, ids: [-100.0025, -300.0025]
    with pytest.raises(StaleWeights, match=r"at a mean of -200 \(0.002 and 0.002 are allowed\)"):
        sync.verify()


def test_a_server_that_missed_the_sync_stops_the_run():
    sync, _ = built()
    sync.publish(0)
    sync.servers.held["s1"] = 0
    with pytest.raises(StaleWeights, match=r"rollout server 1 computes with the weights of weight sync 0.*those of 1"):
        sync.verify()


def test_after_a_failure_servers_stop_waiting_and_ranks_free_also_what_dead_servers_were_to_read():
    sync, calls = built(tp_size=1)
    sync.publish(0)
    calls.clear()
    sync.abort([1])
    assert calls == [
        ("s0", "finish_weights", ()),
        ("s1", "finish_weights", ()),
        ("r0", "release_buckets", (False,)),
        ("r1", "release_buckets", (True,)),
    ]


def test_the_probe_is_a_prompt_of_one_token_and_its_response():
    row = token_rows([PROBE])
    assert (row.prompt_ids.tolist(), row.response_ids.tolist()) == ([5], [6, 7])


def test_servers_on_devices_of_their_own_get_every_bucket_from_the_first_rank():
    sync, calls = built(kind=BroadcastSync)
    sync.publish(4)
    assert [call for call in calls if call[1].startswith("join")] == [
        ("s0", "join_trainer", ("r0:1", 1, 3, 1.0)),
        ("s1", "join_trainer", ("r0:1", 2, 3, 1.0)),
        ("r0", "join_engines", ("r0:1", 3, 1.0)),
    ]
    loads = [(server, (MODEL[0], [None], [64], False)) for server in ("s0", "s1")]
    assert arguments(calls, "load_bucket")[:2] == loads
    assert arguments(calls, "send_bucket") == [("r0", (bucket,)) for bucket in MODEL]


def test_the_group_is_formed_again_only_for_other_servers():
    sync, calls = built(kind=BroadcastSync)
    sync.publish(0)
    calls.clear()
    sync.publish(1)
    assert not of(calls, "join_trainer")
    sync.restore(1)
    assert of(calls, "join_trainer") == [("s1", "join_trainer")]
    calls.clear()
    sync.publish(2)
    assert of(calls, "join_trainer") == [("s0", "join_trainer"), ("s1", "join_trainer")]


def test_what_the_first_rank_was_sending_as_a_server_died_is_waited_for_and_its_failure_is_not_the_run_s():
    sync, calls = built(kind=BroadcastSync)

    def fail(rank, bucket):
        calls.append((rank, "failed", ()))
        raise RuntimeError("connection reset by peer")

    def load(server, *_):
        raise ValueError("died")

    sync.trainers.send_bucket, sync.servers.load_bucket = fail, load
    with pytest.raises(ValueError, match="died"):
        sync.publish(0)
    sync.abort([1])
    assert ("r0", "failed", ()) in calls and not sync.sending and not sync.members
