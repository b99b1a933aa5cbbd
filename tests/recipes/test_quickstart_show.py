import gzip
import json
import shlex
from pathlib import Path
from statistics import fmean

from hybridrl.report import show as samples
from hybridrl.report.__main__ import check_pages
from tests.scripts import run_script

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"

LAZY, WORKED, CARELESS = "#### 1145", "7+8+0=15; 6+8+1=15; 7+4+1=12\n#### 1255", "7+8+0=15; 6+8+0=14\n#### 1145"


def dump(file: Path, answers: list[str], scores: list[float] | None = None) -> None:
    """Write responses to 767+488, but the first is to 767+489 and thus never right."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scores = scores or [float("1255" in answer) for answer in answers]
    truths = ["1256", *["1255"] * (len(answers) - 1)]
    rows = [
        {"input": f"user: What is 767+{int(truth) - 767}?", "output": answer, "gts": truth, "score": score}
        for answer, truth, score in zip(answers, truths, scores, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def made_up_run(run: Path, *, greedy_after: list[str] | None = None, scores: list[float] | None = None) -> Path:
    """Write seven steps of 4 s after 10 s of start-up and a validation of 1 s; from the third on 9 of 10 are right."""
    metrics = [{"step": 0, "timing_s/start_up": 10.0}, {"step": 0, "timing_s/testing": 1.0}]
    metrics += [
        {"step": step, "timing_s/step": 4.0, "timing_s/gen": 3.0, "response_length/mean": 10.0 * step}
        | {"critic/rewards/mean": 0.25 if step < 3 else fmean(scores or [0, *[1] * 9])}
        for step in range(1, 8)
    ]
    metrics[-1]["timing_s/testing"] = 1.0
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    dump(run / "rollouts" / "1.jsonl", [LAZY, LAZY, WORKED, CARELESS], [0, 0, 1, 0])
    dump(run / "rollouts" / "2.jsonl", [LAZY])
    for step in range(3, 8):
        dump(run / "rollouts" / f"{step}.jsonl", [LAZY, *[WORKED] * 9], scores)
    dump(run / "rollouts" / "8.jsonl", [LAZY])  # left by an earlier, longer run
    after = greedy_after or [LAZY, *[WORKED] * 29]
    dump(run / "samples" / "0.jsonl", [WORKED, LAZY, *[WORKED] * (len(after) - 2)])
    dump(run / "samples" / "7.jsonl", after)
    return run


def show(run: Path, *arguments: str) -> int | str | None:
    return run_script(RECIPE / "show.py", run, *arguments)


def test_the_output_shows_a_problem_that_became_right_and_the_figures(tmp_path, capsys):
    assert show(made_up_run(tmp_path / "run")) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        "What is 767+488? (It is 1255.)",
        "before #### 1145 wrong",
        "after 7+8+0=15; 6+8+1=15; 7+4+1=12 #### 1255 right",
    ]
    assert "mean reward 0.250 0.900" in lines
    assert "share with work shown 0.500 0.900" in lines
    assert "share of those that are right 0.500 1.000" in lines
    assert "tokens 10.0 60.0" in lines  # steps 5 to 7
    assert "accuracy 0.933 0.967" in lines  # 28 and 29 of 30


def test_the_next_commands_are_ones_that_work_without_a_gpu(tmp_path, capsys):
    run = made_up_run(tmp_path / "run")
    for step in (9, 10):
        (run / f"global_step_{step}" / "actor").mkdir(parents=True)
    show(run)
    text = capsys.readouterr().out.replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.partition("To try next")[2].splitlines() if line.startswith("    ")]
    names = [words[1] for words in commands if words[0] == "hybridrl"]
    assert names == ["show", "report", "chat", "sweep", "quickstart", "quickstart"]
    shown, page, asked, swept, *_ = (words[2:] for words in commands if words[0] == "hybridrl")
    assert samples.main(shown) == 0 and "no sample matches" not in capsys.readouterr().out
    assert page == [str(run), "--serve"] and not check_pages([run], None)
    assert asked == [str(run), "device=cpu", "--temperature", "0", "--prompt", "What is 767+488?"]
    keys = [word for word in swept if "=" in word]
    assert keys == ["actor_rollout_ref.actor.optim.lr=1e-4,5e-5", "trainer.default_local_dir=outputs/sweep"]


def test_a_run_that_has_not_learned_exits_with_status_1_and_a_message(tmp_path, capsys):
    assert show(made_up_run(tmp_path / "run", greedy_after=[LAZY, WORKED, LAZY])) == 1
    assert "did not reach the expected result" in capsys.readouterr().out


def test_responses_are_scored_by_the_quickstarts_rule_independent_of_the_reward(tmp_path, capsys):
    assert show(made_up_run(tmp_path / "run", scores=[-30.0, *[-3.0] * 9])) == 0
    assert "0.250   -5.700" in capsys.readouterr().out


def test_the_shares_of_time_add_up_to_the_total(tmp_path, capsys):
    show(made_up_run(tmp_path / "run"), "--seconds", "100", "--warm-start-seconds", "40")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = lines.index("total seconds 100.0 s")
    assert "warm start 40.0 s 40.0%" in lines[start:]
    assert "start-up 10.0 s 10.0%" in lines[start:]
    assert "rollout 21.0 s 21.0%" in lines[start:]
    assert "validation 2.0 s 2.0%" in lines[start:]
    assert "other 27.0 s 27.0%" in lines[start:]
    assert any("90% of the responses show work now, 50% did before" in line for line in lines)


def test_escape_codes_in_a_response_do_not_reach_the_terminal(tmp_path, capsys):
    run = made_up_run(tmp_path / "run")
    dump(run / "samples" / "0.jsonl", [LAZY, "\x1b[2J" + LAZY, *[WORKED] * 28])
    show(run)
    assert "\x1b" not in capsys.readouterr().out


def test_files_that_were_compressed_for_their_size_are_read(tmp_path):
    run = made_up_run(tmp_path / "run")
    for file in [*(run / "samples").iterdir(), *(run / "rollouts").iterdir()]:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert show(run) == 0


def test_a_run_without_two_validations_is_rejected(tmp_path):
    run = made_up_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"step": 0, "timing_s/testing": 1.0}\n')
    assert "nothing to compare" in str(show(run))
