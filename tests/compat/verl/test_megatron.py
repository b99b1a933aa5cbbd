"""Keys of verl's Megatron, VeOmni and torchtitan engines: translated, named in a line, or rejected in a sentence."""

import json
from pathlib import Path

import pytest
import transformers

from hybridrl.config import PPOConfig
from hybridrl.config.load import ResolvedConfig, resolve_config
from hybridrl.config.schema import SFTConfig

from ..translation.test_asynchronous import GRPO, NEEDED, accepted, notes, resolved

COMMANDS = Path(__file__).parents[4] / "shared" / "data" / "verl_megatron.jsonl"
ACTOR, REF, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
MEGATRON, LAYERS = f"{ACTOR}.megatron", f"{ACTOR}.megatron.override_transformer_config"

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 1 << 20}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
# A model that a script names -> its family, and the sizes that devices have to divide: heads, heads of keys, experts.
MODELS = {
    "qwen3-235b": (transformers.Qwen3MoeConfig, 64, 4, {"num_experts": 128}),
    "qwen3-30b": (transformers.Qwen3MoeConfig, 32, 4, {"num_experts": 128}),
    "qwen3-8b": (transformers.Qwen3Config, 32, 8, {"intermediate_size": 64}),
    "qwen2.5-7b": (transformers.Qwen2Config, 28, 4, {"hidden_size": 28 * 8, "intermediate_size": 64}),
    "qwen3.5-122b": (transformers.Qwen3_5MoeTextConfig, 32, 2, {"num_experts": 256}),
    "qwen3.5-35b": (transformers.Qwen3_5MoeTextConfig, 16, 2, {"num_experts": 256}),
    "qwen3.5-397b": (transformers.Qwen3_5MoeTextConfig, 32, 2, {"num_experts": 512}),
    "hy-v3": (transformers.HYV3Config, 64, 8, {"num_experts": 192}),
    "moonlight": (transformers.DeepseekV3Config, 16, 16, LATENT | {"n_routed_experts": 64}),
    "nemotron": (transformers.NemotronHConfig, 32, 2, {"n_routed_experts": 128}),
}


