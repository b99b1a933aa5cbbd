import json
from pathlib import Path

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config import load_ppo_config
from hybridrl.config.findings import Findings
from hybridrl.data.prompts import Prompt
from hybridrl.doctor.__main__ import main
from hybridrl.doctor.reward import spread_rows, try_reward

ROWS = [
    {"input": "?", "output": "#### 1", "gts": "1", "score": 1.0, "step": 3},
    {"input": "?", "output": "#### 2", "gts": "1", "score": 1.0, "step": 3},
    {"solution_str": "#### 3", "reward_model": {"ground_truth": "3"}, "data_source": "gsm8k"},
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "long.py").write_text("def compute_score(solution_str): return float(len(solution_str))")
    (tmp_path / "other.py").write_text(
        "def strict(solution_str, ground_truth):\n"
        "    if ground_truth == '3': raise KeyError('three')\n"
        "    return float(solution_str == '#### 2')\n"
    )
    return tmp_path


def report(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, list[dict]]:
    status = main(["reward", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)["findings"]


def causes(findings: list[dict], code: str) -> list[str]:
    return [finding["cause"] for finding in findings if finding["code"] == code]


def test_stored_responses_are_scored_and_compared_with_their_stored_scores(files, capsys):
    status, findings = report(capsys, "--rows", str(files / "rows.jsonl"), "--data-source", "gsm8k")
    assert status == 0
    assert "3 responses in" in causes(findings, "reward.scores")[0]
    assert causes(findings, "reward.scores")[0].endswith("mean 0.6667; 0: 1, 1: 2")
    assert causes(findings, "reward.agreement") == ["1 of 2 scores agree with stored"]
    assert causes(findings, "reward.differs") == ["line 2: 0 here, 1 stored; ground truth '1'; response ends '#### 2'"]


def test_two_reward_files_are_compared_and_faults_are_reported(files, capsys):
    long, other = str(files / "long.py"), f"{files / 'other.py'}:strict"
    _, findings = report(capsys, "--rows", str(files / "rows.jsonl"), "--reward", long, "--against", other)
    assert causes(findings, "reward.constant") == ["every score is 6: a run learns nothing from identical scores"]
    assert causes(findings, "reward.fault.raised") == [
        f'1 of 3 responses have no score from {other}: fault "raised:KeyError", first at line 3'
    ]
    assert causes(findings, "reward.agreement")[-1] == f"0 of 2 scores agree with {other}"


BATCH = (
    "def many(data_sources, solution_strs, ground_truths, extra_infos, bonus=0): return [bonus] * len(solution_strs)"
)


def test_a_batch_function_is_tried_as_a_run_calls_it(files, capsys):
    directory = files / "it's, =odd"
    directory.mkdir()
    (directory / "my batch.py").write_text(BATCH)
    overrides = ["reward.reward_manager.name=batch", "+reward.reward_kwargs.bonus=3"]
    file = f"{directory / 'my batch.py'}:many"
    status, findings = report(capsys, "--rows", str(files / "rows.jsonl"), "--reward", file, *overrides)
    assert status == 0
    assert causes(findings, "reward.scores")[0].endswith("mean 3.0000; 3: 3")


def test_keys_of_rewards_may_be_set(files, capsys):
    key = "reward.custom_reward_function.reward_kwargs.score=5"
    _, findings = report(capsys, "--rows", str(files / "rows.jsonl"), "--data-source", "gsm8k", key)
    assert causes(findings, "reward.scores")[0].endswith("0: 1, 5: 2")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ([], "no reward is built in for data_source "),
        (["trainer.seed=1"], "trainer.seed=1: only keys of rewards can be set here"),
        (["reward.timeot=1"], "unknown key"),
        (["--reward", "missing.py"], "there is no such file"),
        (["reward.reward_manager.name=naiv"], "did you mean naive?"),
    ],
)
def test_rows_that_cannot_be_scored_are_an_error_with_the_reason(files, capsys, arguments, cause):
    status, findings = report(capsys, "--rows", str(files / "rows.jsonl"), *arguments)
    assert (status, [finding["severity"] for finding in findings]) == (1, ["error"])
    assert cause in f"{findings[0]['cause']}; {findings[0]['fix']}"


def test_rows_without_a_response_are_reported_all_at_once(files, capsys):
    (files / "bad.jsonl").write_text('{"gts": "1"}\n{"output": "1"}\n')
    _, findings = report(capsys, "--rows", str(files / "bad.jsonl"))
    text = " ".join(finding["cause"] for finding in findings)
    assert "line 1: no response (output, " in text and "line 2: no ground truth; the row has output" in text


def test_without_rows_the_usage_is_shown():
    with pytest.raises(SystemExit) as ended:
        main(["reward"])
    assert ended.value.code == 2


# -- the reward on a run's rows ----------------------------------------------------------------------------------------


def rows(*pairs: tuple[str, object]) -> list[Prompt]:
    """Data sources with ground truths."""
    return [Prompt(row, [], "?", source, truth, {}) for row, (source, truth) in enumerate(pairs)]


