import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config import ConfigError, load_ppo_config
from hybridrl.config.findings import Findings
from hybridrl.data.prompts import Prompt, Prompts
from hybridrl.doctor.__main__ import command
from hybridrl.doctor.full import try_on_rows
from hybridrl.runs.reward_trial import reject_failing_reward, spread_rows
from hybridrl.runs.trials import Subject
from hybridrl.tracking.faults import FAULT_KINDS
from tests.rewards.judge_server import Reply, serving

NULL = {"style": "model", "ground_truth": None}
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
    status = command("rescore", ["--json", *arguments])
    return status, json.loads(capsys.readouterr().out)["findings"]


def causes(findings: list[dict], code: str) -> list[str]:
    return [finding["cause"] for finding in findings if finding["code"] == code]


def test_stored_responses_are_scored_and_compared_with_their_stored_scores(files, capsys):
    status, findings = report(capsys, str(files / "rows.jsonl"), "--data-source", "gsm8k")
    assert status == 0
    assert "3 responses in" in causes(findings, "reward.scores")[0]
    assert causes(findings, "reward.scores")[0].endswith("mean 0.6667; 0: 1, 1: 2")
    assert causes(findings, "reward.agreement") == ["1 of 2 scores agree with stored"]
    assert causes(findings, "reward.differs") == ["line 2: 0 here, 1 stored; ground truth '1'; response ends '#### 2'"]


def test_the_page_about_a_first_reward_shows_what_the_command_prints(tmp_path, doctor):
    """On responses of the same four kinds, as many of each as the page counts."""
    page = (Path(__file__).parents[2] / "docs" / "start.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_reward.py\n.*?)```", page, re.S)
    (shown,) = re.findall(r"```\n(reward\n.*?)  \.\.\.\n```", page, re.S)
    work = "4+3+0=07; 3+2+0=05; 3+4+0=07\n#### "
    kinds = [("#### 7", 0, 147), (f"{work}758", 0, 24), ("#### 757", 1, 1), (f"{work}757", 1, 84)]
    rows = [{"output": text, "score": score} for text, score, count in kinds for _ in range(count)]
    rows = [rows[0], rows[1], rows[-1], *rows[2:-1]]  # the page's first different one is in line 3
    text = "".join(json.dumps({"input": "?", "gts": "757", "step": 1, **row}) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    (tmp_path / "my_reward.py").write_text(code)
    status, output = doctor("rescore", f"{tmp_path}/rows.jsonl", "--reward", f"{tmp_path}/my_reward.py")
    seconds = re.compile(r"in \S+ s \(\S+/s\)")
    assert status == 0
    assert " ".join(seconds.sub("", output).split()).startswith(" ".join(seconds.sub("", shown).split()))


def test_two_reward_files_are_compared_and_faults_are_reported(files, capsys):
    long, other = str(files / "long.py"), f"{files / 'other.py'}:strict"
    _, findings = report(capsys, str(files / "rows.jsonl"), "--reward", long, "--against", other)
    assert causes(findings, "reward.constant") == ["every score is 6: a run learns nothing from identical scores"]
    assert causes(findings, "reward.fault.raised") == [
        f"1 of 3 responses have no score from {other}: raised:KeyError ({FAULT_KINDS['raised']}), first at line 3"
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
    status, findings = report(capsys, str(files / "rows.jsonl"), "--reward", file, *overrides)
    assert status == 0
    assert causes(findings, "reward.scores")[0].endswith("mean 3.0000; 3: 3")


def test_a_group_is_scored_in_one_call_wherever_its_responses_are_in_the_file(files, capsys):
    (files / "sizes.py").write_text(
        "def compute_score(solution_strs): return [len(solution_strs)] * len(solution_strs)"
    )
    groups = [(1, "2 + 2?"), (1, "3 + 3?"), (1, "2 + 2?"), (2, "2 + 2?"), (1, "2 + 2?")]
    rows = [{"input": prompt, "output": "4", "gts": "4", "step": step} for step, prompt in groups]
    (files / "groups.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--reward", str(files / "sizes.py"), "reward.reward_manager.name=group"]
    _, findings = report(capsys, str(files / "groups.jsonl"), *options)
    assert causes(findings, "reward.scores")[0].endswith("mean 2.2000; 1: 2, 3: 3")


def test_keys_of_rewards_may_be_set_and_scores_are_shaped_as_in_a_run(files, capsys):
    key = "reward.custom_reward_function.reward_kwargs.score=5"
    _, findings = report(capsys, str(files / "rows.jsonl"), "--data-source", "gsm8k", key, "reward.scale=2")
    assert causes(findings, "reward.scores")[0].endswith("0: 1, 10: 2")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ([], "set reward.name to one of gsm8k, countdown, "),
        (["reward.name=gsm9k"], "did you mean gsm8k?"),
        (["trainer.seed=1"], "trainer.seed=1: only keys of rewards can be set here"),
        (["reward.timeot=1"], "unknown key"),
        (["--reward", "missing.py"], "there is no such file"),
        (["reward.reward_manager.name=naiv"], "did you mean naive?"),
    ],
)
def test_rows_that_cannot_be_scored_are_an_error_with_the_reason(files, capsys, arguments, cause):
    status, findings = report(capsys, str(files / "rows.jsonl"), *arguments)
    assert (status, [finding["severity"] for finding in findings]) == (1, ["error"])
    assert cause in f"{findings[0]['cause']}; {findings[0]['fix']}"


