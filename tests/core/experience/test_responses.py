"""A run that is killed in a step and resumed at it has the same batch as one that was not, and samples only what is
missing."""

import contextlib
import json
import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START
from hybridrl.core.experience.batching import GroupFilter
from hybridrl.core.experience.collector import SynchronousExperience
from hybridrl.core.experience.responses import HEADER, ResponseStore
from hybridrl.core.rollout import Completion, Request, Sampling
from hybridrl.core.rollout.client import RolloutFailure
from hybridrl.required import required
from hybridrl.rewards.score import FaultGuard, Score
from tests.core.experience.test_collector import Client, Scorers, Switch, assert_same, build, fault, plain

TABLE = [[0, 1, 1], [1, 0, 1]]


class Killed(BaseException):
    """The process ends here."""


class Dying(Client):
    """Responds to `count` requests and ends."""

    def __init__(self, count: int, error: BaseException | None = None) -> None:
        super().__init__()
        self.count, self.error = count, error or Killed()

    def response(self, request):
        if not self.count:
            return self.error
        self.count -= 1
        return super().response(request)


def experience(
    spool: ResponseStore, table=TABLE, *, weights: str = "w", client=None, **settings
) -> SynchronousExperience:
    built = build(table, **settings)
    built.store, built.engine.weights = spool, weights
    built.runner.client = client or Client()
    return built


def killed(directory: Path, count: int, table=TABLE, **settings) -> None:
    """The first step of a process that ends once it has `count` responses."""
    with contextlib.suppress(Killed):
        experience(spool(directory), table, client=Dying(count), **settings).collect(1)


def spool(directory: Path, engine: str = "e", reward: str = "r", *, whole_steps: bool = False) -> ResponseStore:
    return ResponseStore(directory / "spool", engine, reward, whole_steps=whole_steps)


def sampled(built: SynchronousExperience) -> int:
    """How many responses were sampled."""
    return sum(len(requests) for requests, _ in vars(built.runner.client)["calls"])


def assert_undisturbed(built: SynchronousExperience, table=TABLE, **settings) -> None:
    """The first step has the batch and metrics of a run without a spool."""
    whole, actual = build(table, **settings).collect(1), built.collect(1)
    assert_same(actual.batch, whole.batch)
    assert [one.text for one in actual.samples] == [one.text for one in whole.samples]
    assert [one.score for one in actual.samples] == [one.score for one in whole.samples]
    timings = {"timing_s/gen", "timing_s/gen_max", "timing_s/reward"}
    assert {key: value for key, value in actual.metrics.items() if key not in timings} == {
        key: value for key, value in whole.metrics.items() if key not in timings
    }


def assert_resumed(directory: Path, missing: int, table=TABLE, **settings) -> None:
    """The next process has what a run without a spool has, and samples so many responses."""
    resumed = experience(spool(directory), table, **settings)
    assert_undisturbed(resumed, table, **settings)
    assert sampled(resumed) == missing


@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_only_the_responses_that_a_kill_has_left_missing_are_sampled_again(tmp_path, count):
    killed(tmp_path, count)
    assert_resumed(tmp_path, missing=6 - count)


def test_the_responses_are_used_by_every_process_that_follows(tmp_path):
    killed(tmp_path, 2)
    killed(tmp_path, 3)
    assert_resumed(tmp_path, missing=1)


def test_a_step_whose_server_was_lost_too_often_is_trained_once_on_all_its_responses_by_the_next_process(tmp_path):
    lost = RolloutFailure("rollout server 0 was lost 4 times")
    with pytest.raises(RolloutFailure), spool(tmp_path) as kept:
        experience(kept, client=Dying(2, lost)).collect(1)
    assert_resumed(tmp_path, missing=4)


def test_a_record_that_a_kill_cut_off_or_a_disk_changed_ends_the_file_and_is_written_again(tmp_path):
    killed(tmp_path, 6)
    file = tmp_path / "spool" / "step_1"
    whole = file.read_bytes()
    record = len(whole) // 6
    for data, missing in [
        (whole[:-1], 1), (whole[: 5 * record + 3], 1), (whole[:4], 6), (whole + bytes(64), 0), (whole[:-1] + b"x", 1),
    ]:  # fmt: skip
        file.write_bytes(data)
        assert_resumed(tmp_path, missing)
        assert file.stat().st_size == len(whole)


def with_routes() -> tuple[Request, Completion]:
    request = Request(0, 0, [1, 2], 7, Sampling(3, (0,)))
    routes = np.arange(16, dtype=np.int16).reshape(4, 2, 2) - 1
    return request, Completion(np.arange(3), np.full(3, -0.5, np.float32), True, 4, carried={"routes": routes})


