from pathlib import Path

import pytest

from hybridrl.config.findings import ConfigError

from .conftest import Load, errors_of


def test_weights_are_one_for_each_entry(load: Load) -> None:
    files = "data.train_files=[train.jsonl,train.jsonl]"
    assert load(files, "data.train_weights=[2,1]").config.data.train_weights == [2.0, 1.0]
    with pytest.raises(ConfigError, match=r"data.train_weights=\[2.0, 1.0, 1.0\]: data.train_files has 2 entries"):
        load(files, "data.train_weights=[2,1,1]")
    with pytest.raises(ConfigError, match="must be more than 0"):
        load(files, "data.train_weights=[2,0]")


@pytest.mark.parametrize(
    ("path", "name"),
    [("data.custom_cls.path", "data.custom_cls.name"), ("data.sampler.class_path", "data.sampler.class_name")],
)
def test_a_class_custom_class_needs_both_keys(load: Load, tmp_path, path: str, name: str) -> None:
    (tmp_path / "own.py").touch()
    with pytest.raises(ConfigError, match=f"{path}=own.py: the class in it is not named; set {name}"):
        load(f"{path}=own.py")
    assert f"{name}=Own has no effect without {path}" in load(f"{name}=Own").notes
    with pytest.raises(ConfigError, match="decides by itself which rows are sampled; leave the weights out"):
        load(f"{path}=own.py", f"{name}=Own", "data.train_weights=[1]")


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        (["data.train_weights=[1]"], "both determine the order of rows"),
        (["data.sampler.class_path=own.py", "data.sampler.class_name=Own"], "both determine the order of rows"),
        (["trainer.v1.trainer_mode=colocate_async"], "before all rewards of the one before are known"),
        (["actor_rollout_ref.rollout.over_sample_rate=0.5"], "before all rewards of the one before are known"),
    ],
)
def test_a_curriculum_is_rejected_with_another_order_and_where_epochs_overlap(
    load: Load, tmp_path, keys, cause
) -> None:
    (tmp_path / "own.py").write_text("class Own: pass\n")
    assert load("data.curriculum=off").config.data.curriculum == "off"
    load("data.curriculum=medium")
    errors = errors_of(load, "data.curriculum=easy_first", *keys)
    assert any("data.curriculum=easy_first: " in error and cause in error for error in errors)


def test_off_without_quotes_in_a_file_is_off(load: Load, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {curriculum: off}\n")
    assert load(config_name="mine", config_dir=tmp_path).config.data.curriculum == "off"
