from pathlib import Path

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config import load_ppo_config
from hybridrl.config.findings import Finding, Findings
from hybridrl.data.prompts import Prompt
from hybridrl.doctor.reward_trial import spread_rows, try_reward


def rows(*pairs: tuple[str, object]) -> list[Prompt]:
    """Data sources with ground truths."""
    return [Prompt(row, [], "?", source, truth, {}) for row, (source, truth) in enumerate(pairs)]


@pytest.fixture
def tried(command: list[str], tokenizer: Qwen2Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is found of rows with the reward in a file of this source, or with the built-in one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def ask(source: str | None, *pairs: tuple[str, object], seconds: float = 20, more: tuple[str, ...] = ()):
        own = []
        if source is not None:
            (tmp_path / "reward.py").write_text(source)
            own = [f"reward.custom_reward_function.path={tmp_path}/reward.py"]
        findings = Findings()
        config = load_ppo_config([*command, *own, *more]).reward
        try_reward(config, tokenizer, rows(*pairs), findings, seconds)
        return findings.found

    return ask


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
def test_the_ground_truth_is_given_as_the_built_in_scorer_reads_it(tried, source: str, truth: object):
    (one,) = tried(None, (source, truth))
    assert (one.code, one.severity) == ("reward.tried", "information")
    assert one.cause.startswith(f"{source}: the ground truth against an empty answer: 1 against ")


def test_of_tests_and_tasks_no_answer_is_made(tried):
    found = tried(None, ("countdown", {"target": 24, "numbers": [1, 2, 3, 4]}), ("openai/gsm8k", "1"))
    assert [one.cause.partition(":")[0] for one in found] == ["countdown", "openai/gsm8k"]
    assert "no answer can be made" in found[0].cause


def test_a_reward_of_ones_own_may_read_a_usual_form(tried):
    source = "def compute_score(solution_str, ground_truth): return float(solution_str == f'#### {ground_truth}')"
    (one,) = tried(source, ("mine", "7"))
    assert one.severity == "information" and "1 against 0 on 1 row" in one.cause


def test_a_reward_that_tells_no_right_answer_from_none_is_a_warning(tried):
    (one,) = tried("def compute_score(solution_str): return 0.5", ("mine", "7"), ("mine", "8"))
    assert (one.code, one.severity) == ("reward.ground-truth", "warning")
    assert "on 2 of 2 rows" in one.cause and "0.5 against 0.5" in one.cause and "ground truth '7'" in one.cause


def test_each_data_source_is_judged_by_itself(tried):
    source = "def compute_score(data_source, solution_str): return float(data_source == 'a' and bool(solution_str))"
    found = tried(source, ("a", "1"), ("b", "1"))
    assert [(one.code, one.cause[0]) for one in found] == [("reward.tried", "a"), ("reward.ground-truth", "b")]


def test_an_exception_is_named_with_its_line_and_what_was_printed_is_kept(tried):
    found: list[Finding] = tried(
        "def compute_score(solution_str):\n    print('here')\n    raise KeyError('boom')", ("a", "1")
    )
    (one,) = found
    assert one.code == "reward.fault.raised"
    assert one.cause.startswith("5 of 5 answers have no score: KeyError: 'boom' (") and "reward.py:3)" in one.cause
    assert "here" in Path(one.fix.removeprefix("what it printed is in ")).read_text()


@pytest.mark.parametrize(("returned", "kind"), [("float('nan')", "nan"), ("None", "none"), ("'good'", "type")])
def test_what_is_no_number_is_named(tried, tmp_path: Path, returned: str, kind: str):
    (one,) = tried(f"def compute_score(solution_str): return {returned}", ("a", "1"))
    assert one.code == f"reward.fault.{kind}"
    assert not list(tmp_path.glob("hybridrl-doctor-*"))  # nothing was printed, so nothing is kept


def test_a_reward_that_hangs_costs_its_answers_alone(tried):
    source = "import time\ndef compute_score(solution_str): time.sleep(0 if solution_str else 1000); return 1.0"
    found = tried(source, ("a", "1"), seconds=2, more=("reward.num_workers=2",))
    assert found[0].code == "reward.slow"
    # The other process scores all but those that had been handed out with it.
    assert found[0].cause.startswith(("1 of 5 answers had no score after 2 s", "2 of 5"))


def test_a_reward_that_would_run_in_the_driver_is_tried_apart(tried):
    (one,) = tried(
        "import os\ndef compute_score(solution_str): os._exit(3)", ("a", "1"), more=("reward.num_workers=0",)
    )
    assert one.code == "reward.fault.died"


def test_a_file_that_does_not_load_is_refused(tried):
    (one,) = tried("import no_such_module", ("a", "1"))
    assert (one.code, one.severity) == ("reward.load", "refused")
    assert "No module named 'no_such_module'" in one.cause


def test_rewards_that_take_tokens_and_all_answers_at_once_are_called_as_in_a_run(tried):
    tokens = "def compute_score(response_ids): return float(len(response_ids))"
    assert "18 against 0" in tried(tokens, ("a", "1"))[0].cause  # bytes of <answer>1</answer>, the longest form
    batch = "def compute_score(solution_strs): return [float(len(text)) for text in solution_strs]"
    assert tried(batch, ("a", "1"), more=("reward.reward_manager.name=batch",))[0].severity == "information"


def test_rows_are_spread_over_sources_and_over_the_data():
    some = spread_rows(rows(*[("a", n) for n in range(100)], ("b", 0), ("b", 1), ("c", 0)), 8)
    assert [(p.data_source, p.row) for p in some] == [("a", 0), ("a", 50), ("b", 100), ("b", 101), ("c", 102)]
    assert len(spread_rows(rows(*[(str(n), n) for n in range(20)]), 8)) == 20
    assert len(spread_rows(rows(*[("a", n) for n in range(7473)]), 8)) == 8
