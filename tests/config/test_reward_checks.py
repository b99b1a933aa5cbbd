import pytest

from hybridrl.config import ConfigError

MANAGER = "reward.reward_manager"


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
    ],
)
def test_what_cannot_work_is_rejected_with_the_fix(load, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
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
