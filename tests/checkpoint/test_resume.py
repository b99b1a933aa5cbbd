"""What a resumed run may change, how it is identified, and its summary."""

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

import hybridrl
from hybridrl.checkpoint.files import write_manifest
from hybridrl.checkpoint.resume import (
    ConfigChange,
    check_changes,
    check_compatible,
    code_fingerprint,
    config_changes,
    data_fingerprint,
    fingerprint,
    matching_run,
    model_fingerprint,
    resume_summary,
)
from hybridrl.checkpoint.store import Checkpoint
from hybridrl.config import ConfigError, load_sft_config
from hybridrl.config.compose import as_yaml, save_config

SMALL = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": True}


@pytest.fixture
def step(tmp_path) -> Path:
    """A checkpoint with an actor, and the model that the run started with."""
    for place in ("saved/global_step_3/actor/huggingface", "model"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text(json.dumps(SMALL))
    return tmp_path / "saved" / "global_step_3"


@pytest.fixture
def config(tmp_path) -> dict:
    optim = {"optimizer": "AdamW", "lr": 1e-6}
    return {
        "data": {"train_files": ["a.jsonl"], "seed": 1, "shuffle": True, "train_batch_size": 8},
        "actor_rollout_ref": {
            "model": {"path": str(tmp_path / "model"), "override_config": {}},
            "actor": {"optim": dict(optim)},
        },
        "critic": {"enable": False, "model": {"path": str(tmp_path / "model")}, "optim": dict(optim)},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"seed": 1, "default_local_dir": "out", "logger": ["console"], "resume_allow": []},
    }


def with_values(config: dict, **values: object) -> dict:
    """Return a copy with keys set: a__b=1 sets a.b."""
    copy = deepcopy(config)
    for key, value in values.items():
        *sections, last = key.split("__")
        section = copy
        for name in sections:
            section = section[name]
        section[last] = value
    return copy


def changed_by(config: dict, step: Path, same_rows: bool = True, **values: object) -> list[ConfigChange]:
    return config_changes(config, with_values(config, **values), step=step, same_rows=same_rows)


def rejection(changed: list[ConfigChange], allow: tuple[str, ...] = (), reset_optimizer: bool = False) -> str:
    with pytest.raises(ConfigError) as error:
        check_changes(changed, list(allow), reset_optimizer, lambda line: None)
    return str(error.value)


def accept(changed: list[ConfigChange], allow: tuple[str, ...] = (), reset_optimizer: bool = False) -> None:
    check_changes(changed, list(allow), reset_optimizer, lambda line: None)


def test_an_unchanged_configuration_has_no_changes_and_nothing_is_logged(config, step):
    logged = []
    check_changes(changed_by(config, step), [], False, logged.append)
    assert logged == []


