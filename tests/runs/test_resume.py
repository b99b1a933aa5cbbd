"""What the responses and scores of a step are recognised by, in a run that resumes in it."""

from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import pytest

from hybridrl.checkpoint.store import Checkpoint
from hybridrl.config import ConfigError, PPOConfig, load_ppo_config
from hybridrl.config.compose import as_yaml, save_config
from hybridrl.runs import resume
from hybridrl.runs.resume import Identity, ResumePlan, check_complete, plan_resume
from hybridrl.runs.settings import build_algorithm, engine_fingerprint, score_fingerprint
from tests.sections import keys_of_run

BRIEF = '+reward.functions.brief="~/further.py:brief"'


def config_of(directory: Path, *overrides: str) -> PPOConfig:
    reward = f"reward.custom_reward_function.path={directory}/reward.py"
    return load_ppo_config([*keys_of_run(directory), reward, *overrides])


def fingerprints(directory: Path, *overrides: str, data: str = "rows") -> tuple[str, str]:
    config = config_of(directory, *overrides)
    section = config.actor_rollout_ref
    return engine_fingerprint(section.model, section.rollout), score_fingerprint(config.reward, data)


@pytest.fixture
def saved(tmp_path, monkeypatch) -> tuple[str, str]:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "reward.py").write_text("def compute_score(**row): return 1.0\n")
    (tmp_path / "further.py").write_text("def brief(**row): return 1.0\n")
    return fingerprints(tmp_path, BRIEF)


@pytest.mark.parametrize("file", ["reward.py", "further.py"])
def test_another_reward_changes_what_scores_are_recognised_by_and_not_the_responses(saved, tmp_path, file):
    assert fingerprints(tmp_path, BRIEF) == saved
    (tmp_path / file).write_text("def compute_score(**row): return 2.0\ndef brief(**row): return 2.0\n")
    engine, reward = fingerprints(tmp_path, BRIEF)
    assert engine == saved[0] and reward != saved[1]


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.rollout.dtype=bf16",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.long_prefill_token_threshold=64",
    ],
)
def test_settings_of_the_engine_change_what_responses_are_recognised_by(saved, tmp_path, override):
    engine, _ = fingerprints(tmp_path, BRIEF, override)
    assert engine != saved[0]


def test_what_only_the_update_reads_changes_nothing(saved, tmp_path):
    less = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"
    assert fingerprints(tmp_path, BRIEF, less) == saved


def plan(directory: Path, done: int) -> ResumePlan:
    return ResumePlan(Identity("", "", {}), Checkpoint(done, directory / f"global_step_{done}", {}), {}, steps=4)


def test_a_run_that_is_complete_is_not_trained_with_other_values(saved, tmp_path):
    save_config(as_yaml(config_of(tmp_path)), tmp_path / "config.yaml")
    assert check_complete(config_of(tmp_path), plan(tmp_path, 4), tmp_path)
    assert check_complete(config_of(tmp_path, "trainer.test_freq=3"), plan(tmp_path, 4), tmp_path)
    planned = "actor_rollout_ref.model.enable_gradient_checkpointing=2"
    assert check_complete(config_of(tmp_path, planned), plan(tmp_path, 4), tmp_path)
    with pytest.raises(ConfigError, match=r"trainer.seed=\d+, not 77"):
        check_complete(config_of(tmp_path, "trainer.seed=77"), plan(tmp_path, 4), tmp_path)
    other = config_of(tmp_path, "actor_rollout_ref.actor.optim.lr=0.5")
    assert not check_complete(other, plan(tmp_path, 3), tmp_path)
    with pytest.raises(ConfigError) as raised:
        check_complete(other, plan(tmp_path, 4), tmp_path)
    (said,) = raised.value.lines
    assert f"trainer.default_local_dir={tmp_path}: the run there is complete (4 of 4 steps)" in said
    assert "actor_rollout_ref.actor.optim.lr=1e-06, not 0.5; set another trainer.default_local_dir" in said


@pytest.mark.parametrize(
    ("drop", "rows", "steps", "prompts", "said"),
    [
        ("false", 11, 6, 22, "the last step has 2 prompts instead of 4; data.drop_last=true leaves them out"),
        ("true", 11, 5, 20, None),
        ("false", 8, 4, 16, None),
        ("true", 8, 4, 16, None),
    ],
)
def test_prompts_that_fill_no_step_are_trained_or_left_out_and_said(saved, tmp_path, drop, rows, steps, prompts, said):
    """Two epochs in steps of 4 prompts."""
    wanted = ["data.train_batch_size=4", "trainer.total_epochs=2", f"data.drop_last={drop}"]
    config, messages = config_of(tmp_path, *wanted, "actor_rollout_ref.actor.ppo_mini_batch_size=4"), []
    found = plan_resume(config, build_algorithm(config), rows, rows, tmp_path / "run", messages.append)
    assert (found.steps, found.total_prompts) == (steps, prompts)
    assert messages == ([said] if said else [])


NOW = {name: version(name) for name in ("pillow", "torchvision")}
OTHER_SETTINGS = "rows, or the settings of their pictures, differ from the saved ones"


@pytest.mark.parametrize(
    ("before", "now", "code", "said"),
    [
        (["small"], ["small"], NOW, ""),
        (["small"], ["small"], {}, ""),  # an earlier version of hybridrl did not note them
        (["small"], ["small"], NOW | {"pillow": "1.2"}, f"pictures are read by pillow {NOW['pillow']}, not 1.2, so"),
        ([], [], NOW | {"pillow": "1.2"}, ""),
        (["small"], ["large"], NOW, OTHER_SETTINGS),
        (["small"], [], NOW, OTHER_SETTINGS),
    ],
)
def test_pictures_are_read_with_the_same_settings_and_other_libraries_are_named(
    saved, tmp_path, monkeypatch, before, now, code, said
):
    config, messages = config_of(tmp_path, "algorithm.adv_estimator=grpo", "critic.enable=false"), []

    def plan(*pictures: str) -> ResumePlan:
        return plan_resume(config, build_algorithm(config), 8, 8, tmp_path / "run", messages.append, *pictures)

    state = {"data": plan(*before).identity.data, "prompts": 4, "code": code}
    monkeypatch.setattr(resume, "select_checkpoint", lambda *_: Checkpoint(1, tmp_path / "global_step_1", state))
    monkeypatch.setattr(resume, "contents_to_load", lambda *_: {})
    with pytest.raises(ConfigError, match=OTHER_SETTINGS) if said == OTHER_SETTINGS else nullcontext():
        plan(*now)
    warned = [message for message in messages if "are read by" in message]
    assert [said in message for message in warned] == ([True] if said and said != OTHER_SETTINGS else [])


def test_with_dynamic_sampling_all_prompts_may_be_drawn(saved, tmp_path):
    wanted = ["data.train_batch_size=4", "data.drop_last=true", "algorithm.filter_groups.enable=true"]
    config = config_of(tmp_path, *wanted, "trainer.total_epochs=1", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert plan_resume(config, build_algorithm(config), 11, 11, tmp_path / "run", print).total_prompts == 11
