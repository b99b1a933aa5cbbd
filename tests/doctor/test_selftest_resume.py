"""The doctor's test of resuming: it kills every kind of process and reports every difference."""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hybridrl.doctor.__main__ import main
from hybridrl.doctor.selftest_resume import MOMENTS, VICTIMS, Kill, Selftest, SelftestRun, differences, draw_kills


def a_run(directory: Path) -> Path:
    """The files that a run of one step writes."""
    records = [{"step": 0, "timing_s/start_up": 9.0}, {"step": 1, "actor/pg_loss": 0.5, "timing_s/step": 1.0}]
    (directory / "samples").mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "samples" / "1.jsonl").write_text('{"output": "a"}\n')
    for model in ("actor", "critic"):
        state = {"model": {"w": torch.arange(4.0)}, "optimizer": {"w": torch.zeros(4)}}
        dcp.save(state, checkpoint_id=directory / "global_step_1" / model)
    return directory


@pytest.fixture
def runs(tmp_path) -> tuple[Path, Path]:
    return a_run(tmp_path / "whole"), a_run(tmp_path / "killed")


LOGGED = '{"step": 1, "actor/pg_loss": 0.5, "timing_s/step": 1.0}\n'


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('"timing_s/step": 1.0', '"timing_s/step": 7.0', []),
        ("0.5", "0.25", ["step 1: actor/pg_loss is 0.25, not 0.5"]),
        (LOGGED, "", ["step 1: actor/pg_loss is None, not 0.5", "step 1: step is None, not 1"]),
    ],
    ids=["timings are ignored", "a different metric is named with its step", "a step was never logged"],
)
def test_metrics_are_compared(runs, old, new, found):
    whole, killed = runs
    (killed / "metrics.jsonl").write_text((killed / "metrics.jsonl").read_text().replace(old, new))
    assert differences(whole, killed, 1) == found


@pytest.mark.parametrize("damage", [lambda file: file.write_text("{}"), Path.unlink])
def test_different_or_absent_samples_are_named(runs, damage):
    whole, killed = runs
    damage(killed / "samples" / "1.jsonl")
    assert differences(whole, killed, 1) == ["step 1: other samples"]


def test_one_bit_of_a_critic_s_moment_is_a_difference(runs):
    whole, killed = runs
    moment = torch.zeros(4)
    moment[2] = -0.0
    state = {"model": {"w": torch.arange(4.0)}, "optimizer": {"w": moment}}
    dcp.save(state, checkpoint_id=killed / "global_step_1" / "critic")
    assert differences(whole, killed, 1) == ["critic: optimizer.w differs"]


def test_kills_are_spread_over_the_steps_and_the_same_for_the_same_seed():
    kills = draw_kills(random.Random(1), 12, steps=12, step_seconds=2.0)
    assert [kill.after for kill in kills] == [*range(12)]
    assert all(0 <= kill.seconds <= 2.0 for kill in kills)
    assert kills == draw_kills(random.Random(1), 12, steps=12, step_seconds=2.0)
    many = draw_kills(random.Random(1), 300, steps=4, step_seconds=2.0)
    assert {kill.moment for kill in many} == set(MOMENTS)
    assert {kill.victim for kill in many} == set(VICTIMS)


def test_a_run_is_killed_with_all_its_processes_while_it_saves(tmp_path):
    """A stand-in for a run: it starts a child, logs step 1 and begins to save."""
    script = tmp_path / "run.py"
    script.write_text(
        "import json, pathlib, subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '100'])\n"
        f"directory = pathlib.Path({str(tmp_path / 'run')!r})\n"
        "directory.mkdir()\n"
        "(directory / 'metrics.jsonl').write_text(json.dumps({'step': 1}) + '\\n' + '{\"step\": 2')\n"
        "(directory / '.global_step_1.writing').mkdir()\n"
        "time.sleep(100)\n"
    )
    run = SelftestRun(["python3", str(script)], tmp_path / "run")
    kill = Kill(after=1, moment="while it is saved", seconds=0.0, victim="everything")
    assert run.reach(kill)
    assert run.last_step() == 1
    run.kill(kill.victim)
    assert run.finish() == -9
    assert len(run.processes) == 2
    assert run.left_running() == []
    assert not run.reach(Kill(5, "in the step", 0.0, "the driver"))


STAND_IN = """
import json, pathlib, sys, time
directory = pathlib.Path(sys.argv[1])
directory.mkdir(exist_ok=True)
metrics, again = directory / "metrics.jsonl", (directory / "again").exists()
(directory / "again").touch()
if again:
    print(f"resuming after step {sys.argv[2]}, restored from there", flush=True)
    sys.exit(0)
print("step 0     1.0s (start-up 1.0)", flush=True)
metrics.write_text("".join(json.dumps({"step": step}) + chr(10) for step in (0, 1, 2, 3)))
time.sleep(100)
"""


@pytest.mark.parametrize(("checkpoint", "lost"), [(3, 0), (2, 1), (0, 3)])
def test_complete_steps_that_a_restarted_run_trains_again_are_counted(tmp_path, checkpoint, lost):
    (tmp_path / "run.py").write_text(STAND_IN)
    test = Selftest([], critic=False, steps=3, directory=tmp_path)
    test.lost = []
    run = SelftestRun(["python3", str(tmp_path / "run.py"), str(tmp_path / "run"), str(checkpoint)], tmp_path / "run")
    assert run.reach(Kill(3, "in the step", 0.0, "the driver"))
    run.kill("everything")
    assert test.finish(run) == -9 and test.lost == []
    assert test.finish(run.restart()) == 0 and test.lost == [lost]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["selftest-resume", "trainer.save_freqq=1"], "trainer.save_freq"), (["nonsense"], "selftest-resume")],
    ids=["a rejected key is named before anything runs", "an unknown command shows the known ones"],
)
def test_what_cannot_run_is_a_usage_error(capsys, words, said):
    assert main(words) == 2
    assert said in "".join(capsys.readouterr())