def test_a_configuration_that_was_written_and_read_again_is_unchanged(tmp_path):
    row = {"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "model.safetensors").touch()
    common = ["trainer.device=cpu", f"model.path={tmp_path}", f"data.train_files={tmp_path / 'rows.jsonl'}"]
    sft = load_sft_config([*common, "optim.lr=1e-7"])
    (tmp_path / "config.yaml").write_text("of an earlier run, readable by everyone")
    save_config(as_yaml(sft), tmp_path / "config.yaml")
    assert (tmp_path / "config.yaml").stat().st_mode & 0o077 == 0
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config_changes(written, asdict(sft), step=tmp_path, same_rows=True) == []
    other = load_sft_config([*common, "optim.lr=2e-7", "optim.optimizer=Muon"])
    logged = [
        (change.key, change.verdict) for change in config_changes(written, asdict(other), step=tmp_path, same_rows=True)
    ]
    assert logged == [("optim.optimizer", "needs_allow"), ("optim.lr", "free")]


def test_every_change_is_logged_by_key_and_most_are_free(config, step):
    logged = []
    changed = changed_by(config, step, data__train_batch_size=16, actor_rollout_ref__actor__optim__lr=2e-6)
    check_changes(changed, [], False, logged.append)
    assert logged[1:] == ["  data.train_batch_size: 8 -> 16", "  actor_rollout_ref.actor.optim.lr: 1e-06 -> 2e-06"]
    assert {change.verdict for change in changed} == {"free"}


def test_a_key_that_one_configuration_lacks_is_a_change_from_or_to_null(config, step):
    del config["data"]["train_batch_size"]
    assert [str(change) for change in changed_by(config, step, data__new_key=5)] == ["data.new_key: null -> 5"]
    assert [str(change) for change in changed_by(with_values(config, data__old_key=[1, 2]), step)] == []
    saved = with_values(config, data__old_key=[1, 2])
    assert [str(change) for change in config_changes(saved, config, step=step, same_rows=True)] == [
        "data.old_key: [1, 2] -> null"
    ]


def test_a_new_key_is_no_change_if_it_is_empty(config, step):
    for empty in ([], None, ""):
        assert changed_by(config, step, data__train_weights=empty) == []
    (change,) = changed_by(config, step, data__train_weights=[2, 1])
    assert (change.key, change.verdict) == ("data.train_weights", "needs_allow")


def test_where_a_run_is_stored_and_how_it_resumes_is_no_change(config, step):
    config = with_values(config, trainer__rollout_data_dir="a")
    moved = {
        "trainer__rollout_data_dir": "b",
        "trainer__default_local_dir": "b",
        "trainer__logger": [],
        "trainer__resume_mode": "resume_path",
        "trainer__resume_from_path": "x",
        "trainer__resume_allow": ["data.seed"],
        "trainer__reset_optimizer": True,
    }
    assert changed_by(config, step, **moved) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.seed", 2),
        ("trainer.seed", 2),
        ("data.shuffle", False),
        ("algorithm.adv_estimator", "rloo"),
        ("actor_rollout_ref.actor.optim.optimizer", "Muon"),
    ],
)
def test_changes_that_make_a_different_run_must_be_allowed(config, step, key, value):
    changed = changed_by(config, step, **{key.replace(".", "__"): value})
    message = rejection(changed)
    assert f"{key}: " in message and f"trainer.resume_allow=[{key}]" in message
    assert "trainer.resume_mode=disable" in message
    accept(changed, (key,))


def test_all_changes_that_must_be_allowed_are_rejected_together_with_the_override(config, step):
    changed = changed_by(config, step, data__seed=2, algorithm__adv_estimator="rloo", data__shuffle=False)
    message = rejection(changed, allow=("data.seed",))
    assert "trainer.resume_allow=[data.seed,data.shuffle,algorithm.adv_estimator]" in message
    assert "data.seed: " not in message
    accept(changed, ("data.seed", "data.shuffle", "algorithm.adv_estimator"))


def test_reset_optimizer_allows_another_optimizer_and_nothing_else(config, step):
    changed = changed_by(config, step, actor_rollout_ref__actor__optim__optimizer="Muon")
    assert "trainer.reset_optimizer=true" in rejection(changed)
    accept(changed, reset_optimizer=True)
    assert "data.seed" in rejection(changed_by(config, step, data__seed=2), reset_optimizer=True)


def test_the_same_rows_under_another_name_are_free_and_others_under_the_same_name_must_be_allowed(config, step):
    (change,) = changed_by(config, step, data__train_files=["b.jsonl"])
    assert change.verdict == "free" and str(change) == "data.train_files: [a.jsonl] -> [b.jsonl] (the same rows)"
    (change,) = changed_by(config, step, same_rows=False)
    assert change.verdict == "needs_allow"
    assert "data.train_files=[a.jsonl] (" in rejection([change])
    (renamed,) = changed_by(config, step, same_rows=False, data__train_files=["b.jsonl"])
    assert renamed.verdict == "needs_allow"


def test_an_allowance_without_effect_is_logged(config, step):
    logged = []
    check_changes([], ["data.sede", "data.seed"], False, logged.append)
    (line,) = logged
    assert line.startswith("trainer.resume_allow has no effect on data.sede;") and "data.seed" in line