def save_model(name: str, directory: Path) -> Path:
    """Write the configuration of a small model, which has the sizes of MODELS; no weights are read."""
    family, heads, keys, sizes = MODELS[name]
    shape = SMALL | {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": 16} | sizes
    family(**shape).save_pretrained(directory)
    (directory / "model.safetensors").touch()
    return directory


LITE = "keys of Megatron-Lite are not translated, as training runs on FSDP2; leave it out"
FSDP, TOKENS = "training runs on FSDP2", "heads that predict several tokens are not supported"
# A script -> the model that it names, and what its errors say; nothing where the command is accepted.
SCRIPTS = {
    "ascend_extras/grpo_trainer/run_qwen3_235b_256k_megatron": ("qwen3-235b", "trainer.device=npu: choose auto"),
    "ascend_extras/grpo_trainer/run_qwen3_5_122b_a10b_32k_megatron": ("qwen3.5-122b",),
    "gpg_trainer/run_qwen3_8b_megatron": ("qwen3-8b",),
    "grpo_trainer/run_hy_v3_megatron": ("hy-v3",),
    "grpo_trainer/run_moonlight_16b_a3b_megatron": ("moonlight",),
    "grpo_trainer/run_qwen2-7b_math_megatron_fsdp": ("qwen2.5-7b",),
    "grpo_trainer/run_qwen3_235b_a22b_megatron": ("qwen3-235b",),
    "grpo_trainer/run_qwen3_5_35b_megatron": ("qwen3.5-35b",),
    "grpo_trainer/run_qwen3_5_397b_megatron": ("qwen3.5-397b",),
    "grpo_trainer/run_qwen3_vl_235b_a22b_megatron": ("",),
    "grpo_trainer/run_qwen3_vl_8b_megatron": ("",),
    "mtp_trainer/run_mimo_7b_mtp_fully_async_megatron_multinode": ("", TOKENS),
    "mtp_trainer/run_mimo_7b_mtp_rl_vllm_sgl_megatron": ("", TOKENS),
    "ppo_trainer/run_qwen3_8b_megatron": ("qwen3-8b",),
    "router_replay/run_qwen3_5_35b_a3b_veomni": ("qwen3.5-35b",
                                                 "router_replay.mode=R2: the experts of the old policy's own"),
    "sft/gsm8k/run_nemotron_nano_v3_megatron": ("nemotron", f"tensor_model_parallel_size=8 and 10 more: {FSDP} only"),
    "sft/gsm8k/run_qwen_megatron_fsdp": ("qwen2.5-7b", f"engine.tensor_model_parallel_size=4 and 6 more: {FSDP} only"),
    "tuning/lora/run_qwen3_30b_a3b_megatron": ("qwen3-30b", "adapters cannot be combined with it"),
}  # fmt: skip


def commands() -> dict[str, dict]:
    lines = COMMANDS.read_text(encoding="utf-8").splitlines() if COMMANDS.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {row["script"].removeprefix("examples/").removesuffix(".sh"): row for row in rows}


def checked(row: dict, model: str, directory: Path) -> ResolvedConfig:
    """A recorded command, with the flags it has, and the model in the directory."""
    schema, section = (SFTConfig, "model") if "sft" in row["module"] else (PPOConfig, MODEL)
    flags = dict(flag.split("=") for flag in row["flags"])
    place = {"directory": Path(flags["--config-path"])} if "--config-path" in flags else {}
    overrides = [*row["overrides"]]
    if model:
        overrides += [f"{section}.path={save_model(model, directory)}"]
        overrides += [f"critic.model.path={directory}"] * any("critic.model" in text for text in overrides)
    return resolve_config(schema, overrides, flags.get("--config-name", ""), offline=True, **place)


@pytest.mark.skipif(not COMMANDS.is_file(), reason="needs verl's command lines next to the project")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_recorded_command_is_accepted_or_rejected_by_name(script: str, tmp_path: Path) -> None:
    row, (model, *reasons) = commands()[script], SCRIPTS[script]
    result = checked(row, model, tmp_path)
    errors = [finding.text for finding in result.findings.errors]
    lines = [finding.text for finding in result.findings.items]
    assert [text for text in errors if not any(reason in text for reason in reasons)] == []
    assert [reason for reason in reasons if not any(reason in text for text in errors)] == []
    if reasons:
        return
    assert result.config is not None
    assert any(FSDP in text for text in lines)
    values = dict(text.lstrip("+").split("=", 1) for text in row["overrides"])
    fsdp = result.config.actor_rollout_ref.actor.fsdp_config
    tensor, expert = (int(values.get(f"{MEGATRON}.{name}_model_parallel_size", 1)) for name in ("tensor", "expert"))
    assert fsdp.tensor_parallel_size == tensor
    assert fsdp.expert_parallel_size == expert
    assert fsdp.ulysses_sequence_parallel_size == int(values.get(f"{MEGATRON}.context_parallel_size", 1))
    assert fsdp.param_offload == (values.get(f"{MEGATRON}.param_offload") == "True")
    for name in ("pipeline_model_parallel_size", "override_transformer_config.moe_z_loss_coeff"):
        said = any(f"{MEGATRON}.{name}" in text and "no effect" in text for text in lines)
        assert said == (values.get(f"{MEGATRON}.{name}", "1") != "1")


@pytest.mark.skipif(not COMMANDS.is_file(), reason="needs verl's command lines next to the project")
def test_every_recorded_command_has_an_expected_outcome() -> None:
    assert commands().keys() == SCRIPTS.keys()


@pytest.mark.parametrize("engine", ["megatron", "fsdp", "fsdp2", "automodel", "veomni", "torchtitan"])
def test_an_engine_is_accepted_with_one_line(engine: str) -> None:
    (note,) = notes(f"model_engine={engine}")
    assert note.startswith("model_engine") and "training runs on FSDP2" in note


def test_an_engine_has_its_line_also_where_the_command_names_all_that_it_would_set() -> None:
    schedules = (f"{part}.optim.lr_scheduler_type=constant" for part in (ACTOR, "critic"))
    assert notes("model_engine=veomni", *schedules) == [
        "model_engine=veomni has no effect: training runs on FSDP2, with that engine's schedule unless the command "
        "names one"
    ]


def test_verl_s_usual_engine_says_nothing_and_an_unknown_one_is_rejected() -> None:
    assert notes("model_engine=dp") == []
    (error,) = resolved("model_engine=mlite").findings.errors
    assert error.text == "model_engine=mlite: " + LITE
    (error,) = resolved("model_engine=no_such").findings.errors
    assert error.text.startswith("model_engine=no_such: there is no such engine here, as training runs on FSDP2")


PLACES = [f"{ACTOR}.model_engine", "critic.model_engine", f"{REF}.model_engine", "actor.model_engine"]
PLACES += [f"{ACTOR}.strategy", "critic.strategy", f"{REF}.strategy", "ref.strategy"]


@pytest.mark.parametrize("place", PLACES)
def test_an_engine_is_accepted_wherever_verl_has_a_key_for_it(place: str) -> None:
    for engine in ("megatron", "automodel", "veomni"):
        found = notes(f"{place}={engine}")
        assert all(FSDP in note for note in found)
        assert any("no effect" in note or "lr_scheduler_type=cosine" in note for note in found)
    (error,) = resolved(f"{place}=mlite").findings.errors
    assert error.text.endswith(f"=mlite: {LITE}")


def test_an_engine_may_be_chosen_for_a_section() -> None:
    (note,) = notes(f"actor@{ACTOR}=megatron_actor", "critic@critic=dp_critic", f"{ACTOR}.strategy=fsdp2")
    assert note.startswith(f"{ACTOR}.model_engine has no effect: training runs on FSDP2")


LITE_SIZES = ("tp=2", "etp=1", "pp=2", "vpp=1", "ep=4", "cp=1", "impl=lite", "impl_cfg.use_thd=True", "model_name=auto")


def test_a_command_of_megatron_lite_is_rejected_in_one_sentence() -> None:
    words = [f"actor@{ACTOR}=mlite_actor", f"ref@{REF}=mlite_ref", "hydra.searchpath=[pkg://verl_mlite.config]"]
    words += [f"{part}.engine.{size}" for size in (*LITE_SIZES, "param_offload=True") for part in (ACTOR, REF)]
    words += [f"+{ACTOR}.optim.override_optimizer_config.offload_fraction=1"]
    (error,) = resolved(*words).findings.errors
    assert error.text.endswith(f" and 18 more: {LITE}") and len(error.keys) == 22


@pytest.mark.parametrize(
    ("engine", "keys", "said"),
    [
        ("megatron", ("tensor_model_parallel_size=8", "use_mbridge=True", "override_transformer_config.a=1"), FSDP),
        ("automodel", ("tp_size=2", "backend_config.attn=te", "distributed_strategy=fsdp2"), FSDP),
        ("mlite", LITE_SIZES, LITE),
    ],
)
def test_supervised_training_by_another_engine_is_rejected_in_one_sentence(engine, keys, said) -> None:
    words = ["model.path=a/b", "data.train_files=x.jsonl", f"engine={engine}", *(f"engine.{key}" for key in keys)]
    words += [f"optim={engine}", "optim.min_lr=1e-6"] if engine != "mlite" else []
    (error,) = resolve_config(SFTConfig, words, "sft_trainer", offline=True).findings.errors
    assert f"engine={engine}, engine.{keys[0]}" in error.text and said in error.text
    assert len(error.keys) == len(words) - 2


@pytest.mark.parametrize("name", ["ppo_megatron_trainer", "fully_async_ppo_megatron_trainer.yaml"])
def test_a_settings_file_of_megatron_is_an_engine_too(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = resolve_config(PPOConfig, [*NEEDED, *GRPO], name, Path("./config"), offline=True)
    assert not result.findings.errors and result.config is not None
    (note, *_) = [finding.text for finding in result.findings.items if finding.code == "ignored-key"]
    assert note.startswith(f"--config-name={name} is verl's, and not read") and note.endswith("training runs on FSDP2")
    missing = resolve_config(PPOConfig, [*NEEDED], name, tmp_path / "mine", offline=True).findings.errors
    assert [error.text for error in missing] == [f"--config-path={tmp_path}/mine: there is no such directory"]


ENGINES = {
    "megatron": ("tensor_model_parallel_size", "expert_model_parallel_size", "context_parallel_size"),
    "veomni": ("", "expert_parallel_size", "ulysses_parallel_size"),
    "torchtitan": ("tensor_parallel_size", "expert_parallel_size", "context_parallel_size"),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_sizes_of_an_engine_are_those_of_fsdp(engine: str) -> None:
    tensor, expert, context = ENGINES[engine]
    words = [f"{engine}.{expert}=4", f"{engine}.{context}=2", f"{engine}.param_offload=true"]
    words += [f"{engine}.{tensor}=2"] * bool(tensor)
    config = accepted(*(f"{part}.{word}" for part in (ACTOR, "critic") for word in words), "critic.enable=true")
    for section, fsdp in (
        (config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.fsdp_config),
        (config.critic, config.critic.fsdp),
    ):
        assert (fsdp.tensor_parallel_size, fsdp.expert_parallel_size) == (2 if tensor else 1, 4)
        assert section.ulysses_sequence_parallel_size == fsdp.ulysses_sequence_parallel_size == 2
        assert fsdp.param_offload and not fsdp.optimizer_offload


def test_a_section_that_is_set_at_once_is_read_as_its_keys() -> None:
    section = f"++{MEGATRON}={{tensor_model_parallel_size:2,override_transformer_config:{{moe_aux_loss_coeff:0.1}}}}"
    assert accepted(section).actor_rollout_ref.actor.fsdp_config.tensor_parallel_size == 2
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    uncompiled = f"{fsdp}.compile_layers: layers are not compiled, with {fsdp}.tensor_parallel_size=2"
    assert notes(section) == [f"{LAYERS}.moe_aux_loss_coeff has no effect: {LOSSES}", uncompiled]


def test_each_size_is_reported_once_and_a_size_of_one_device_not_at_all() -> None:
    sizes = (f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.context_parallel_size=2")
    moved = [finding.text for finding in resolved(*sizes).findings.items if " is now " in finding.text]
    assert moved == [
        f"{MEGATRON}.tensor_model_parallel_size is now {ACTOR}.fsdp_config.tensor_parallel_size",
        f"{MEGATRON}.context_parallel_size=2 is now {ACTOR}.ulysses_sequence_parallel_size=2 "
        f"{MODEL}.use_remove_padding=true",
    ]
    assert notes(f"{MEGATRON}.context_parallel_size=1", f"{MEGATRON}.pipeline_model_parallel_size=1") == []


def test_rows_that_are_shared_are_packed_although_the_command_pads_them() -> None:
    padded = (f"{MODEL}.use_remove_padding=False", f"{MEGATRON}.use_remove_padding=False")
    assert accepted(*padded, f"{MEGATRON}.context_parallel_size=2").actor_rollout_ref.model.use_remove_padding
    assert not accepted(*padded, f"{MEGATRON}.context_parallel_size=1").actor_rollout_ref.model.use_remove_padding


def test_stages_share_one_line_with_all_that_belongs_to_them() -> None:
    (note,) = notes(
        f"{MEGATRON}.pipeline_model_parallel_size=4",
        f"{REF}.megatron.pipeline_model_parallel_size=4",
        f"+{LAYERS}.num_layers_in_first_pipeline_stage=5",
        f"+{LAYERS}.account_for_loss_in_pipeline_split=True",
    )
    assert note == (
        f"{MEGATRON}.pipeline_model_parallel_size, {LAYERS}.num_layers_in_first_pipeline_stage, "
        f"{REF}.megatron.pipeline_model_parallel_size have no effect: the model is not cut into stages; FSDP2 shards "
        "every layer over those devices instead"
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_reference_is_divided_as_the_actor_and_another_size_is_named(engine: str) -> None:
    for size in filter(None, ENGINES[engine]):
        actor = f"{ACTOR}.{engine}.{size}=4"
        same, other = (
            [note for note in notes(actor, f"{REF}.{engine}.{size}={count}") if REF in note] for count in (4, 2)
        )
        assert same == []
        assert [note.partition(" has no effect: the reference")[0] for note in other] == [f"{REF}.{engine}.{size}"]


LOSSES = "losses that balance the experts are not added; a router is trained by the policy loss only"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("moe_aux_loss_coeff=0.01", LOSSES),
        ("moe_z_loss_coeff=0.001", LOSSES),
        ("moe_router_load_balancing_type=aux_loss", LOSSES),
        ("moe_router_bias_update_rate=0.001", "the biases by which a router chooses experts stay as they are"),
        ("moe_expert_capacity_factor=1.5", "no token is dropped"),
        ("attention_dropout=0.1", "dropout and noise are off"),
        ("moe_router_dtype=fp32", "a router computes as the family's code in transformers does"),
        ("recompute_granularity=selective", "model.enable_gradient_checkpointing and model.selective_checkpointing"),
        ("rotary_base=10000", "the model is that of its config.json"),
        ("moe_aux_loss_coeff=0", ""),
        ("moe_router_load_balancing_type=none", ""),
        ("moe_router_bias_update_rate=0", ""),
        ("attention_dropout=0.0", ""),
        ("recompute_granularity=full", ""),
        ("mtp_num_layers=0", ""),
        ("apply_rope_fusion=True", ""),
        ("use_flash_attn=True", ""),
        ("attention_backend=auto", ""),
        ("moe_token_dispatcher_type=alltoall", ""),
        ("moe_grouped_gemm=True", ""),
    ],
)
def test_what_changes_training_has_a_sentence_and_a_kernel_none(override: str, said: str) -> None:
    found = notes(f"+{LAYERS}.{override}")
    assert len(found) == bool(said)
    assert not found or found[0].startswith(f"{LAYERS}.{override.partition('=')[0]} has no effect: {said}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"+{LAYERS}.mtp_num_layers=1", "heads that predict several tokens are not supported"),
        (f"+{LAYERS}.fp8=hybrid", "training in 8 or 4 bits is not supported"),
        (f"{MEGATRON}.no_such_key=1", "it has no counterpart here, as training runs on FSDP2"),
        (f"{ACTOR}.engine.tp=2", LITE),
        (f"{MEGATRON}.qat.enable=true", "training for a quantised model is not supported"),
    ],
)
def test_what_is_not_built_is_rejected_by_name(override: str, said: str) -> None:
    (error,) = resolved(override).findings.errors
    assert error.text.startswith(f"{override.lstrip('+')}: {said}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"{MEGATRON}.expert_tensor_parallel_size=1", ""),
        (f"{MEGATRON}.expert_tensor_parallel_size=2", "an expert is never divided"),
        (f"{MEGATRON}.use_mbridge=True", ""),
        (f"{MEGATRON}.use_dist_checkpointing=True", ""),
        (f"{MEGATRON}.dist_checkpointing_path=/model-mcore", "weights are read from model.path"),
        (f"{MEGATRON}.grad_offload=True", "gradients never outlive an update"),
        (f"{MEGATRON}.override_ddp_config.grad_reduce_in_fp32=False", "gradients are added up over devices in float32"),
        (f"{ACTOR}.veomni.moe_implementation=fused_triton", ""),
        (f"{ACTOR}.veomni.mixed_precision=False", "fsdp_config.dtype is the type of the computation"),
        (f"{ACTOR}.torchtitan.data_parallel_replicate_size=2", "every device has rows, and shards the layers"),
        (f"{ACTOR}.optim.lr_warmup_init=0", ""),
        (f"{ACTOR}.optim.lr_warmup_init=1e-7", "the warm-up begins at 0"),
        (f"{ACTOR}.optim.lr_decay_steps=100", "a schedule spans the whole run"),
        (f"{ACTOR}.optim.weight_decay_incr_style=cosine", "every update has the same weight decay"),
        (f"{ACTOR}.optim.exp_avg_dtype=bf16", "gradients are added up in float32, and moments have the type"),
        (f"{ACTOR}.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True", ""),
    ],
)
def test_a_key_without_effect_has_a_line_where_it_would_have_one_in_verl(override: str, said: str) -> None:
    found = notes(f"++{override}")
    assert len(found) == bool(said)
    assert not found or found[0].startswith(f"{override.partition('=')[0]} has no effect: {said}")


@pytest.mark.parametrize(
    ("words", "ratio"),
    [(("min_lr=2e-6", "lr=2e-5"), 0.1), (("lr=4e-6", "lr_min=1e-6"), 0.25), (("min_lr_factor=0.5",), 0.5)],
)
def test_a_least_learning_rate_becomes_a_share_of_the_largest(words: tuple[str, ...], ratio: float) -> None:
    optim = accepted(*(f"{ACTOR}.optim.{word}" for word in words)).actor_rollout_ref.actor.optim
    assert optim.min_lr_ratio == ratio


@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        (("model_engine=megatron",), "constant"),
        (("model_engine=veomni",), "cosine"),
        (("model_engine=torchtitan",), "linear"),
        (("model_engine=veomni", f"{ACTOR}.optim.lr_scheduler_type=constant"), "constant"),
        (("model_engine=torchtitan", f"{ACTOR}.optim.decay_type=cosine"), "cosine"),
        (("model_engine=megatron", f"{ACTOR}.optim.lr_decay_style=linear"), "linear"),
        (("model_engine=veomni", f"{ACTOR}.optim.lr_decay_style=linear"), "linear"),
        (("model_engine=veomni", f"{ACTOR}.optim.warmup_style=constant"), "constant"),
    ],
)
def test_an_engine_s_usual_schedule_is_kept_unless_the_command_names_one(words, schedule: str) -> None:
    assert accepted(*words).actor_rollout_ref.actor.optim.lr_scheduler_type == schedule


