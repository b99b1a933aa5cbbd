import json
from pathlib import Path

import pytest

from hybridrl.config import ConfigError, load_sft_config

from .conftest import Load

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
QUIET = (f"{ROLLOUT}.n=8",)


def errors_of(load: Load, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*QUIET, *overrides)
    return str(caught.value)


def test_an_adapter_that_counts_for_nothing_is_rejected(load: Load) -> None:
    message = f"{MODEL}.lora_alpha=0: the adapter would have no weight; set {MODEL}.lora_alpha=8"
    assert errors_of(load, f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=0") == message


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A checkpoint that was trained through an adapter of rank 4."""
    place = tmp_path / "step" / "actor" / "huggingface"
    place.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "q_proj"], "bias": "none"}
    settings |= {"base_model_name_or_path": str(tmp_path / "model"), "use_dora": False, "rank_pattern": {}}
    (place / "adapter_config.json").write_text(json.dumps(settings))
    return place.parent


def test_keys_under_lora_are_the_flat_ones(load: Load) -> None:
    overrides = ("lora.rank=8", "lora.alpha=32", "lora.target_modules=[q_proj]", "lora.merge=true")
    loaded = load(*QUIET, *(f"{MODEL}.{key}" for key in overrides))
    model = loaded.config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules, model.lora.merge) == (8, 32, ["q_proj"], True)
    assert loaded.notes == [
        f"{MODEL}.lora.{old} is now {MODEL}.{new}"
        for old, new in (("rank", "lora_rank"), ("alpha", "lora_alpha"), ("target_modules", "target_modules"))
    ]


def test_one_value_stands_for_a_list_of_layers_and_null_for_none(load: Load) -> None:
    model = load(*QUIET, f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=q_proj").config.actor_rollout_ref.model
    assert model.target_modules == ["q_proj"] and model.exclude_modules == []


def test_what_has_no_effect_without_a_rank_is_a_warning(load: Load) -> None:
    keys = (
        "lora_alpha=8",
        "target_modules=[q_proj]",
        "exclude_modules=[k_proj]",
        "lora.merge=true",
        "lora.dropout=0.1",
    )
    assert load(*QUIET, *(f"{MODEL}.{key}" for key in keys)).notes == [
        f"{MODEL}.{key} has no effect without {MODEL}.lora_rank" for key in keys
    ]


def test_a_rank_that_no_engine_takes_is_rejected_unless_weights_are_merged(load: Load) -> None:
    found = errors_of(load, f"{MODEL}.lora_rank=513")
    assert found == (
        f"{MODEL}.lora_rank=513: the rollout engine takes adapters up to rank 512; set {MODEL}.lora.merge=true, which "
        "syncs merged weights"
    )
    assert load(*QUIET, f"{MODEL}.lora_rank=513", f"{MODEL}.lora.merge=true").config.actor_rollout_ref.model.lora.merge
    assert load(*QUIET, f"{MODEL}.lora_rank=512").notes == []


def test_the_engine_is_not_set_up_for_lora_by_hand(load: Load) -> None:
    found = errors_of(load, f"{ROLLOUT}.engine_kwargs.vllm={{enable_lora: false, max_lora_rank: 8}}")
    assert "enable_lora, max_lora_rank follow from" in found and "leave them out" in found


def test_a_reference_cannot_become_a_copy_of_an_adapted_policy(load: Load) -> None:
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    found = errors_of(load, f"{MODEL}.lora_rank=8", "actor_rollout_ref.ref.refresh_freq=5", kl)
    assert "set actor_rollout_ref.ref.refresh_freq=-1" in found


def test_a_critic_and_supervised_training_have_no_engine_to_merge_for(load: Load, needed: list[str]) -> None:
    notes = load(*QUIET, "critic.model.lora_rank=8", "critic.model.lora.merge=true").notes
    assert notes == ["critic.model.lora.merge=true has no effect: no rollout engine computes with this model"]
    found: list[str] = []
    load_sft_config([needed[0], "model.path=model", "model.lora_rank=4", "model.lora.merge=true"], report=found.append)
    assert found == ["model.lora.merge=true has no effect: no rollout engine computes with this model"]


def test_an_adapter_to_continue_with_brings_its_own_settings(load: Load, adapter: Path) -> None:
    loaded = load(*QUIET, f"{MODEL}.lora_adapter_path={adapter}", f"{MODEL}.lora_alpha=99")
    model = loaded.config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (4, 6, ["q_proj", "v_proj"])
    assert loaded.notes == [
        f"{MODEL}.lora_adapter_path={adapter}: training continues with rank 4 and lora_alpha 6 on q_proj, v_proj"
    ]


def test_an_adapter_of_another_rank_or_base_is_reported(load: Load, adapter: Path, tmp_path: Path) -> None:
    found = errors_of(load, f"{MODEL}.lora_adapter_path={adapter}", f"{MODEL}.lora_rank=8")
    assert found == f"{MODEL}.lora_rank=8: the adapter {adapter} has rank 4; set {MODEL}.lora_rank=4"
    (tmp_path / "model").rename(tmp_path / "other")
    notes = load(*QUIET, f"{MODEL}.path=other", f"{MODEL}.lora_adapter_path={adapter}").notes
    assert f"it was trained on {tmp_path}/model, and is applied to {tmp_path}/other here" in notes[-1]


@pytest.mark.parametrize(
    "more", [{"use_dora": True}, {"rank_pattern": {"q": 3}}, {"bias": "all"}, {"use_rslora": True}]
)
def test_what_is_more_than_plain_lora_is_rejected(load: Load, adapter: Path, more: dict[str, object]) -> None:
    file = adapter / "huggingface" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    found = errors_of(load, f"{MODEL}.lora_adapter_path={adapter}")
    assert f"it has {next(iter(more))}, and only plain LoRA can be trained" in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the directory has no adapter_config.json, so it is not a LoRA adapter"),
        ("{", "its adapter_config.json cannot be read"),
        ('{"peft_type": "IA3"}', "it is an adapter of the type IA3; only LORA can be trained"),
    ],
)
def test_what_is_no_lora_adapter_is_rejected(load: Load, tmp_path: Path, content: str | None, message: str) -> None:
    (tmp_path / "found").mkdir()
    if content:
        (tmp_path / "found" / "adapter_config.json").write_text(content)
    assert message in errors_of(load, f"{MODEL}.lora_adapter_path=found")
    assert "there is no such directory" in errors_of(load, f"{MODEL}.lora_adapter_path=absent")


def test_an_adapter_is_no_model_and_the_fix_is_reported(load: Load, adapter: Path) -> None:
    for path in (adapter, adapter / "huggingface"):
        found = errors_of(load, f"{MODEL}.path={path}")
        assert "it is a LoRA adapter; name its base model here and the adapter as lora_adapter_path" in found
        assert f"hybridrl merge --local_dir {path}" in found