def test_rows_may_have_json_text_and_with_a_custom_reward_a_truth_of_null(files, capsys):
    source = "def compute_score(ground_truth, extra_info): return (ground_truth is None) + extra_info['level']"
    (files / "own.py").write_text(source)
    truths = [{"reward_model": NULL}, {"reward_model": json.dumps(NULL)}, {"gts": None}]
    rows = [{"output": "1", "extra_info": '{"level": 4}'} | truth for truth in truths]
    (files / "null.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, findings = report(capsys, str(files / "null.jsonl"), "--reward", str(files / "own.py"))
    assert causes(findings, "reward.scores")[0].endswith("mean 5.0000; 5: 3")
    _, findings = report(capsys, str(files / "null.jsonl"), "--data-source", "gsm8k")
    assert "line 1: no ground truth" in findings[0]["cause"]


def test_rows_without_a_response_are_reported_all_at_once(files, capsys):
    (files / "bad.jsonl").write_text('{"gts": "1"}\n{"output": "1"}\n')
    _, findings = report(capsys, str(files / "bad.jsonl"))
    text = " ".join(finding["cause"] for finding in findings)
    assert "line 1: no response (output, " in text and "line 2: no ground truth; the row has output" in text


def test_without_rows_the_usage_is_shown():
    with pytest.raises(SystemExit) as ended:
        command("rescore", [])
    assert ended.value.code == 2


# -- the reward on a run's rows ----------------------------------------------------------------------------------------


def rows(*pairs: tuple[str, object]) -> Prompts:
    """Data sources with ground truths."""
    return Prompts(Prompt(row, [], "?", source, truth, {}) for row, (source, truth) in enumerate(pairs))


@pytest.fixture
def tried(command: list[str], tokenizer: Qwen2Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Findings about rows with the reward in this source, or with the built-in one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run(source: str | None, *pairs: tuple[str, object], seconds: float = 20, more: tuple[str, ...] = (), **others):
        own = []
        if source is not None:
            (tmp_path / "reward.py").write_text(source)
            own = [f"reward.custom_reward_function.path={tmp_path}/reward.py"]
        findings = Findings()
        config = load_ppo_config([*command, *own, *more])
        validation = {"data.val_files": rows(*others["validation"])} if others else {}
        try_on_rows(Subject(config, tokenizer, {"data.train_files": rows(*pairs)} | validation), findings, seconds)
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
def test_the_ground_truth_is_stated_as_the_built_in_scorer_reads_it(tried, source, truth):
    (one,) = tried(None, (source, truth))
    assert (one.code, one.severity) == ("reward.tried", "info")
    assert one.cause.startswith(f"data.train_files, {source}: the ground truth against an empty response: 1 against ")


def test_a_named_reward_is_tried_on_the_result_of_a_whole_solution(tried):
    (one,) = tried(None, ("unknown", "24 + 24 = 48\n#### 48"), ("math", "#### 2"), more=("reward.name=gsm8k",))[:1]
    assert one.cause == "data.train_files, unknown: the ground truth against an empty response: 1 against 0 on 1 row"


def test_rows_of_a_csv_are_scored_by_a_named_reward_and_compared_with_stored_scores(files, capsys):
    (files / "rows.csv").write_text("output,gts,score\n#### 7,007,0\n#### 007,007,0\n")
    _, findings = report(capsys, str(files / "rows.csv"), "reward.name=gsm8k")
    assert causes(findings, "reward.scores")[0].endswith("mean 0.5000; 0: 1, 1: 1")
    (difference,) = causes(findings, "reward.differs")
    assert difference.startswith("row 3: 1 here, 0 stored; ground truth '007'")


def test_no_response_is_made_from_tests_and_tasks(tried):
    findings = tried(None, ("countdown", {"target": 24, "numbers": [1, 2, 3, 4]}), ("openai/gsm8k", "1"))
    places = [one.cause.partition(":")[0] for one in findings]
    assert places == ["data.train_files, countdown", "data.train_files, openai/gsm8k"]
    assert "no response can be made" in findings[0].cause


@pytest.mark.parametrize(
    ("returned", "severity", "parts"),
    [
        ("float(solution_str == f'#### {ground_truth}')", "info", ["1 against 0 on 2 rows"]),
        ("0.5", "warning", ["on 2 of 2 rows", "row 0, ground truth '7', 0.5 against 0.5"]),
    ],
    ids=["a usual form that a custom reward reads", "a reward that does not favour it"],
)
def test_the_score_of_the_ground_truth_is_compared_with_that_of_an_empty_response(tried, returned, severity, parts):
    source = f"def compute_score(solution_str, ground_truth): return {returned}"
    (one,) = tried(source, ("mine", "7"), ("mine", "8"))
    code = {"info": "reward.tried", "warning": "reward.ground-truth"}[severity]
    assert (one.code, one.severity) == (code, severity) and all(part in one.cause for part in parts)


LAST_MARK = """import re
def compute_score(solution_str, ground_truth):
    results = re.findall("#### ?([0-9]*)", solution_str)
    return float({rule})
"""


@pytest.mark.parametrize(
    ("rule", "satisfied"),
    [
        ("results[-1:] == [ground_truth]", []),
        ("ground_truth in results", ["every digit in the format"]),
        ("bool(results)", ["the ground truth of another row", "the format without a result", "every digit"]),
        ("len(solution_str) > 0", ["another row", "the prompt itself", "without a result", "digit", "word 500 times"]),
    ],
)
def test_a_reward_that_a_wrong_response_satisfies_is_a_warning(tried, rule, satisfied):
    truths = [("mine", digit) for digit in "735"]
    findings = [one for one in tried(LAST_MARK.format(rule=rule), *truths) if one.code != "reward.tried"]
    assert [one.code for one in findings] == ["reward.satisfied"] * bool(satisfied)
    for one in findings:
        assert one.cause.count(" (3 of 3 rows, first row 0)") == len(satisfied)
        assert all(name in one.cause for name in satisfied)


def test_a_guess_that_is_right_on_some_rows_satisfies_nothing(tried):
    # The last digit of all is 9.
    findings = tried(LAST_MARK.format(rule="results[-1:] == [ground_truth]"), *[("mine", one) for one in "99"])
    assert [one.code for one in findings] == ["reward.tried"]


@pytest.mark.parametrize(
    ("returned", "code", "said"),
    [
        ("random.random() + bool(solution_str)", "not-deterministic", "row 0, '7'"),
        ("float(solution_str.split()[-1] == ground_truth)", "fault.raised", "first on row 0 with the response ''"),
    ],
    ids=["scores the same response differently", "raises on some responses"],
)
def test_a_reward_that_fails_now_and_then_is_a_warning(tried, returned, code, said):
    source = f"import random\ndef compute_score(solution_str, ground_truth): return {returned}"
    finding = {one.code: one for one in tried(source, ("mine", "7"))}[f"reward.{code}"]
    assert finding.severity == "warning" and said in finding.cause


def test_a_truth_that_is_longer_than_a_response_is_a_warning(tried):
    findings = tried(None, ("math", "x" * 90), more=("data.max_response_length=64",))
    one = next(one for one in findings if one.code == "reward.truth-length")
    start = "data.max_response_length=64: data.train_files, math: the ground truth alone is longer on"
    assert one.text.startswith(start)
    assert one.fix == "set data.max_response_length=214"  # twice "Answer: \\boxed{...}" and the end token


def test_a_reward_that_raises_on_all_rows_of_a_source_is_an_error_which_names_it(tried):
    source = "def compute_score(solution_str, ground_truth): return float(ground_truth.strip() == solution_str)"
    findings = tried(source, ("mine", "7"), validation=[("mine", 7), ("mine", 8)])
    kinds = [(one.code, one.severity) for one in findings]
    assert kinds == [("reward.tried", "info"), ("reward.fault.raised", "error")]
    assert findings[1].cause.startswith("data.val_files, mine: ")
    assert "AttributeError: 'int' object has no attribute 'strip'" in findings[1].cause
    allowed = tried(source, ("mine", 7), more=("reward.on_error=zero",))
    assert [one.severity for one in allowed] == ["warning"]


def test_only_wrong_responses_are_tried_on_rows_whose_truth_is_null(tried):
    source = "def compute_score(solution_str, ground_truth): return 0.5 if ground_truth is None else float('x')"
    (one,) = tried(source, ("a", None), ("a", None))
    assert one.code == "reward.tried" and "only wrong ones were tried" in one.cause


def test_each_data_source_is_compared_separately(tried):
    source = "def compute_score(data_source, solution_str): return float(data_source == 'a' and solution_str == '1')"
    findings = tried(source, ("a", "1"), ("b", "1"))
    assert [(one.code, one.cause[18]) for one in findings] == [("reward.tried", "a"), ("reward.ground-truth", "b")]


def test_an_exception_is_named_with_its_line_and_what_was_printed_is_kept(tried):
    (one,) = tried("def compute_score(solution_str):\n    print('here')\n    raise KeyError('boom')", ("a", "1"))
    assert one.code == "reward.fault.raised"
    assert (
        "10 of 10 responses have no score: an exception was raised: KeyError: 'boom' (" in one.cause
        and "reward.py:3)" in one.cause
    )
    assert "here" in Path(one.fix.rpartition("see what it printed in ")[2]).read_text()


@pytest.mark.parametrize(("returned", "kind"), [("float('nan')", "nan"), ("None", "none"), ("'good'", "type")])
def test_a_value_that_is_no_number_is_named(tried, tmp_path, returned, kind):
    (one,) = tried(f"def compute_score(solution_str): return {returned}", ("a", "1"))
    assert one.code == f"reward.fault.{kind}"
    assert not list(tmp_path.glob("hybridrl-doctor-*"))  # nothing was printed, so nothing is kept


def test_a_hanging_reward_does_not_hang_the_trial(tried):
    source = "import time\ndef compute_score(solution_str): time.sleep(1000); return 1.0"
    (one,) = tried(source, ("a", "1"), ("a", "2"), seconds=2)
    assert one.code == "reward.slow" and one.cause.startswith("11 responses had no score after 2 s")


@pytest.mark.parametrize(
    ("source", "code", "severity", "said"),
    [
        ("import os\ndef compute_score(solution_str): os._exit(3)", "fault.died", "warning", "exit code 3"),
        ("import no_such_module", "load", "error", "No module named 'no_such_module'"),
    ],
    ids=["it ends its process, which is not the driver's", "it does not load"],
)
def test_a_reward_that_gives_no_score_is_named(tried, source, code, severity, said):
    (one,) = tried(source, ("a", "1"), more=("reward.num_workers=0",))
    assert (one.code, one.severity) == (f"reward.{code}", severity) and said in one.cause


def test_rewards_that_take_tokens_or_all_responses_at_once_are_called_as_in_a_run(tried):
    tokens = "def compute_score(response_ids): return -abs(len(response_ids) - 19.0)"
    # bytes of <answer>1</answer>, and the end token that an empty response has too
    assert "0 against -18" in tried(tokens, ("a", "1"))[0].cause
    batch = "def compute_score(solution_strs): return [float(text == '1') for text in solution_strs]"
    assert tried(batch, ("a", "1"), more=("reward.reward_manager.name=batch",))[0].severity == "info"


def test_rows_are_spread_over_sources_and_over_the_data():
    some = spread_rows(rows(*[("a", n) for n in range(100)], ("b", 0), ("b", 1), ("c", 0)))
    assert [(p.data_source, p.row) for p in some[:5]] == [("a", 0), ("b", 100), ("c", 102), ("a", 13), ("b", 101)]
    assert [p.row for p in some[5:]] == [26, 39, 52, 65, 78, 91]
    assert len(spread_rows(rows(*[(str(n), n) for n in range(20)]))) == 20
    assert len(spread_rows(rows(*[(str(n % 20), n) for n in range(200)]))) == 60
    assert len(spread_rows(rows(*[("a", n) for n in range(7473)]))) == 8
    rare = spread_rows(rows(*[("a", n) for n in range(4001)], ("b", 0)))
    assert [p.row for p in rare if p.data_source == "b"] == [4001]


@pytest.fixture
def reject(command: list[str], tokenizer: Qwen2Tokenizer, tmp_path: Path) -> Callable[..., None]:
    """Try a reward, given as source, on rows of one data source, as a run does before it starts."""

    def run(source: str, *truths: str, tokenizer: Qwen2Tokenizer = tokenizer, more=()) -> None:
        (tmp_path / "reward.py").write_text(source)
        config = load_ppo_config([*command, f"reward.custom_reward_function.path={tmp_path}/reward.py", *more])
        prompts = rows(*[("mine", truth) for truth in truths])
        data = {"data.train_files": prompts}
        reject_failing_reward(Subject(config, tokenizer, data), tmp_path / "log")

    return run


def test_a_run_warns_of_its_reward_and_the_next_run_of_a_sweep_repeats_that_and_not_the_trial(reject, tmp_path, capsys):
    source = "print('loaded')\ndef compute_score(solution_str): return 0.5"
    for _ in range(2):
        reject(source, "1", "2")
        warning = "warning: data.train_files, mine: on 2 of 2 rows the ground truth scores no more"
        assert warning in capsys.readouterr().out
    assert (tmp_path / "log").read_text() == "loaded\n"
    reject(f"{source}\n", "1", "2")
    assert (tmp_path / "log").read_text() == "loaded\n" * 2, "the file has changed"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def compute_score(ground_truth): return float(ground_truth + 1)",
         "data.train_files, mine: 10 of 10 responses have no score"),
        ("raise OSError('no licence')", "OSError: no licence"),
    ],
    ids=["it fails on every row of a source", "it does not load"],
)  # fmt: skip
def test_a_run_whose_reward_does_not_load_or_fails_on_every_row_of_a_source_is_rejected(reject, source, said):
    with pytest.raises(ConfigError, match=said):
        reject(source, "1")