def test_the_experts_of_a_response_are_in_the_spool(tmp_path):
    request, completion = with_routes()
    first, second = spool(tmp_path), spool(tmp_path)
    first.open(1, "w")
    first.add(request, completion)
    second.open(1, "w")
    found = required(second.find(request)).completion
    routes = found.carried["routes"]
    assert np.array_equal(routes, completion.carried["routes"]) and routes.dtype == np.int16
    assert np.array_equal(found.token_ids, completion.token_ids)


def test_a_response_to_another_picture_is_not_found(tmp_path):
    request, completion = with_routes()
    seeing, other = (
        replace(request, carried={PICTURE_DIGEST: np.array([digest]), PICTURE_START: np.array([1], np.int32)})
        for digest in (5, 6)
    )
    first, second = spool(tmp_path), spool(tmp_path)
    first.open(1, "w")
    first.add(seeing, completion)
    second.open(1, "w")
    kept, loaded = ResponseStore(carries=True), ResponseStore(carries=True)
    kept.add(seeing, completion)
    loaded.load_state_dict(kept.state_dict([]))
    for store in (second, loaded):
        assert store.find(other) is None and store.find(request) is None
        assert required(store.find(seeing)).completion.token_ids.tolist() == [0, 1, 2]


def test_and_in_a_checkpoint_together_with_responses_that_have_none():
    request, completion = with_routes()
    first, second = ResponseStore(carries=True), ResponseStore(carries=True)
    others = [(replace(request, sample=n), replace(completion, carried={}, interrupted=True)) for n in (1, 2)]
    first.add(request, completion)
    second.load_state_dict(first.state_dict(others))
    for one, expected in [(request, completion), *others]:
        found = required(second.find(one)).completion.carried
        assert found.keys() == expected.carried.keys()
        assert all(np.array_equal(found[name], value) for name, value in expected.carried.items())


def test_the_spool_and_the_checkpoint_of_a_version_that_had_routes_alone_are_read(tmp_path):
    """Routes ended a record, with their shape under their name; in a checkpoint they were arrays of their own."""
    request, completion = with_routes()
    first, routes = spool(tmp_path), completion.carried["routes"]
    first.open(1, "w")
    first.add(request, completion)
    rewritten(tmp_path / "spool" / "step_1", {"carried": "absent", "routes": routes.shape})
    kept, plain = ResponseStore(carries=True), replace(request, sample=1)
    kept.add(request, completion)
    kept.add(plain, replace(completion, carried={}))
    state = {
        name: value for name, value in kept.state_dict([]).items() if name not in ("carried_fields", "carried_bytes")
    }
    second, third, fourth = spool(tmp_path), ResponseStore(carries=True), ResponseStore(carries=True)
    second.open(1, "w")
    shapes = np.array([routes.shape, (0, 0, 0)])
    third.load_state_dict({**state, "carried_routes": routes.ravel(), "carried_route_shapes": shapes})
    for store in (second, third):
        assert np.array_equal(required(store.find(request)).completion.carried["routes"], routes)
    assert required(third.find(plain)).completion.carried == {}
    fourth.load_state_dict(state)  # of a version before there were routes
    assert required(fourth.find(request)).completion.carried == {}


@pytest.mark.parametrize("change", ["weights", "engine", "sampling", "seed", "prompt"])
def test_responses_to_another_policy_prompt_or_seed_are_not_used(tmp_path, capsys, change):
    killed(tmp_path, 6)
    resumed = experience(spool(tmp_path, engine="other" if change == "engine" else "e"))
    if change == "weights":
        resumed.engine.weights = "other"
    if change == "sampling":
        resumed.plan = replace(resumed.plan, sampling=replace(resumed.plan.sampling, temperature=0.5))
    if change == "seed":
        resumed.runner.seed += 1
    if change == "prompt":
        resumed.prompts = [replace(prompt, ids=[prompt.ids[0], 9]) for prompt in resumed.prompts]
    resumed.collect(1)
    assert sampled(resumed) == 6
    assert "step 1: the spool is of other weights or settings: not used" in capsys.readouterr().out


def test_another_reward_scores_the_same_responses_again(tmp_path, capsys):
    killed(tmp_path, 6)
    table = [[1, 0, 1], [0, 0, 1]]
    resumed = experience(spool(tmp_path, reward="other"), table)
    assert_undisturbed(resumed, table)
    assert sampled(resumed) == 0
    assert "step 1: 6 responses of the 6 that were spooled are used again" in capsys.readouterr().out


def test_a_fault_of_the_grader_is_not_kept(tmp_path):
    killed(tmp_path, 6, [[0, fault(), 1], [1, 0, 1]], guard=FaultGuard("zero", 1.0, 99))
    assert_resumed(tmp_path, missing=0)


