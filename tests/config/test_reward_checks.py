import pytest

from hybridrl.config import ConfigError

MANAGER, JUDGE, URL = "reward.reward_manager", "reward.judge", "http://127.0.0.1:8001/v1"
JUDGED = [f"{JUDGE}.base_url={URL}", f"{JUDGE}.model=critic"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{MANAGER}.name=dap"], rf"{MANAGER}\.name=dap: choose naive .*; did you mean dapo\?.*importlib"),
        ([f"{MANAGER}.source=importlib"], rf"set {MANAGER}\.module\.path"),
        ([f"{MANAGER}.name=batch"], "the built-in rewards score responses one by one"),
        (["reward.name=gms8k"], r"choose gsm8k \| countdown \| .*; did you mean gsm8k\?"),
        (
            ["reward.name=gsm8k", f"reward.custom_reward_function.path={__file__}"],
            "a built-in and a custom reward for the same",
        ),
        (["reward.clip_range=[1.0]"], "expected the least and the greatest score"),
        (["reward.clip_range=[1.0,-1.0]"], "expected the least and the greatest score"),
        (["reward.scale=0"], "every score would be 0"),
        (["+reward.weights.acc=much"], r"reward\.weights\.acc=much: expected a number"),
        (["+reward.functions.format=format_reward"], r"reward\.functions\.format=.*path/to/file\.py:function"),
        (["reward.sandbox_fusion.url=http://localhost"], "remote sandboxes are not supported"),
        ([f"{JUDGE}.base_url={URL}"], r"the judge's model is not named.* curl http://127\.0\.0\.1:8001/v1/models"),
        ([f"{JUDGE}.base_url=127.0.0.1:8001"], "is not the address of a server.* such as http://127"),
        ([f"{JUDGE}.base_url='http://[::1'"], "is not the address of a server"),
        ([f"{JUDGE}.base_url={URL}/chat/completions"], "names one path too many"),
        (
            [*JUDGED, f"{JUDGE}.template=rubrics"],
            r"choose equivalence \| rubric \| pairwise \| quality .*; did you mean rubric\?",
        ),
        ([*JUDGED, f"{JUDGE}.template=my/template.txt"], "there is no file my/template.txt"),
        ([*JUDGED, f"{JUDGE}.template=train.jsonl"], "does not show the response; add {{response}}"),
        ([*JUDGED, f"{JUDGE}.parse='(yes'"], "is not a regular expression"),
        (
            [*JUDGED, f"{JUDGE}.parse=yes"],
            r"has 0 groups; put the verdict into one group, such as VERDICT: \(yes\|no\)",
        ),
        ([*JUDGED, f"{JUDGE}.scale=[10,1]"], r"expected the least and the greatest verdict; set \[1, 10\]"),
        ([*JUDGED, f"{JUDGE}.scale=[1]"], "expected the least and the greatest verdict"),
        ([*JUDGED, "+reward.functions.judge=mine.py:score"], "the judge of reward.judge has this name"),
        (
            [*JUDGED, f"{MANAGER}.name=batch", f"reward.custom_reward_function.path={__file__}"],
            "batch scores the responses of a step in one call, and a judge each one",
        ),
        ([*JUDGED, f"{JUDGE}.template=pairwise", f"{MANAGER}.name=dapo"], "which only group scores together"),
        ([f"{MANAGER}.name=group"], "the built-in rewards score responses one by one"),
    ],
)
def test_what_cannot_work_is_rejected_with_the_fix(load, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ([f"{JUDGE}.model=critic"], "reward.judge.model has no effect without reward.judge.base_url"),
        ([*JUDGED, f"{JUDGE}.template=pairwise"], f"{MANAGER}.name=group: the judge compares responses"),
        (JUDGED, "reward.timeout=540 instead of 60: the judge may need as long with 4 retries"),
        (["reward.max_rpm=60"], f"reward.max_rpm=60 has no effect without {MANAGER}.name=rate_limited"),
        (["reward.max_concurrent=4"], f"reward.max_concurrent=4 has no effect without {MANAGER}.name=rate_limited"),
        ([f"{MANAGER}.name=rate_limited"], f"{MANAGER}.name=rate_limited: a response whose call fails is left out"),
    ],
)
def test_what_has_no_effect_or_another_one_than_in_verl_is_reported(load, overrides, note):
    assert any(text.startswith(note) for text in load(*overrides).notes)


def test_several_rewards_are_set_by_name(load):
    config = load("+reward.functions.brevity=brevity.py:score", "+reward.weights.brevity=0.5").config.reward
    assert (config.functions, config.weights) == ({"brevity": "brevity.py:score"}, {"brevity": 0.5})


def test_nothing_is_reported_where_nothing_is_set(load):
    assert not [note for note in load().notes if "reward." in note]


def test_the_time_limit_of_a_response_is_at_least_that_of_all_attempts_of_a_judge(load):
    # 3 attempts of 100 s, and 2 waits of at most 60 s.
    keys = [*JUDGED, f"{JUDGE}.timeout=100", f"{JUDGE}.retries=2"]
    assert load(*keys).config.reward.timeout == 420
    assert load(*keys, "reward.timeout=500").config.reward.timeout == 500


def test_with_a_judge_limits_on_calls_have_an_effect_and_verdicts_are_kept_with_the_run(load):
    loaded = load(*JUDGED, "reward.max_rpm=60", "trainer.default_local_dir=mine")
    assert not [note for note in loaded.notes if "max_rpm" in note]
    assert loaded.config.reward.judge.cache == "mine/judge.jsonl"


def test_a_template_with_a_part_for_the_system_needs_one_for_the_user(load, tmp_path):
    (tmp_path / "odd.txt").write_text("system: {{response}}")
    with pytest.raises(ConfigError, match="there is no line that begins with user:"):
        load(*JUDGED, f"{JUDGE}.template=odd.txt")
