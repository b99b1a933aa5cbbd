import errno
import fcntl
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from hybridrl.checkpoint import store as store_module
from hybridrl.checkpoint.store import (
    LATEST,
    Checkpoint,
    SaveFailed,
    Store,
    damage_of,
    holder,
    list_checkpoints,
    newest_good,
)
from hybridrl.config import ConfigError
from hybridrl.required import required

FILES = ("actor/__0_0.distcp", "config.yaml", "state.json", "manifest.json")
GOOD = {"healthy": True, "recovery": False, "metrics": {}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path)
    yield opened
    opened.close()


def write(aside: Path, text: str) -> None:
    (aside / "actor").mkdir()
    (aside / "actor" / "__0_0.distcp").write_text(text * 100)
    (aside / "actor" / ".metadata").write_bytes(b"\x8c\x07model.a")
    (aside / "config.yaml").write_text("seed: 1234")


def save(store: Store, step: int, text: str = "weights", **state: object) -> Checkpoint:
    write(store.begin(step), text)
    return store.publish(step, GOOD | state)


def content(checkpoint: Checkpoint) -> str:
    return (checkpoint.path / "actor" / "__0_0.distcp").read_text()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".lock"}


def steps(store: Store) -> list[int]:
    return [saved.step for saved in list_checkpoints(store.directory)]


def selected(store: Store) -> tuple[int | None, list[str]]:
    """The step that a run would resume from, and what is said of those that are skipped."""
    logged: list[str] = []
    checkpoint = newest_good(store.directory, logged.append)
    return checkpoint and checkpoint.step, logged


def test_a_published_checkpoint_is_complete_and_has_its_state(store, tmp_path):
    saved = save(store, 5, prompts=320)
    assert saved.path == tmp_path / "global_step_5"
    assert names(saved.path) == {"actor", "config.yaml", "state.json", "manifest.json"}
    assert damage_of(saved.path) == []
    assert list_checkpoints(store.directory) == [saved]
    assert (saved.state["prompts"], saved.state["healthy"]) == (320, True)


def test_a_published_checkpoint_is_named_as_the_latest(store, tmp_path):
    save(store, 5)
    save(store, 10)
    assert (tmp_path / LATEST).read_text() == "10"
    assert names(tmp_path) == {"global_step_5", "global_step_10", LATEST}


def test_a_checkpoint_is_invisible_before_it_is_published(store, tmp_path):
    write(store.begin(5), "weights")
    assert names(tmp_path) == {".global_step_5.writing"}
    assert (
        list_checkpoints(store.directory) == [] and store.last() is None and newest_good(store.directory, print) is None
    )


def test_a_latest_file_that_names_a_missing_checkpoint_is_ignored(store, tmp_path):
    save(store, 5)
    save(store, 10)
    shutil.rmtree(tmp_path / "global_step_10")
    assert (tmp_path / LATEST).read_text() == "10"
    assert store.last() == tmp_path / "global_step_5"
    assert required(newest_good(store.directory, pytest.fail)).step == 5


def test_the_last_checkpoint_is_the_newest_that_was_healthy(store, tmp_path):
    save(store, 5)
    save(store, 10, healthy=False)
    assert store.last() == tmp_path / "global_step_5"


def test_a_directory_to_write_into_is_empty_whatever_a_killed_run_left(store):
    write(store.begin(5), "half")
    assert list(store.begin(5).iterdir()) == []


def test_saving_a_step_again_replaces_its_checkpoint(store, tmp_path):
    save(store, 5, "old")
    (tmp_path / "global_step_5" / "notes.txt").write_text("of the old one")
    saved = save(store, 5, "new")
    assert content(saved) == "new" * 100
    assert names(saved.path) == {"actor", "config.yaml", "state.json", "manifest.json"}
    assert names(tmp_path) == {"global_step_5", LATEST}


def test_a_replaced_checkpoint_exists_until_the_new_one_is_published(store):
    save(store, 5, "old")
    write(store.begin(5), "new")
    assert content(newest_good(store.directory, pytest.fail)) == "old" * 100