def test_all_parts_of_a_score_are_kept(tmp_path):
    score = Score(0.1, {"acc": True, "note": "\ud800", "gap": float("inf")}, token_rewards=[0.1, 0.0, 0.0])
    table = [[plain(0.3), score, 1], [1, 0, 1]]
    killed(tmp_path, 6, table)
    resumed = experience(spool(tmp_path), [[5, 5, 5], [5, 5, 5]])
    assert_undisturbed(resumed, table)


def rewritten(file: Path, changes: dict[str, object], arrays: bytes | None = None) -> None:
    """Change fields of every record of a file, and give each its right checksum."""
    data, offset, records = file.read_bytes(), 0, []
    while offset < len(data):
        size, _ = HEADER.unpack_from(data, offset)
        text, _, kept = data[offset + HEADER.size : offset + HEADER.size + size].partition(b"\n")
        offset += HEADER.size + size
        meta = {name: value for name, value in (json.loads(text) | changes).items() if value != "absent"}
        record = json.dumps(meta).encode() + b"\n" + (kept if arrays is None else arrays)
        records.append(HEADER.pack(len(record), zlib.crc32(record)) + record)
    file.write_bytes(b"".join(records))


@pytest.mark.parametrize(
    "changes",
    [
        *({name: "absent"} for name in ("key", "truncated", "versions", "reward", "score")),
        *({"key": key} for key in ([], {}, None, 3)),
        *({"truncated": value} for value in ("yes", None, 2)),
        *({"versions": value} for value in ("x", None, [1, 2], [], [[1]], {}, 1.5, [None], 10**40)),
        *({"score": value} for value in ("x", 1.0, [], {}, {"value": "x"}, {"value": None}, {"value": float("nan")})),
        *({"score": {"value": 1.0, **more}} for more in ({"new": 1}, {"extras": []}, {"fault": "x"}, {"text": 3})),
        *({"score": {"value": 1.0, "token_rewards": value}} for value in ([1.0], "x", 3, [None] * 3, {})),
        *({"score": {"value": 10**400}}, {"responses": "x"}, {"responses": None}),
        *({"carried": value} for value in (3, "x", None, [4], ["x"], {"a": 1}, [["routes", "<i2", 2]])),
        *(
            {"carried": [["routes", "<i2", value]]}
            for value in ([1, 1, 1], [-1, -1, 2], [10**12, 1, 1], [None] * 3, [])
        ),
        *({"carried": [[name, kind, [0]]]} for name, kind in (("routes", "O"), ("routes", "V4"), ("unknown", "<i2"))),
    ],
    ids=str,
)
def test_a_record_with_a_right_checksum_and_other_fields_is_sampled_again_with_one_warning(tmp_path, capsys, changes):
    killed(tmp_path, 6)
    rewritten(tmp_path / "spool" / "step_1", changes)
    assert_resumed(tmp_path, missing=6)
    warnings = capsys.readouterr().out.count("not of this version and are sampled again")
    assert warnings == (0 if changes in ({"key": None}, {"key": 3}) else 1)  # a key that no request has


@pytest.mark.parametrize(
    "arrays", [b"", b"x", bytes(20), b"\xff" * 24, bytes(8_000), bytes(12) + b"\x00\x00\xc0\x7f" * 3]
)
def test_a_record_with_other_arrays_is_sampled_again(tmp_path, arrays):
    killed(tmp_path, 6)
    rewritten(tmp_path / "spool" / "step_1", {}, arrays)
    assert_resumed(tmp_path, missing=6)


@pytest.mark.parametrize("text", [b"", b"\n", b"[]\n", b"null\n", b"3\n", b"\xff\n", b"[" * 5000 + b"\n", b"{}\n"])
def test_a_record_that_is_none_is_sampled_again(tmp_path, text):
    killed(tmp_path, 6)
    (tmp_path / "spool" / "step_1").write_bytes(HEADER.pack(len(text), zlib.crc32(text)) + text)
    assert_resumed(tmp_path, missing=6)


@pytest.mark.parametrize("name", ["step_1", "step_x", "step_", "step_9", "step_-3", "step_\u0663"])
@pytest.mark.parametrize("kind", ["directory", "link", "loop", "pipe"])
def test_what_is_no_file_of_a_step_does_not_disturb_the_run(tmp_path, name, kind):
    path, outside = tmp_path / "spool" / name, tmp_path / "outside"
    path.parent.mkdir()
    outside.write_text("as it was")
    if kind == "directory":
        (path / "more").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(outside if kind == "link" else path)
    assert_undisturbed(experience(spool(tmp_path)))
    assert_undisturbed(experience(spool(tmp_path)))
    assert outside.read_text() == "as it was"