@pytest.fixture
def tried(command: list[str], tokenizer: Qwen2Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Findings about rows with the reward in this source, or with the built-in one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run(source: str | None, *pairs: tuple[str, object], seconds: float = 20, more: tuple[str, ...] = ()):
        own = []
        if source is not None:
            (tmp_path / "reward.py").write_text(source)
            own = [f"reward.custom_reward_function.path={tmp_path}/reward.py"]
        findings = Findings()
        config = load_ppo_config([*command, *own, *more]).reward
        try_reward(config, tokenizer, rows(*pairs), findings, seconds)
        return findings.items

    return run


@pytest.mark.parametrize(
    ("source", "truth"),
    [
        ("openai/gsm8k", "1,234"),
        ("math", r"\frac{1}{2}"),
        ("DigitalLearningGmbH/MATH-lighteval", "{3}"),
        ("aime2024", "33"),
        ("multiple_choice", 2),
        ("searchR1_nq", {"target": ["Paris", "Paris, France"]}),
    ],
)
def test_the_ground_truth_is_stated_as_the_built_in_scorer_reads_it(tried, source: str, truth: object):
    (one,) = tried(None, (source, truth))
    assert (one.code, one.severity) == ("reward.tried", "info")
    assert one.cause.startswith(f"{source}: the ground truth against an empty response: 1 against ")


def test_no_response_is_made_from_tests_and_tasks(tried):
    findings = tried(None, ("countdown", {"target": 24, "numbers": [1, 2, 3, 4]}), ("openai/gsm8k", "1"))
    assert [one.cause.partition(":")[0] for one in findings] == ["countdown", "openai/gsm8k"]
    assert "no response can be made" in findings[0].cause


def test_a_custom_reward_may_read_a_usual_form(tried):
    source = "def compute_score(solution_str, ground_truth): return float(solution_str == f'#### {ground_truth}')"
    (one,) = tried(source, ("mine", "7"))
    assert one.severity == "info" and "1 against 0 on 1 row" in one.cause


def test_a_reward_that_does_not_favour_the_ground_truth_is_a_warning(tried):
    (one,) = tried("def compute_score(solution_str): return 0.5", ("mine", "7"), ("mine", "8"))
    assert (one.code, one.severity) == ("reward.ground-truth", "warning")
    assert "on 2 of 2 rows" in one.cause and "0.5 against 0.5" in one.cause and "ground truth '7'" in one.cause


def test_each_data_source_is_compared_separately(tried):
    source = "def compute_score(data_source, solution_str): return float(data_source == 'a' and bool(solution_str))"
    findings = tried(source, ("a", "1"), ("b", "1"))
    assert [(one.code, one.cause[0]) for one in findings] == [("reward.tried", "a"), ("reward.ground-truth", "b")]


def test_an_exception_is_named_with_its_line_and_what_was_printed_is_kept(tried):
    findings = tried("def compute_score(solution_str):\n    print('here')\n    raise KeyError('boom')", ("a", "1"))
    (one,) = findings
    assert one.code == "reward.fault.raised"
    assert one.cause.startswith("5 of 5 responses have no score: KeyError: 'boom' (") and "reward.py:3)" in one.cause
    assert "here" in Path(one.fix.removeprefix("see what it printed in ")).read_text()


@pytest.mark.parametrize(("returned", "kind"), [("float('nan')", "nan"), ("None", "none"), ("'good'", "type")])
def test_a_value_that_is_no_number_is_named(tried, tmp_path: Path, returned: str, kind: str):
    (one,) = tried(f"def compute_score(solution_str): return {returned}", ("a", "1"))
    assert one.code == f"reward.fault.{kind}"
    assert not list(tmp_path.glob("hybridrl-doctor-*"))  # nothing was printed, so nothing is kept


def test_a_hanging_reward_loses_only_its_own_responses(tried):
    source = "import time\ndef compute_score(solution_str): time.sleep(0 if solution_str else 1000); return 1.0"
    findings = tried(source, ("a", "1"), seconds=2, more=("reward.num_workers=2",))
    assert findings[0].code == "reward.slow"
    # The other process scores all but those that were sent together with it.
    assert findings[0].cause.startswith(("1 of 5 responses had no score after 2 s", "2 of 5"))


def test_a_reward_that_would_run_in_the_driver_is_tried_in_a_process(tried):
    (one,) = tried(
        "import os\ndef compute_score(solution_str): os._exit(3)", ("a", "1"), more=("reward.num_workers=0",)
    )
    assert one.code == "reward.fault.died"


def test_a_file_that_does_not_load_is_an_error(tried):
    (one,) = tried("import no_such_module", ("a", "1"))
    assert (one.code, one.severity) == ("reward.load", "error")
    assert "No module named 'no_such_module'" in one.cause


def test_rewards_that_take_tokens_or_all_responses_at_once_are_called_as_in_a_run(tried):
    tokens = "def compute_score(response_ids): return float(len(response_ids))"
    assert "18 against 0" in tried(tokens, ("a", "1"))[0].cause  # bytes of <answer>1</answer>, the longest form
    batch = "def compute_score(solution_strs): return [float(len(text)) for text in solution_strs]"
    assert tried(batch, ("a", "1"), more=("reward.reward_manager.name=batch",))[0].severity == "info"


def test_rows_are_spread_over_sources_and_over_the_data():
    some = spread_rows(rows(*[("a", n) for n in range(100)], ("b", 0), ("b", 1), ("c", 0)), 8)
    assert [(p.data_source, p.row) for p in some] == [("a", 0), ("a", 50), ("b", 100), ("b", 101), ("c", 102)]
    assert len(spread_rows(rows(*[(str(n), n) for n in range(20)]), 8)) == 20
    assert len(spread_rows(rows(*[("a", n) for n in range(7473)]), 8)) == 8