# Selection


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:9] + bytes([data[9] ^ 4]) + data[10:])


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, remove])
@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_with_a_damaged_file_is_skipped_and_the_file_named(store, tmp_path, name, damage):
    save(store, 5)
    save(store, 10)
    damage(tmp_path / "global_step_10" / name)
    step, (line,) = selected(store)
    assert step == 5 and line.startswith(f"{tmp_path / 'global_step_10'} is skipped: {name}: ")
    assert damage_of(tmp_path / "global_step_10")[0].startswith(f"{name}: ")


def test_each_skipped_checkpoint_is_logged_with_the_reason(store, tmp_path):
    for step in (5, 10, 15):
        save(store, step)
    save(store, 20, healthy=False, reason="loss is nan")
    remove(tmp_path / "global_step_15" / "config.yaml")
    flip(tmp_path / "global_step_10" / "manifest.json")
    reasons = {20: "not healthy: loss is nan", 15: "config.yaml: missing", 10: "manifest.json: damaged"}
    lines = [f"{tmp_path / f'global_step_{step}'} is skipped: {reason}" for step, reason in reasons.items()]
    assert selected(store) == (5, lines)


def test_without_a_good_checkpoint_none_is_selected(store, tmp_path):
    save(store, 5, healthy=False)
    save(store, 10)
    remove(tmp_path / "global_step_10" / "state.json")
    step, lines = selected(store)
    assert step is None and len(lines) == 2