class Together(Scorers):
    """Scores of a table other than that of the killed run; counts the responses of each call."""

    def __init__(self, per: str) -> None:
        super().__init__([[1, 1, 0], [0, 0, 1]])
        self.per, self.calls = per, []

    def score(self, requests, scored):
        self.calls.append(len(requests))
        super().score(requests, scored)


@pytest.mark.parametrize(
    ("per", "count", "calls"),
    [("step", 4, [6]), ("step", 6, []), ("group", 2, [3, 3]), ("group", 4, [3]), ("group", 6, [])],
)
def test_a_group_or_step_of_which_a_part_was_scored_before_is_scored_whole(tmp_path, per, count, calls):
    killed(tmp_path, count)
    resumed = experience(spool(tmp_path))
    resumed.runner.scorers = scorers = Together(per)
    rewards = required(resumed.collect(1).batch.rewards).tolist()
    assert sorted(scorers.calls) == calls and sampled(resumed) == 6 - count
    if len(calls) == (2 if per == "group" else 1):
        assert rewards == [1, 1, 0, 0, 0, 1]


FILTERED = {"group_filter": GroupFilter("score", 0), "step": 2}


@pytest.mark.parametrize("count", [1, 5, 8])
def test_dynamic_sampling_repeats_its_draws(tmp_path, count):
    table = [[1, 1], [0, 1], [0, 0], [1, 0]]
    killed(tmp_path, count, table, **FILTERED)
    assert_resumed(tmp_path, 8 - count, table, **FILTERED)


@pytest.mark.parametrize("count", [3, 6, 7, 8])
def test_greedy_baselines_are_spooled_too(tmp_path, count):
    settings = {"greedy": [0.25, 0.5], "greedy_baseline": True}
    killed(tmp_path, count, **settings)
    assert_resumed(tmp_path, 8 - count, **settings)


@pytest.mark.parametrize(("count", "missing"), [(5, 6), (6, 0)])
def test_where_responses_depend_on_those_sampled_with_them_only_a_complete_step_is_used(tmp_path, count, missing):
    with contextlib.suppress(Killed):
        experience(spool(tmp_path, whole_steps=True), client=Dying(count)).collect(1)
    resumed = experience(spool(tmp_path, whole_steps=True))
    assert_undisturbed(resumed)
    assert sampled(resumed) == missing


def test_two_steps_are_kept_as_a_checkpoint_may_lag_and_none_once_the_run_has_ended(tmp_path):
    with spool(tmp_path) as kept:
        running = experience(kept)
        for step in (1, 2, 3, 4, 5):
            running.collect(step)
        assert sorted(path.name for path in (tmp_path / "spool").iterdir()) == ["step_4", "step_5"]
        experience(spool(tmp_path)).collect(4)  # a run that went back
        assert sorted(path.name for path in (tmp_path / "spool").iterdir()) == ["step_4"]
    assert not (tmp_path / "spool").exists()


def test_a_run_that_fails_leaves_its_spool(tmp_path):
    with pytest.raises(RuntimeError), spool(tmp_path) as kept:
        experience(kept).collect(1)
        raise RuntimeError
    resumed = experience(spool(tmp_path))
    resumed.collect(1)
    assert sampled(resumed) == 0


class FullDisk(Switch):
    """Fills the disk as the rollout begins."""

    def __init__(self, kept: ResponseStore) -> None:
        super().__init__()
        self.kept, self.weights = kept, "w"

    def to_rollout(self, version):
        self.kept.open = self.open

    def open(self, step, weights):
        ResponseStore.open(self.kept, step, weights)
        self.kept.file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb", buffering=0)


def test_a_full_disk_costs_the_spool_and_is_reported_once(tmp_path, capsys):
    kept = spool(tmp_path)
    running = experience(kept)
    running.engine = FullDisk(kept)
    assert_undisturbed(running)
    running.collect(2)
    assert capsys.readouterr().out.count("No space left on device; training continues") == 1
    assert not [*(tmp_path / "spool").iterdir()]


def test_a_directory_that_cannot_be_made_costs_the_spool(tmp_path):
    (tmp_path / "spool").touch()
    assert_undisturbed(experience(spool(tmp_path)))


def test_a_response_whose_score_json_cannot_hold_is_stored_without_it(tmp_path):
    request, completion = (
        Request(0, 0, [1, 2], 7, Sampling(4, (0,))),
        Completion(np.array([3, 4]), np.zeros(2), False, 0),
    )
    first = spool(tmp_path)
    first.open(1, "w")
    first.add_score(first.spool_origin, request, completion, Score(1.0, {"seen": {5}}))
    again = spool(tmp_path)
    again.open(1, "w")
    stored = required(again.find(request))
    assert stored.completion.token_ids.tolist() == [3, 4] and stored.score is None