def test_a_critic_that_was_not_saved_cannot_be_enabled(config, step):
    message = rejection(changed_by(config, step, critic__enable=True), allow=("critic.enable",))
    assert "critic.enable: false -> true (no critic was saved)" in message
    (step / "critic").mkdir()
    accept(changed_by(config, step, critic__enable=True))


def test_settings_of_a_disabled_critic_are_free(config, step):
    (change,) = changed_by(config, step, critic__optim__optimizer="Muon")
    assert change.verdict == "free"
    (step / "critic").mkdir()
    used = with_values(config, critic__enable=True)
    assert "critic.optim.optimizer" in rejection(changed_by(used, step, critic__optim__optimizer="Muon"))


def test_another_model_of_the_same_shapes_is_free_and_its_weights_are_not_read(config, step, tmp_path):
    other = {**SMALL, "torch_dtype": "float32", "vocab_size": 5}  # settings that only one side has are ignored
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(other))
    (change,) = changed_by(config, step, actor_rollout_ref__model__path=str(tmp_path / "other"))
    assert change.verdict == "free" and change.why == "the weights are the saved ones"
    (hub,) = changed_by(config, step, actor_rollout_ref__model__path="Qwen/Qwen3-8B")
    assert hub.verdict == "free"


def test_a_model_of_other_shapes_is_rejected_with_both_sizes(config, step, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**SMALL, "hidden_size": 128}))
    changed = changed_by(config, step, actor_rollout_ref__model__path=str(tmp_path / "other"))
    message = rejection(changed, allow=("actor_rollout_ref.model.path",))
    assert "actor_rollout_ref.model.path: " in message and "hidden_size 128, saved 64" in message
    assert "trainer.resume_allow=" not in message


def test_an_override_that_changes_shapes_is_rejected(config, step):
    changed = changed_by(config, step, actor_rollout_ref__model__override_config={"num_hidden_layers": 4})
    assert "num_hidden_layers 4, saved 2" in rejection(changed)
    accept(changed_by(config, step, actor_rollout_ref__model__override_config={"attention_dropout": 0.1}))


MODEL = "actor_rollout_ref__model__"


def test_another_adapter_than_the_saved_one_is_rejected(config, step):
    key = "actor_rollout_ref.model.lora_rank"
    full, adapted = (with_values(config, **{f"{MODEL}lora_rank": rank, f"{MODEL}lora_alpha": 16}) for rank in (0, 8))
    assert f"{key}: 0 -> 8 (no adapter was saved)" in rejection(changed_by(full, step, **{f"{MODEL}lora_rank": 8}))
    assert f"{key}: 8 -> 0 (an adapter of rank 8 was saved)" in rejection(
        changed_by(adapted, step, **{f"{MODEL}lora_rank": 0})
    )
    other = rejection(changed_by(adapted, step, **{f"{MODEL}target_modules": ["q_proj"]}), allow=(key,))
    assert "target_modules: null -> [q_proj] (the saved adapter is on other layers)" in other
    accept(changed_by(config, step, **{f"{MODEL}lora_rank": 0}))  # saved before there was LoRA


def test_another_scale_of_the_adapter_must_be_allowed(config, step):
    adapted = with_values(config, **{f"{MODEL}lora_rank": 8, f"{MODEL}lora_alpha": 16})
    changed = changed_by(adapted, step, **{f"{MODEL}lora_alpha": 32})
    assert "trainer.resume_allow=[actor_rollout_ref.model.lora_alpha]" in rejection(changed)
    accept(changed, ("actor_rollout_ref.model.lora_alpha",))