def test_a_judge_that_is_away_or_rejects_every_request_stops_a_run_before_it_starts(reject):
    with serving(Reply(status=401, body="no such key")) as server:
        keys = [f"reward.judge.base_url={server.url}", "reward.judge.model=critic", "reward.judge.cache=null"]
        with pytest.raises(ConfigError, match=r"the judge gave no verdict: .* answered 401: 'no such key'"):
            reject("def compute_score(solution_str): return 0.5", "1", more=keys)
    with pytest.raises(ConfigError, match=r"the judge gave no verdict: .* ConnectError"):
        reject("def compute_score(solution_str): return 0.5", "1", more=keys)


def test_one_row_of_several_on_which_the_reward_fails_does_not_stop_a_run(reject, capsys):
    reject(
        "def compute_score(solution_str, ground_truth):\n"
        "    if ground_truth == '1': raise ValueError('no')\n"
        "    return float(ground_truth in solution_str)",
        *("1", "2", "3"),
    )
    assert "warning: data.train_files, mine: 11 of" in capsys.readouterr().out


TAGGED = """
import re
def compute_score(solution_str, ground_truth):
    found = re.findall("<answer>(.*?)</answer>", solution_str)
    return float(bool(found) and found[-1] == ground_truth)
"""


@pytest.mark.parametrize("ends", [False, True], ids=["no end token", "one that ends responses"])
def test_a_reward_is_tried_on_the_text_that_a_run_gives_it(reject, tokenizer, capsys, ends):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<answer>", "</answer>"], special_tokens=True)
    tokenizer.eos_token = "</answer>" if ends else tokenizer.eos_token
    reject(TAGGED, "1", "2", tokenizer=tokenizer)
    printed = " ".join(capsys.readouterr().out.split())
    assert ("on 2 of 2 rows the ground truth scores no more than an empty response" in printed) == ends
    assert ("reward.py: </answer> is left out of what a reward reads" in printed) == ends


@pytest.mark.parametrize("more", [(), ("reward.reward_manager.name=rate_limited",)])
def test_a_token_that_no_response_has_as_text_is_named_if_the_reward_or_a_truth_has_it(reject, capsys, more):
    reject("def compute_score(solution_str): return len(solution_str.split('<|im_start|>')[-1])", "1", more=more)
    reject("def compute_score(solution_str): return 1.0", "1", "2<|im_end|>", "3<|im_end|>", more=more)
    printed = " ".join(capsys.readouterr().out.split())
    assert "/reward.py: <|im_start|> is left out of what a reward reads" in printed
    assert "data.train_files, ground truth of row 1 and 1 more: <|im_end|> is left out" in printed
    assert printed.count("is left out") == 2
