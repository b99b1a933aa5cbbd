import json
import math
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from hybridrl.doctor import __main__ as doctor
from hybridrl.report.show import main
from hybridrl.tracking.console import Terminal, info, printable
from hybridrl.tracking.faults import FAULT_KINDS, recording

# Colors, a title, the clipboard, a link, deleted lines, a reversed text, the C1 forms of these, a lone surrogate.
CODES = "\x1b[31m\x1b]0;t\x07\x1b]52;c;eA==\x07\x1b]8;;http://x\x1b\\\r\x08\x7f\u202e\u2066\u200f\x9b31m\x9d52;c;\x9c\x85\u2028\ud800"
HARMFUL = {character for character in CODES if not " " <= character <= "~"}


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


def test_a_part_of_a_group_is_shown_with_how_the_whole_group_compares(run, capsys):
    assert main([str(run), "--max-reward", "0"]) == 0
    text = capsys.readouterr().out
    assert "2 responses, of which 1 is shown, mean reward 0.5, standard deviation 0.707\n" in text
    assert "equal" not in text


def test_samples_of_one_prompt_are_below_it_once_in_any_order(tmp_path, capsys):
    lengths = [(0, 9), (1, 8), (0, 7), (1, 6), (0, 5)]  # by position
    rows = [sample(3, position, number, 1.0, "x" * size) for number, (position, size) in enumerate(lengths)]
    (tmp_path / "3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main([str(tmp_path), "--sort", "length"])
    text = capsys.readouterr().out
    assert (text.count("user: 0 + 2?"), text.count("user: 1 + 2?")) == (1, 1)
    assert [line for line in text.splitlines() if line.startswith("x")] == ["x" * size for size in (9, 7, 5, 8, 6)]
    assert shown(capsys, tmp_path, "--sort", "length") == ["x" * size for size in (9, 8, 7, 6, 5)]


@pytest.mark.parametrize(
    ("more", "lesson"),
    [
        ({"advantage": 0.0}, "all equal, so that nothing is learned from them"),
        ({"advantage": 0.5}, "all equal"),  # by an estimator that compares with other prompts, or a critic
        ({"advantage": None}, "all equal, from which a group estimator such as GRPO learns nothing"),
    ],
)
def test_what_equal_rewards_teach_is_said_by_the_advantages(tmp_path, capsys, more, lesson):
    rows = [sample(3, 0, number, 1.0, **more) for number in range(2)]
    (tmp_path / "3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main([str(tmp_path)])
    assert f"mean reward 1, standard deviation 0; {lesson}\n" in capsys.readouterr().out


def test_equal_rewards_of_a_validation_teach_nothing_either_way(tmp_path, capsys):
    rows = [sample(3, 0, number, 1.0) for number in range(2)]
    for row in rows:
        del row["episode"]["trained"], row["episode"]["advantage"]
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main([str(tmp_path), "--validation"])
    assert "mean reward 1, standard deviation 0; all equal\n" in capsys.readouterr().out


def test_a_response_that_was_not_scored_says_why(run, capsys):
    main([str(run), "--fault"])
    assert (
        f"sample 1, no score: timeout ({FAULT_KINDS['timeout']}), not trained on, 4 tokens" in capsys.readouterr().out
    )


def test_tokens_are_shown_with_the_largest_difference_of_engine_and_trainer(run, capsys):
    main([str(run), "--tokens"])
    text = capsys.readouterr().out
    assert "seven!\nlargest difference of log-probs, engine and trainer: 0.25" in text


def test_files_of_verl_are_shown_and_grouped_by_their_prompt(tmp_path, capsys):
    rows = [{"input": text, "output": "x", "gts": "1", "score": 1.0, "step": 3} for text in "aab"]
    (tmp_path / "3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(tmp_path / "3.jsonl"), "--group", "--limit", "1"]) == 0
    text = capsys.readouterr().out
    assert (
        "2 responses, mean reward 1, standard deviation 0; all equal, from which a group estimator such as GRPO" in text
    )


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


def harmful(text: str) -> set[str]:
    return {*text} & HARMFUL


@pytest.mark.parametrize("options", [[], ["--group"], ["--tokens"], ["--json"]])
def test_no_text_of_a_sample_changes_the_terminal(tmp_path, capsys, options):
    tokens = {"texts": [CODES], "sampled": [1], "log_probs": [-0.1]}
    known = {"row": CODES, "data_source": CODES, "sample": CODES, "stop": CODES, "fault": CODES, "tokens": tokens}
    record = {"input": CODES, "output": CODES, "gts": CODES, "score": None, "step": 1, CODES: CODES, "episode": known}
    (tmp_path / "1.jsonl").write_text(json.dumps(record) + "\n")
    assert main([str(tmp_path), *options]) == 0
    shown = capsys.readouterr()
    assert not harmful(shown.out + shown.err)
    if options == ["--json"]:
        assert json.loads(shown.out)["output"] == CODES


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_no_error_of_a_run_changes_the_terminal(tmp_path, capsys, options):
    with pytest.raises(RuntimeError), recording(tmp_path):
        raise RuntimeError(f"a {CODES} b")
    assert doctor.command("why", [str(tmp_path), *options]) == 1
    assert not harmful(capsys.readouterr().out)


def test_no_word_of_a_launch_script_changes_the_terminal(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=x "
        "trainer.experiment_name=$'a\\e[31m\\u202eb' own.x=$'\\x9b' 'unknown\x1b[31m=1'\n"
    )
    doctor.command("migrate", [str(tmp_path / "run.sh")])
    shown = capsys.readouterr().out
    assert not harmful(shown)
    assert "trainer.experiment_name='a" in shown


def test_tables_and_messages_are_printable_and_keep_their_styles(capsys):
    table = Table(title=Text(CODES))
    table.add_column(Text(CODES))
    table.add_row(Text(CODES, "bold"))
    Terminal().print(table)
    info(CODES)
    assert not harmful(capsys.readouterr().out)
    console = Terminal(force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(Text("styled", "bold red"))
    assert capture.get() == "\x1b[1;31mstyled\x1b[0m\n"


def test_plain_texts_of_all_languages_stay_as_they_are():
    text = "a\tb\n\u00e9\u4e2d\u6587\u3000\u0627\u0644\U0001f600\u00a0"
    assert printable(text) == text and printable("a\r\nb") == "a\nb"


@pytest.mark.parametrize("order", ["file", "reward", "length"])
def test_a_prompt_of_several_groups_is_shown_once(capsys: pytest.CaptureFixture, tmp_path: Path, order: str) -> None:
    rows = [
        sample(1, n, 0, reward, "r" * n) | {"input": "QP"[n % 2] + "?"} for n, reward in enumerate((1, 0.5, 0, 0.75))
    ]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(tmp_path), "--sort", order]) == 0
    output = capsys.readouterr().out
    assert (output.count("P?"), output.count("Q?"), output.count("sample 0, ")) == (1, 1, 4)


def test_pictures_of_a_prompt_are_shown_by_file_and_size(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    name = f"pictures/{'a' * 16}.jpg"
    images = [{"digest": "a" * 16, "width": 75, "height": 41, "file": name}, {"digest": "b" * 16}]
    rows = [json.dumps(sample(1, 0, number, 1.0) | {"episode": {"images": images}}) + "\n" for number in range(2)]
    (tmp_path / "1.jsonl").write_text("".join(rows))
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"user: 0 + 2?\n{tmp_path / name}: 75 x 41 pixels\npicture {'b' * 16}\nground truth: 4" in text
    assert text.count(name) == 1