def test_an_adapter_resumes_only_on_the_weights_it_was_trained_on(config, step, tmp_path):
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    known = model_fingerprint(str(tmp_path / "model"))
    (tmp_path / "model").rename(tmp_path / "moved")
    assert model_fingerprint(str(tmp_path / "moved")) == known
    (tmp_path / "moved" / "model.safetensors").write_bytes(b"Weights")
    assert model_fingerprint(str(tmp_path / "moved")) != known
    (step / "config.yaml").write_text(yaml.safe_dump(config))
    saved = Checkpoint(3, step, {"data": "same", "bases": {"actor_rollout_ref.model.path": known}})
    for bases in ({"actor_rollout_ref.model.path": known}, {}):
        check_compatible(saved, config, "same", [], False, lambda line: None, bases)
    other = {"actor_rollout_ref.model.path": model_fingerprint(str(tmp_path / "moved"))}
    with pytest.raises(
        ConfigError, match=r"actor_rollout_ref\.model\.path=.*model: the adapter saved in .* other weights"
    ):
        check_compatible(saved, config, "same", [], False, lambda line: None, other)


def test_a_checkpoint_of_main_sft_is_rejected_with_the_key_that_takes_its_weights(config, step):
    (step / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "x"}, "engine": {}, "optim": {}}))
    write_manifest(step)
    with pytest.raises(ConfigError, match=r"is a checkpoint of main_sft.*actor_rollout_ref\.model\.path=.*/actor"):
        check_compatible(Checkpoint(3, step, {"data": ""}), config, "", [], False, print)


def test_impossible_changes_and_those_to_allow_are_rejected_together(config, step):
    message = rejection(changed_by(config, step, critic__enable=True, data__seed=2))
    assert "no critic was saved" in message and "trainer.resume_allow=[data.seed]" in message


def test_data_is_identified_by_content_and_not_by_name(tmp_path):
    a, b, c, d, e = (tmp_path / name for name in "abcde")
    for path, text in ((a, "one"), (b, "two"), (c, "one"), (d, "onet"), (e, "wo")):
        path.write_text(text)
    known = data_fingerprint([a, b], "prompt", 2)
    assert data_fingerprint([c, b], "prompt", 2) == known
    assert data_fingerprint([b, a], "prompt", 2) != known
    assert data_fingerprint([a, b], "question", 2) != known
    assert data_fingerprint([a], "prompt", 2) != known
    assert data_fingerprint([d, e], "prompt", 2) != known, "a boundary between files counts"
    a.write_text("onE")
    assert data_fingerprint([a, b], "prompt", 2) != known


def test_a_large_file_is_identified_by_size_and_samples(tmp_path):
    mib = 1 << 20

    def identity(size: int, changed: int | None = None) -> str:
        with (tmp_path / "large").open("wb") as file:
            file.truncate(size)
            if changed is not None:
                file.seek(changed)
                file.write(b"x")
        return data_fingerprint([tmp_path / "large"])

    # 127 MiB: 64 samples of 1 MiB, one at every second MiB from the first on.
    known = identity(127 * mib)
    assert identity(127 * mib, mib) == identity(127 * mib, 2 * mib - 1) == known
    for counted in (0, 2 * mib, 127 * mib - 1):
        assert identity(127 * mib, counted) != known
    assert identity(127 * mib + 1) != known
    # 64 MiB are read in full.
    assert identity(64 * mib, mib) != identity(64 * mib)


def test_a_fingerprint_is_the_same_in_every_process():
    code = "import hybridrl.checkpoint.resume as f; print(f.fingerprint({'b': 1, 'a': [2.5, None]}, 'x'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == fingerprint({"a": [2.5, None], "b": 1}, "x")


def test_versions_are_reported_without_importing_the_libraries():
    code = code_fingerprint()
    assert code["hybridrl"] == hybridrl.__version__
    assert code["torch"] == torch.__version__
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert code["commit"] is None or code["commit"].removesuffix("-dirty") == head.stdout.strip()
    quick = "import sys, hybridrl.checkpoint.resume as f; f.code_fingerprint(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", quick], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "vllm", "ray"} & set(loaded)


def test_a_package_outside_a_checkout_has_no_commit(tmp_path):
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a")
    for command in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "unrelated")):
        subprocess.run([*git, *command], check=True)
    package = tmp_path / "venv" / "site-packages" / "hybridrl"
    package.mkdir(parents=True)
    assert code_fingerprint(package)["commit"] is None