@pytest.mark.parametrize("engine", ["megatron", "veomni"])
def test_router_replay_of_an_engine_is_that_of_the_actor(engine: str) -> None:
    replay = f"{ACTOR}.{engine}.router_replay"
    config = accepted(f"{replay}.mode=R3", f"{replay}.record_file=null", f"{REF}.{engine}.router_replay.mode=disabled")
    assert config.actor_rollout_ref.actor.router_replay.mode == "R3"
    (note,) = notes(f"{REF}.{engine}.router_replay.mode=R3")
    assert note.endswith("has no effect: the reference and the critic choose their own experts")
    (error,) = resolved(f"{replay}.replay_file=/routes").findings.errors
    assert "the experts that were chosen are not written to files" in error.text


def test_the_optimizer_has_the_engines_names() -> None:
    optim = f"{ACTOR}.optim"
    names = (f"{optim}.optimizer=adam", f"{optim}.clip_grad=0.5", f"{optim}.eps=1e-6")
    actor = accepted(*names).actor_rollout_ref.actor
    assert (actor.optim.optimizer, actor.grad_clip) == ("AdamW", 0.5)
    assert actor.optim.override_optimizer_config == {"eps": 1e-6}
    assert accepted(f"{optim}.name=AdamW").actor_rollout_ref.actor.optim.optimizer == "AdamW"


def test_a_family_without_a_plan_is_rejected_with_the_configuration(tmp_path: Path) -> None:
    save_model("nemotron", tmp_path)
    words = (f"{MODEL}.path={tmp_path}", "model_engine=megatron", f"{MEGATRON}.tensor_model_parallel_size=2")
    assert resolved(*words).findings.errors[0].text == (
        f"{ACTOR}.fsdp_config.tensor_parallel_size=2: transformers has no plan of tensor parallelism for the family "
        "nemotron_h; set 1, and shard with FSDP alone"
    )
    assert not resolved(f"{MODEL}.path={tmp_path}", "model_engine=megatron").findings.errors
