"""Presets: each is a valid configuration by itself, and what the command sets wins."""

from pathlib import Path

import pytest

from hybridrl.config import PPOConfig
from hybridrl.config.catalog import ESTIMATORS
from hybridrl.config.compose import presets, split_sweep
from hybridrl.config.findings import ConfigError
from hybridrl.config.load import resolve_config

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


PARTS = "PPO with a critic, 1,024 prompts per step, 30 epochs"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], PARTS),
        (["actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=null"], PARTS.removesuffix(", 30 epochs")),
        (["trainer.total_epochs=2"], "PPO with a critic, 1,024 prompts per step"),
        (["data.train_batch_size=1024"], "PPO with a critic, 30 epochs"),  # set by the user, though it is the default
        (["algorithm.adv_estimator=gae"], ""),
        (["+preset=ppo"], ""),
        (["algorithm=grpo"], ""),
        (["trainer.val_only=true", "data.val_files=train.jsonl"], ""),
    ],
)
def test_a_command_without_an_estimator_is_answered_with_the_defaults(
    needed: list[str], words: list[str], parts: str
) -> None:
    findings = resolve_config(PPOConfig, [*needed, *words], "ppo_trainer").findings
    cause = f"algorithm.adv_estimator is not set, so the defaults apply: {parts}"
    fix = "+preset=grpo or algorithm.adv_estimator=grpo trains without a critic"
    assert [finding.text for finding in findings.items if "defaults" in finding.text] == [f"{cause}; {fix}"] * bool(
        parts
    )


def test_a_file_of_the_user_s_is_not_answered_with_the_defaults(needed: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\nalgorithm: {adv_estimator: gae}\n")
    findings = resolve_config(PPOConfig, needed, "mine", tmp_path).findings
    assert findings.items == []
