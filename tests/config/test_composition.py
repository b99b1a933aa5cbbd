"""Files are composed once for all commands of a process, to which the values of each are applied as Hydra does it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from hybridrl.config import ConfigError, PPOConfig, SFTConfig
from hybridrl.config.compose import CONF, SHIPPED, composed
from hybridrl.config.load import resolve_config
from hybridrl.config.values import holds, tree, value_keys

FILE = CONF / "ppo_trainer.yaml"
ARGUMENTS = [
    ["++trainer.seed=7", "++data.train_files=[a.jsonl,b.jsonl]", "++trainer.logger=[]"],
    ["++actor_rollout_ref.actor.optim.lr=1e-6", "++actor_rollout_ref.actor.optim.lr=2e-6"],
    ["++reward.reward_kwargs={a: {b: 1}}", "++reward.reward_kwargs.a.c=[1, {d: null}]", "++reward.reward_kwargs.a.b=2"],
    ["++trainer.project_name='a, \"b\" {c}'", "++trainer.experiment_name=${trainer.project_name}", "++own.x=on"],
    ["+preset=dapo", "++algorithm.adv_estimator=rloo"],
    ["++own.a=1", "~own", "++own.b=1"],
    ["~trainer.seed"],
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_the_values_of_a_command_are_those_of_hydra_every_time(arguments):
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        expected = compose(config_name=FILE.stem, overrides=arguments)
    for _ in range(2):
        found = composed(FILE, arguments)
        assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
        assert OmegaConf.is_struct(found) == OmegaConf.is_struct(expected)
        OmegaConf.update(found, "trainer.project_name", "changed by its reader")


def test_a_file_that_has_changed_is_read_again(tmp_path):
    file = tmp_path / "mine.yaml"
    for seed in (1, 22):
        file.write_text(f"defaults: [ppo_trainer, _self_]\ntrainer: {{seed: {seed}}}\n")
        assert composed(file, ["++trainer.project_name=a"]).trainer.seed == seed


@pytest.mark.parametrize("argument", ["++trainer.seed=1,2", "++trainer.seed.a.b=[", "+preset=none"])
def test_what_hydra_rejects_is_rejected(argument):
    with pytest.raises(ConfigError, match=r"ppo_trainer\.yaml: |preset=none: there is no such configuration file"):
        composed(FILE, [argument])


MAPPINGS = [
    (schema, key)
    for schema in (PPOConfig, SFTConfig)
    for key in value_keys(schema)
    if holds(tree(schema), f"{key}.any") and key != "distillation.teacher_models"  # a section under each name
]


@pytest.mark.parametrize(("schema", "key"), MAPPINGS, ids=[f"{schema.__name__} {key}" for schema, key in MAPPINGS])
@pytest.mark.parametrize("value", [1, {"inner": {"deeper": "x"}}, None, [1]], ids=str)
def test_a_file_may_name_anything_in_a_mapping(tmp_path: Path, schema: type, key: str, value: Any) -> None:
    values: Any = {"any": value}
    for name in reversed(key.split(".")):
        values = {name: values}
    text = yaml.safe_dump({"defaults": [SHIPPED[schema], "_self_"], **values})
    (tmp_path / "mine.yaml").write_text(text)
    findings = resolve_config(schema, [], "mine", tmp_path, offline=True).findings
    assert not [finding for finding in findings.items if finding.code in ("file", "unknown-key")]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([], ["/a b/run", "/a b/run/rollouts", "/elsewhere"]),
        (["trainer.default_local_dir='/new one'"], ["/new one", "/new one/rollouts", "/elsewhere"]),
        (["trainer.default_local_dir=/n", "trainer.rollout_data_dir=null"], ["/n", None, "/elsewhere"]),
    ],
)
def test_samples_of_a_stored_run_are_not_written_into_its_directory_by_another(tmp_path, command, expected) -> None:
    names = ["default_local_dir", "rollout_data_dir", "validation_data_dir"]
    stored = {
        "default_local_dir": "/a b/run",
        "rollout_data_dir": "/a b/run/rollouts",
        "validation_data_dir": "/elsewhere",
    }
    text = yaml.safe_dump({"defaults": ["ppo_trainer", "_self_"], "trainer": stored})
    (tmp_path / "config.yaml").write_text(text)
    needed = ["data.train_files=a.jsonl", "actor_rollout_ref.model.path=some/model"]
    config = resolve_config(PPOConfig, [*needed, *command], "config", tmp_path, offline=True).config
    assert config is not None and [getattr(config.trainer, name) for name in names] == expected