def save(run: Path, step: int, fingerprint: str) -> Path:
    directory = run / f"global_step_{step}"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text(json.dumps({"fingerprint": fingerprint}))
    return run


@pytest.mark.parametrize("place", ["project/other", "elsewhere/other"])
def test_a_run_of_the_same_fingerprint_under_another_name_is_found(tmp_path, place):
    other = save(tmp_path / place, 3, "same")
    assert matching_run(tmp_path / "project" / "mine", "same") == other
    assert matching_run(tmp_path / "project" / "mine", "different") is None
    assert matching_run(save(tmp_path / "project" / "mine", 1, "different"), "same") is None, "it has a checkpoint"


def test_the_newest_checkpoint_of_a_run_counts_and_the_furthest_run_is_returned(tmp_path):
    save(save(tmp_path / "p" / "changed", 9, "same"), 10, "different")
    save(tmp_path / "p" / "near", 2, "same")
    far = save(save(tmp_path / "p" / "far", 1, "different"), 3, "same")
    assert matching_run(tmp_path / "p" / "mine", "same") == far


def test_a_damaged_run_is_skipped(tmp_path):
    run = save(tmp_path / "p" / "torn", 4, "same")
    (run / "global_step_4" / "state.json").write_text('{"fingerpr')
    (save(tmp_path / "p" / "list", 9, "same") / "global_step_9" / "state.json").write_text("[]")
    (save(tmp_path / "p" / "odd", 4, "same") / "global_step_4").rename(tmp_path / "p" / "odd" / "global_step_x")
    assert matching_run(tmp_path / "p" / "mine", "same") == tmp_path / "p" / "odd"


def restored(**changed: object) -> str:
    values = {
        "weights": ["actor", "critic"],
        "optimizers": ["actor", "critic"],
        "updates": {"actor": 24, "critic": 12},
        "prompts": 1536,
        "rows": 1024,
        "kl_weight": 0.00125,
        "trackers": ["metrics.jsonl", "wandb run 1a2b"],
    }
    return resume_summary(Path("/runs/a/global_step_12"), 12, **(values | changed))


def test_the_summary_is_one_block_in_which_a_reference_has_neither_optimizer_nor_schedule():
    assert "not restored" not in restored(weights=["actor", "critic", "reference"])
    assert restored().splitlines() == [
        "resuming after step 12, restored from /runs/a/global_step_12",
        "  weights    actor, critic",
        "  optimizer  actor, critic",
        "  schedule   update 24 of actor, update 12 of critic",
        "  prompts    1536 used: resuming at position 512 of 1024 in epoch 1 (from 0)",
        "  KL weight  0.00125",
        "  trackers   metrics.jsonl, wandb run 1a2b",
    ]


def test_what_was_not_restored_is_listed_with_the_reason():
    reset = "trainer.reset_optimizer=true"
    missing = {"optimizer of actor": reset, "schedule of actor": reset, "rollout samples": "none are kept"}
    block = restored(optimizers=["critic"], updates={"critic": 12}, missing=missing)
    done, _, lost = block.partition("not restored\n")
    assert "optimizer           critic\n" in done and "actor" not in done.split("schedule")[1]
    assert [line.split("  ", 2)[1] for line in lost.splitlines()] == list(missing)
    assert lost.count(reset) == 2 and "none are kept" in lost


def test_everything_missing_is_listed():
    block = restored(optimizers=[], updates={}, prompts=None, trackers=[], kl_weight=None)
    done, _, lost = block.partition("not restored\n")
    assert "optimizer" not in done and "KL weight" not in block
    lost = lost.splitlines()
    names = [line.removesuffix("not in the checkpoint").strip() for line in lost]
    of_models = [f"{part} of {model}" for part in ("optimizer", "schedule") for model in ("actor", "critic")]
    assert names == [*of_models, "prompts", "trackers"]
