"""Presets: each is a valid configuration by itself, and what the command sets wins."""

import pytest

from hybridrl.config.catalog import ESTIMATORS
from hybridrl.config.compose import presets, split_sweep
from hybridrl.config.findings import ConfigError

from .conftest import Load


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_valid_and_sets_an_estimator(load: Load, name: str) -> None:
    loaded = load(f"+preset={name}")
    assert loaded.config.algorithm.adv_estimator in ESTIMATORS
    assert [note for note in loaded.notes if "preset" in note or "unknown" in note] == []
    assert "\n  algorithm." in loaded.changed or name == "ppo"


def test_every_preset_names_its_paper() -> None:
    assert {name for name, comment in presets().items() if "20" not in comment and "17" not in comment} == set()


@pytest.mark.parametrize("word", ["+preset=dapo", "preset=dapo"])
def test_what_the_command_sets_wins_wherever_it_stands(load: Load, word: str) -> None:
    own = "actor_rollout_ref.actor.clip_ratio_high=0.3"
    for words in ([word, own], [own, word]):
        actor = load(*words).config.actor_rollout_ref.actor
        assert (actor.clip_ratio_high, actor.loss_agg_mode) == (0.3, "token-mean")


def test_an_unknown_preset_is_answered_with_the_names(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"preset=dappo: .*choose dapo \| dr_grpo \| grpo"):
        load("+preset=dappo")


def test_presets_can_be_swept() -> None:
    assert split_sweep(["+preset=grpo,gspo", "data.seed=1"]) == (["data.seed=1"], {"+preset": ["grpo", "gspo"]})
