import json
import math
from pathlib import Path

import pytest

from hybridrl.show import main


def sample(step: int, position: int, number: int, score: float | None, text: str = "4", **more: object) -> dict:
    """One line of a file of samples: of a prompt by its position, with a number within the prompt."""
    known = {"row": position + 10, "position": position, "sample": number, "sampled_tokens": len(text)}
    record = {"input": f"user: {position} + 2?", "output": text, "gts": "4", "score": score, "step": step, "acc": score}
    return record | {"episode": known | {"stop": "completed", "advantage": 0.5, "trained": True} | more}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps, with two prompts of two samples in the second."""
    tokens = {"ids": [1, 2], "texts": ["seven", "!"], "sampled": [1, 1], "log_probs": [math.log(0.005), -0.1]}
    tokens["train_log_probs"] = [math.log(0.005) + 0.25, -0.1]
    rows = {
        1: [sample(1, 0, 0, 0.0, "first step")],
        2: [
            sample(2, 0, 0, 1.0),
            sample(2, 0, 1, 0.0, "seven!", tokens=tokens, advantage=-1.5),
            sample(2, 1, 0, 1.0, "a longer response"),
            sample(2, 1, 1, None, "five", fault="timeout", trained=False, advantage=None),
        ],
    }
    (tmp_path / "rollouts").mkdir()
    for step, records in rows.items():
        (tmp_path / "rollouts" / f"{step}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return tmp_path


def shown(capsys: pytest.CaptureFixture, *arguments: object) -> list[str]:
    """The responses that a command shows."""
    assert main([*map(str, arguments), "--json"]) == 0
    return [json.loads(line)["output"] for line in capsys.readouterr().out.splitlines() if line]


@pytest.mark.parametrize(
    ("options", "responses"),
    [
        ([], ["4", "seven!", "a longer response", "five"]),
        (["--step", "1"], ["first step"]),
        (["--step", "all", "--row", "10"], ["first step", "4", "seven!"]),
        (["--max-reward", "0"], ["seven!"]),
        (["--min-reward", "0.5"], ["4", "a longer response"]),
        (["--fault"], ["five"]),
        (["--search", "longer"], ["a longer response"]),
        (["--sort", "length", "--limit", "2"], ["a longer response", "seven!"]),
        (["--sort", "advantage", "--limit", "1"], ["seven!"]),
        (["--max-reward", "0", "--group"], ["4", "seven!"]),
        (["--tokens"], ["seven!"]),
        (["--search", "nowhere"], []),
    ],
)
def test_samples_are_chosen_by_the_options(run, capsys, options, responses):
    assert shown(capsys, run, *options) == responses


def test_a_sample_is_shown_with_its_group_and_what_is_known_of_it(run, capsys):
    assert main([str(run), "--max-reward", "0", "--group"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == ["user: 0 + 2?", "ground truth: 4", "2 responses, mean reward 0.5, standard deviation 0.707"]
    assert "sample 1, reward 0, advantage -1.5, 6 tokens, acc 0" in lines


def test_a_response_that_was_not_scored_says_why(run, capsys):
    main([str(run), "--fault"])
    assert "sample 1, no score: timeout, not trained on, 4 tokens" in capsys.readouterr().out


def test_tokens_are_shown_with_the_largest_difference_of_engine_and_trainer(run, capsys):
    main([str(run), "--tokens"])
    text = capsys.readouterr().out
    assert "seven!\nlargest difference of log-probs, engine and trainer: 0.25" in text


def test_files_of_verl_are_shown_and_grouped_by_their_prompt(tmp_path, capsys):
    rows = [{"input": text, "output": "x", "gts": "1", "score": 1.0, "step": 3} for text in "aab"]
    (tmp_path / "3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(tmp_path / "3.jsonl"), "--group", "--limit", "1"]) == 0
    text = capsys.readouterr().out
    assert "2 responses, mean reward 1, standard deviation 0; all equal, so that nothing is learned from them" in text


def test_escape_codes_of_a_response_do_not_reach_the_terminal(tmp_path, capsys):
    row = {"input": "[bold]?", "output": "\x1b[2J[red]", "gts": "1", "score": 0.0, "step": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps(row))
    main([str(tmp_path)])
    assert "\N{REPLACEMENT CHARACTER}[2J[red]" in capsys.readouterr().out


def test_how_many_samples_match_is_said(run, capsys):
    main([str(run), "--limit", "1"])
    assert "1 of 4 samples that match are shown; --limit 0 shows all" in capsys.readouterr().out
    main([str(run), "--step", "1", "--tokens"])
    assert "no sample has tokens: trainer.rollout_tokens" in capsys.readouterr().out


def test_samples_are_found_where_the_configuration_has_them(run, tmp_path, capsys):
    (run / "rollouts").rename(tmp_path / "elsewhere")
    (run / "config.yaml").write_text(f"trainer: {{rollout_data_dir: {tmp_path}/elsewhere}}")
    assert shown(capsys, run, "--step", "1") == ["first step"]


def test_numbers_that_are_none_are_left_out(tmp_path, capsys):
    row = {"input": "?", "output": "\ud800", "gts": "1", "score": float("nan"), "step": 1}
    row["episode"] = {"advantage": "high", "position": [1], "tokens": {"ids": [1], "texts": ["a"], "sampled": [1]}}
    huge = row | {"score": 10**400, "episode": {"sample": 10**400}}
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (row, huge)))
    assert main([str(tmp_path), "--group"]) == 0
    assert capsys.readouterr().out.count("no score: fault") == 2
    assert shown(capsys, tmp_path) == ["\ud800"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist; name the directory of a run"),
        ([".", "--step", "7"], "--step=7: there are no samples of that step; those of steps 1 to 2 are there"),
        ([".", "--step", "x"], "--step=x: there are no samples of that step"),
        ([".", "--validation"], ". has no validation samples; trainer.validation_data_dir keeps them"),
        (["rollouts/1.jsonl", "--step", "7"], "--step=7: rollouts/1.jsonl is the file of one step"),
    ],
)
def test_what_cannot_be_shown_is_rejected_with_what_is_there(run, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(run)
    assert main(arguments) == 2
    assert f"error: {message}" in capsys.readouterr().err