def test_a_directory_of_another_program_is_skipped_and_never_deleted(tmp_path):
    (tmp_path / "global_step_50" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_60").mkdir()
    (tmp_path / "global_step_60" / "state.json").write_text("[1]")
    store = Store(tmp_path, keep=1)
    save(store, 5)
    step, lines = selected(store)
    assert step == 5 and [line.split(" is skipped: ")[1] for line in lines] == ["manifest.json: missing"] * 2
    assert names(tmp_path) == {"global_step_5", "global_step_50", "global_step_60", LATEST}
    store.close()


def test_check_reports_everything_wrong_with_a_checkpoint(store, tmp_path):
    save(store, 5, healthy=False, reason="a gradient is not finite")
    truncate(tmp_path / "global_step_5" / "actor" / "__0_0.distcp")
    assert damage_of(tmp_path / "global_step_5") == [
        "not healthy: a gradient is not finite",
        "actor/__0_0.distcp: 699 of 700 bytes",
    ]


def test_an_abandoned_checkpoint_is_not_selected(store, tmp_path):
    """Resumed from step 5 by an explicit path, the run is at step 7: step 15 was abandoned."""
    for step in (5, 15, 7):
        save(store, step)
    back = f"{tmp_path / 'global_step_15'} is skipped: the run has since gone back to an earlier checkpoint"
    assert selected(store) == (7, [back])
    flip(tmp_path / "global_step_7" / "actor" / "__0_0.distcp")
    assert selected(store)[0] == 5


# Retention


def sequence(directory: Path, *saves: tuple[int, dict[str, object]], **retention) -> list[int]:
    """Return the checkpoints left after these were saved; assert that nothing else is left."""
    store = Store(directory, **retention)
    for step, state in saves:
        save(store, step, **state)
        assert damage_of(directory / f"global_step_{step}") == []
    assert names(directory) == {LATEST, *(f"global_step_{step}" for step in steps(store))}
    store.close()
    return steps(store)


def test_a_step_saved_again_counts_once(tmp_path):
    assert sequence(tmp_path, (5, {}), (10, {}), (10, {}), keep=2) == [5, 10]


@pytest.mark.parametrize(("keep_best", "left"), [("val/score", [2, 4]), ("-val/score", [3, 4])])
def test_the_best_is_retained_too(tmp_path, keep_best, left):
    scores = [(step, {"metrics": {"val/score": score}}) for step, score in ((1, 0.3), (2, 0.8), (3, 0.2), (4, 0.5))]
    assert sequence(tmp_path, *scores, keep=1, keep_best=keep_best) == left


def test_the_checkpoint_resumed_from_is_retained_until_a_newer_one_is_published(tmp_path):
    assert sequence(tmp_path, (5, {}), (10, {"recovery": True}), keep=1) == [5, 10]
    store = Store(tmp_path, keep=1)
    write(store.begin(12), "weights")
    assert steps(store) == [5, 10]
    store.failed(12, OSError())
    assert required(newest_good(store.directory, pytest.fail)).step == 10
    save(store, 15)
    assert steps(store) == [15]
    store.close()


def test_a_checkpoint_that_cannot_be_deleted_is_deleted_later(tmp_path, monkeypatch):
    store = Store(tmp_path, keep=1)
    save(store, 5)
    with monkeypatch.context() as patch:
        around(patch, "unlink", failing(OSError(errno.EBUSY, "in use")))
        save(store, 10)
    assert steps(store) == [10]
    store.close()
    assert ".global_step_5.deleting" in names(tmp_path)
    Store(tmp_path).close()
    assert names(tmp_path) == {"global_step_10", LATEST}


# Failures and kills


def around(patch: pytest.MonkeyPatch, name: str, call: Callable, module: object = os) -> None:
    """Have a function of the system be called by another one, which gets it as its first argument."""
    patch.setattr(module, name, partial(call, getattr(module, name)))


def failing(error: BaseException) -> Callable:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_full_disk_is_reported_and_the_older_checkpoints_are_kept(store, tmp_path, monkeypatch):
    save(store, 5)
    write(store.begin(10), "weights")
    with monkeypatch.context() as patch:
        around(patch, "fsync", failing(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(SaveFailed) as caught:
            store.publish(10, GOOD)
    free = shutil.disk_usage(tmp_path).free / 1e9
    message = str(caught.value)
    assert message.startswith(f"step 10 could not be saved in {tmp_path}, where ")
    assert float(message.split("where ")[1].split(" GB")[0]) == pytest.approx(free, abs=1)
    assert message.endswith(" GB were free: [Errno 28] No space left on device; earlier checkpoints are intact")
    assert names(tmp_path) == {"global_step_5", LATEST}


def test_a_checkpoint_that_cannot_be_started_is_reported_likewise(store, tmp_path):
    (tmp_path / ".global_step_10.writing").touch()
    with pytest.raises(SaveFailed, match="step 10 could not be saved"):
        store.begin(10)


def test_a_directory_that_has_disappeared_is_reported_with_the_first_error(store, tmp_path):
    write(store.begin(10), "weights")
    shutil.rmtree(tmp_path)
    with pytest.raises(SaveFailed, match=r"could not be saved in .*writing/\.state\.json\.writing"):
        store.publish(10, GOOD)


def test_a_checkpoint_is_flushed_to_disk_before_it_appears(store, tmp_path, monkeypatch):
    flushed: set[int] = set()

    def record(fsync: Callable, descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def compare(replace: Callable, source: Path, target: Path) -> None:
        assert {path.stat().st_ino for path in (Path(source), *Path(source).rglob("*"))} <= flushed
        replace(source, target)
        flushed.clear()

    write(store.begin(5), "weights")
    around(monkeypatch, "fsync", record)
    around(monkeypatch, "replace", compare)
    store.publish(5, GOOD)
    assert tmp_path.stat().st_ino in flushed


class Killed(BaseException):
    """The process is gone: nothing that it calls from here on has an effect."""


def interrupt(patch: pytest.MonkeyPatch, at: int, error: BaseException, for_good: bool) -> list[str]:
    """Make call number `at` that changes or opens files raise, and if `for_good` all later ones; return the calls."""
    calls: list[str] = []

    def call(name: str, function: Callable, *arguments: object, **options: object) -> object:
        calls.append(name)
        if len(calls) == at or (for_good and len(calls) > at):
            raise error
        return function(*arguments, **options)

    for name in ("replace", "fsync", "mkdir", "rmdir", "unlink", "open", "scandir"):
        around(patch, name, partial(call, name))
    around(patch, "open", partial(call, "open"), io)
    return calls


@pytest.fixture
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed up hundreds of saves: what a killed process wrote is kept even if it was not flushed."""
    around(monkeypatch, "fsync", lambda fsync, descriptor: None)


def before(directory: Path) -> Store:
    """Save a regular and a recovery checkpoint, both of which the next one supersedes."""
    store = Store(directory, keep=1)
    save(store, 5, "first")
    save(store, 10, "old", recovery=True)
    return store


@pytest.mark.usefixtures("without_waiting")
@pytest.mark.parametrize("step", [10, 15], ids=["saved again", "new"])
def test_wherever_a_run_is_killed_a_checkpoint_is_intact(tmp_path, monkeypatch, step):
    ends: list[str] = []
    killed = True
    while killed:
        directory = tmp_path / str(len(ends))
        store = before(directory)
        with monkeypatch.context() as patch:
            interrupt(patch, len(ends) + 1, Killed(), for_good=True)
            try:
                write(store.begin(step), "new")
                store.publish(step, GOOD)
                killed = False
            except Killed:
                pass
        store.close()
        again = Store(directory, keep=1)
        ends.append(content(newest_good(again.directory, pytest.fail))[:3])
        assert all(damage_of(saved.path) == [] for saved in list_checkpoints(again.directory))
        assert names(directory) - {LATEST, f".{LATEST}.writing"} == {f"global_step_{n}" for n in steps(again)}
        assert ends[-1] == "new" or steps(again) == [5, 10]
        assert save(again, step, "later") == newest_good(again.directory, pytest.fail)
        assert names(directory) == {f"global_step_{step}", LATEST}
        again.close()
    assert ends == ["old"] * ends.count("old") + ["new"] * ends.count("new")
    assert ends.count("old") > 20 and ends.count("new") > 10


@pytest.mark.usefixtures("without_waiting")
@pytest.mark.parametrize("step", [10, 15], ids=["saved again", "new"])
def test_wherever_the_disk_fails_a_checkpoint_is_intact_and_saving_continues(tmp_path, monkeypatch, step):
    ends: list[str] = []
    error, reached = OSError(errno.ENOSPC, "No space left on device"), True
    while reached:
        store = before(tmp_path / str(len(ends)))
        write(store.begin(step), "new")
        with monkeypatch.context() as patch:
            calls = interrupt(patch, len(ends) + 1, error, for_good=False)
            try:
                store.publish(step, GOOD)
                ends.append("new")
            except SaveFailed:
                ends.append("failed")
            reached = len(calls) >= len(ends)
        assert all(damage_of(saved.path) == [] for saved in list_checkpoints(store.directory))
        assert content(newest_good(store.directory, pytest.fail))[:3] in ("new", "old")[: 1 if ends[-1] == "new" else 2]
        assert save(store, 20, "later") == newest_good(store.directory, pytest.fail)
        assert steps(store) == [20]
        store.close()
    assert ends.count("failed") > 20 and ends.count("new") > 10


# The lock


def test_opening_a_store_removes_what_a_killed_run_left(tmp_path):
    for left in (".global_step_5.writing", ".global_step_10.deleting"):
        (tmp_path / left / "actor").mkdir(parents=True)
    Store(tmp_path).close()
    assert names(tmp_path) == set()


def test_a_second_run_in_a_directory_is_rejected_and_changes_nothing(store, tmp_path):
    write(store.begin(5), "weights")
    with pytest.raises(ConfigError) as caught:
        Store(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"trainer.default_local_dir={tmp_path}: another run is using it (process ")
    assert f"process {os.getpid()} on " in message
    assert damage_of(store.publish(5, GOOD).path) == []


def test_a_directory_is_free_again_when_its_run_is_closed_or_killed(tmp_path):
    Store(tmp_path).close()
    code = (
        "import sys, pathlib; from hybridrl.checkpoint.store import Store\n"
        "store = Store(pathlib.Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) as run:
        assert required(run.stdout).readline() == "open\n"
        with pytest.raises(ConfigError, match=rf"\(process {run.pid} on [^ ]+\)"):
            Store(tmp_path)
        run.send_signal(signal.SIGKILL)
    Store(tmp_path).close()


def test_a_run_starts_while_a_command_looks_who_uses_its_directory(tmp_path):
    Store(tmp_path).close()
    with (tmp_path / store_module.LOCK).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)  # as `holder` does, for a moment
        threading.Timer(0.2, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        store = Store(tmp_path)
    assert holder(tmp_path) == f"process {os.getpid()} on {socket.gethostname()}"
    store.close()


def test_a_file_system_without_locks_is_supported(tmp_path, monkeypatch):
    around(monkeypatch, "flock", failing(OSError(errno.ENOSYS, "Function not implemented")), fcntl)
    store = Store(tmp_path)
    assert save(store, 5) == newest_good(store.directory, pytest.fail)
    store.close()


def test_a_state_is_read_as_it_was_written(store, tmp_path):
    state = {"metrics": {"val/score": 0.1 + 0.2}, "runs": {"wandb": "a1"}, "note": "Größe"}
    save(store, 5, **state)
    assert list_checkpoints(store.directory)[0].state == GOOD | state | {"published": 1}
    assert json.loads((tmp_path / "global_step_5" / "state.json").read_text())["note"] == "Größe"


@pytest.mark.parametrize(
    ("part", "names", "lack"),
    [
        ("actor", b"\x8c\x09optimizer", "no weights"),
        ("critic", b"\x8c\x09optimizer", "critic: no weights"),
        ("actor", None, "model only"),
        ("critic", None, "critic: model only"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_checkpoint_without_a_model_s_weights_is_skipped_with_what_it_lacks(store, part, names, lack, alone):
    save(store, 1)
    (store.directory / "global_step_3" / "actor").mkdir(parents=True)  # verl's, which is no reason to stop looking
    (store.directory / "global_step_3" / "actor" / "model_world_size_1_rank_0.pt").write_text("verl's")
    aside = store.begin(2)
    write(aside, "weights")
    if alone and part == "critic":
        store_module.shutil.rmtree(aside / "actor")
    (aside / part).mkdir(exist_ok=True)
    (aside / part / ".metadata").unlink(missing_ok=True)
    if names:
        (aside / part / ".metadata").write_bytes(names)
    store.publish(2, GOOD)
    assert selected(store) == (1, [f"{store.directory / 'global_step_2'} is skipped: {lack}"])


@pytest.mark.parametrize("more", [False, True])
def test_three_reasons_for_which_a_checkpoint_is_skipped_are_named(store, more):
    save(store, 1)
    files = [save(store, 2).path / name for name in ("config.yaml", "actor/__0_0.distcp", "actor/.metadata")]
    aside = store.begin(3)
    write(aside, "weights")
    (aside / "zz.yaml").write_text("a: 1")
    last = store.publish(3, GOOD)
    for file in [last.path / file.relative_to(store.directory / "global_step_2") for file in files]:
        file.write_text("damaged")
    if more:
        (last.path / "zz.yaml").write_text("damaged")
    step, (line,) = selected(store)
    assert step == 2 and line.count(";") == 2 + more and line.endswith("; and more") == more


def test_a_failed_save_names_the_free_space_where_the_disk_tells_it(store, monkeypatch):
    store.begin(1)
    assert "GB were free: full; earlier checkpoints are intact" in str(store.failed(1, OSError("full")))

    def broken(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store_module.shutil, "disk_usage", broken)
    expected = f"step 1 could not be saved in {store.directory}: full; earlier checkpoints are intact"
    assert str(store.failed(1, OSError("full"))) == expected
