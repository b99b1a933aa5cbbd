"""What is changed of a model's configuration, and what is said of it."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hybridrl.config import ConfigError
from hybridrl.config.checks.model import CPU_DELTA_SIZES, CPU_HEAD_SIZES, CPU_LATENT, why_not_served
from hybridrl.runs.settings import build_agreement, build_policy_plan

from .conftest import Load, errors_of

KEY = "actor_rollout_ref.model.override_config"


def write(**settings: object) -> None:
    (Path("model") / "config.json").write_text(json.dumps({"max_position_embeddings": 1024, **settings}))


def overrides(load: Load, *keys: str) -> dict:
    return load(*(f"{KEY}.{key}" for key in keys)).config.actor_rollout_ref.model.override_config


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("num_attention_heads=2.5", "a positive whole number"),
        ("vocab_size=null", "a positive whole number"),
        ("max_position_embeddings=[1]", "a positive whole number"),
        ("rope_parameters=yarn", "names and values"),
        ("rope_scaling=4.0", "names and values"),
        ("model_config=[1]", "names and values"),
        ("moe_config=true", "names and values"),
        ("model_type={a: 1}", "a text"),
        ("attention_dropout=.nan", "a number of at least 0"),
    ],
)
def test_a_value_of_another_kind_than_the_models_is_rejected_by_its_key(load, word, expected):
    (line,) = errors_of(load, f"{KEY}.{word}")
    assert line.startswith(f"{KEY}.{word.partition('=')[0]}=")
    assert line.endswith(f": {expected} is expected")


def test_of_a_nested_value_the_rest_stays(load):
    write(text={"a": 1, "b": 2})
    assert overrides(load, "text.b=3") == {"text": {"a": 1, "b": 3}}


def test_verls_form_with_the_values_one_level_below_means_the_same(load):
    assert overrides(load, "model_config.attention_dropout=0.1") == {"attention_dropout": 0.1}
    assert overrides(load, "model_config=null") == {}


def test_devices_that_share_rows_divide_all_devices_and_the_heads(load):
    write(num_attention_heads=6)
    sizes = ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=4", "critic.ulysses_sequence_parallel_size=3"]
    found = errors_of(load, "trainer.n_gpus_per_node=4", "algorithm.adv_estimator=gae", *sizes)
    assert found == [
        "critic.ulysses_sequence_parallel_size=3: must divide the 4 devices and the 6 attention heads of "
        f"critic.model.path={Path('model').absolute()}; set 2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4: must divide the 4 devices and the 6 attention heads "
        f"of actor_rollout_ref.model.path={Path('model').absolute()}; set 2",
    ]


FSDP = "actor_rollout_ref.actor.fsdp_config"
TENSOR, EXPERT = f"{FSDP}.tensor_parallel_size", f"{FSDP}.expert_parallel_size"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([f"{TENSOR}=4"], f"{TENSOR}=4: must divide the 4 devices and the 2 key heads of MODEL; set 2"),
        (
            [f"{TENSOR}=2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"],
            f"actor_rollout_ref.actor.ulysses_sequence_parallel_size=4: must, times {TENSOR}=2, divide the 4 devices "
            "and the 8 attention heads of MODEL; set 2",
        ),
        ([f"{EXPERT}=4"], f"{EXPERT}=4: must divide the 4 devices and the 6 experts of MODEL; set 2"),
        (
            [f"{TENSOR}=2", "actor_rollout_ref.model.lora_rank=4"],
            f"{TENSOR}=2: adapters cannot be combined with it; "
            f"set {TENSOR}=1, or leave out actor_rollout_ref.model.lora_rank",
        ),
        (
            [f"{EXPERT}=2", f"{FSDP}.fsdp_size=2"],
            f"{EXPERT}=2: replicas cannot be combined with it; set {EXPERT}=1, or leave out {FSDP}.fsdp_size",
        ),
    ],
    ids=["key heads", "with slices of rows", "experts", "adapters", "replicas"],
)
def test_layers_and_experts_are_divided_evenly_and_alone(load, words, error):
    write(num_attention_heads=8, num_key_value_heads=2, num_experts=6)
    found = errors_of(load, "trainer.n_gpus_per_node=4", "algorithm.adv_estimator=grpo", *words)
    assert found == [error.replace("MODEL", f"actor_rollout_ref.model.path={Path('model').absolute()}")]


def test_experts_are_divided_with_the_layers_and_a_model_without_has_none(load):
    write(num_attention_heads=8, num_key_value_heads=2, num_local_experts=4)
    config = load("trainer.n_gpus_per_node=4", "algorithm.adv_estimator=grpo", f"{TENSOR}=2").config
    assert config.actor_rollout_ref.actor.fsdp_config.expert_parallel_size == 2
    write(num_attention_heads=8, num_key_value_heads=2)
    (error,) = errors_of(load, "trainer.n_gpus_per_node=4", "algorithm.adv_estimator=grpo", f"{EXPERT}=2")
    assert error.endswith("is not a mixture of experts; set 1")


def test_only_rows_in_one_line_can_be_shared(load):
    size = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    padding = "actor_rollout_ref.model.use_remove_padding"
    assert errors_of(load, "trainer.n_gpus_per_node=2", "algorithm.adv_estimator=grpo", size, f"{padding}=false") == [
        f"{size}: only packed rows can be shared; set {padding}=true"
    ]


def test_either_key_of_an_actor_sets_how_many_devices_share_a_row(load):
    for place in ("actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config"):
        config = load("trainer.n_gpus_per_node=2", f"{place}.ulysses_sequence_parallel_size=2").config
        assert config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size == 2
        assert config.critic.fsdp.ulysses_sequence_parallel_size == 1


@pytest.mark.parametrize(
    ("settings", "keys", "rope"),
    [
        (
            {"rope_theta": 5e5, "rope_scaling": None},
            ["rope_scaling.type=yarn", "rope_scaling.factor=4.0"],
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            ["rope_scaling.rope_type=linear", "rope_scaling.factor=2.0"],
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        ),
        ({"rope_theta": 1e4}, ["rope_theta=20000.0"], {"rope_type": "default", "rope_theta": 2e4}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            ["rope_scaling.factor=8.0"],
            {"rope_type": "linear", "factor": 8.0},
        ),
    ],
)
def test_rotary_settings_are_put_where_they_are_read(load, settings, keys, rope):
    write(**settings)
    assert overrides(load, *keys) == {"rope_parameters": rope}


def test_a_factor_that_is_set_here_stretches_the_limit_too(load):
    with pytest.raises(ConfigError, match="takes 1024 positions, a row may have 1512"):
        load("data.max_prompt_length=1000")
    load("data.max_prompt_length=1000", f"{KEY}.rope_scaling.type=yarn", f"{KEY}.rope_scaling.factor=4.0")


def test_verls_kinds_of_attention_have_no_effect_and_others_are_rejected(load):
    loaded = load(f"{KEY}.attn_implementation=flash_attention_2")
    assert loaded.config.actor_rollout_ref.model.override_config == {}
    assert any("attn_implementation=flash_attention_2 has no effect" in note for note in loaded.notes)
    with pytest.raises(ConfigError, match="attn_implementation=flsh: there is no such attention; leave it out"):
        load(f"{KEY}.attn_implementation=flsh")


def test_a_critic_follows_the_policys_changes_and_nothing_is_said_twice(load):
    loaded = load("algorithm.adv_estimator=gae", f"{KEY}.attn_implementation=eager", f"{KEY}.attention_dropout=0.1")
    assert loaded.config.critic.model.override_config == {"attention_dropout": 0.1}
    assert len([note for note in loaded.notes if "attn_implementation" in note]) == 1


def test_a_router_that_is_to_be_frozen_is_rejected_and_one_that_is_not_passes(load):
    assert overrides(load, "moe_config.freeze_moe_router=false") == {}
    with pytest.raises(ConfigError, match="moe_config: routers cannot be frozen yet"):
        load(f"{KEY}.moe_config.freeze_moe_router=true")


def test_an_auxiliary_loss_has_no_effect(load):
    loaded = load(f"{KEY}.output_router_logits=true", f"{KEY}.router_aux_loss_coef=0.01")
    assert [note for note in loaded.notes if "router" in note] == [
        f"{KEY}.output_router_logits has no effect: routers are trained by the policy loss only",
        f"{KEY}.router_aux_loss_coef has no effect: routers are trained by the policy loss only",
    ]


def test_a_library_in_a_file_is_named_so_that_workers_offline_find_it(load, tmp_path):
    (tmp_path / "mine.py").write_text("")
    model = load("actor_rollout_ref.model.external_lib=[mine.py,my_package.models]").config.actor_rollout_ref.model
    assert model.external_lib == [str(tmp_path / "mine.py"), "my_package.models"]


def test_parameters_in_float16_are_rejected_and_a_computation_in_it_is_not(load):
    key = "actor_rollout_ref.actor.fsdp_config"
    with pytest.raises(ConfigError, match=r"model_dtype=fp16: small updates vanish .* set model_dtype=fp32"):
        load(f"{key}.model_dtype=fp16")
    assert load(f"{key}.dtype=fp16").config.actor_rollout_ref.actor.fsdp_config.dtype == "float16"


ELSEWHERE = ("trainer.device=cuda", "ray_kwargs.ray_init.address=auto")  # GPUs of other machines


ACTOR, POLICY = "actor_rollout_ref.actor", "actor_rollout_ref.model"
COMPILED = f"{ACTOR}.fsdp_config.compile_layers"
CHECKPOINTING, SELECTIVE = f"{POLICY}.enable_gradient_checkpointing", f"{POLICY}.selective_checkpointing"


def compiled(load: Load, *keys: str) -> tuple[bool | None, list[str]]:
    """Whether layers are compiled, and what is reported about it."""
    loaded = load(*keys)
    lines = [note for note in loaded.notes if note.startswith(COMPILED)]
    return loaded.config.actor_rollout_ref.actor.fsdp_config.compile_layers, lines


@pytest.mark.parametrize(
    "reason",
    [
        f"{POLICY}.lora_rank=8",
        f"{POLICY}.use_remove_padding=false",
        f"{ACTOR}.fsdp_config.tensor_parallel_size=2",
        f"{ACTOR}.fsdp_config.expert_parallel_size=2",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.router_replay.mode=R3",
    ],
)
def test_layers_are_compiled_on_cuda_unless_something_rules_it_out(load, reason):
    if "expert" in reason or "R3" in reason:
        write(num_experts=8, num_experts_per_tok=2, num_attention_heads=4)
    keys = (*ELSEWHERE, "trainer.n_gpus_per_node=2")
    assert compiled(load, *keys, reason) == (False, [f"{COMPILED}: layers are not compiled, with {reason}"])
    assert compiled(load, *keys) == (True, [])
    assert compiled(load, *keys, f"{COMPILED}=false") == (False, [])


def test_layers_are_not_compiled_on_cpu(load):
    assert compiled(load) == (False, [])
    made, (line,) = compiled(load, f"{COMPILED}=true")
    assert not made and "compile_layers=true has no effect on CPU" in line


def test_experts_are_replayed_rather_than_layers_compiled(load):
    write(num_experts=8, num_experts_per_tok=2)
    config = load(*ELSEWHERE, f"{ACTOR}.router_replay.mode=auto").config.actor_rollout_ref
    assert (config.actor.router_replay.mode, config.actor.fsdp_config.compile_layers) == ("R3", False)


def test_compiled_layers_recompute_selectively_by_themselves_and_others_in_full(load):
    def recomputed(*keys: str) -> tuple[bool | int | None, list[str]]:
        loaded = load(f"{SELECTIVE}=true", *keys)
        notes = [note for note in loaded.notes if SELECTIVE in note or "compiled selectively" in note]
        return loaded.config.actor_rollout_ref.model.enable_gradient_checkpointing, notes

    assert recomputed(*ELSEWHERE) == (False, [])
    made, (note,) = recomputed(*ELSEWHERE, f"{CHECKPOINTING}=true")
    assert (made, note) == (False, f"{CHECKPOINTING} has no effect in layers compiled selectively")
    made, (note,) = recomputed(*ELSEWHERE, f"{COMPILED}=false")
    full = f"{SELECTIVE}=true: without compiled layers all are recomputed in full; set {COMPILED}=true"
    assert (made, note) == (True, full)
    made, (note,) = recomputed(f"{CHECKPOINTING}=false")
    assert made is False and "has no effect with enable_gradient_checkpointing=false" in note


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("False", False), ("2", 2), ("4", 4), ("null", None), ("", None)]
)
def test_recomputation_is_a_switch_or_every_so_manieth_layer(load, text, value):
    actual = load(f"{CHECKPOINTING}={text}").config.actor_rollout_ref.model
    assert actual.enable_gradient_checkpointing is value
    assert actual.recomputes_every == (1 if value is None else int(value))
    with pytest.raises(
        ConfigError, match=r"enable_gradient_checkpointing=9: choose true \| false \| 2 \| 3 \| 4 \| null"
    ):
        load(f"{CHECKPOINTING}=9")


def test_parameters_in_bfloat16_are_warned_of_at_a_learning_rate_that_they_lose(load):
    actor, critic = "actor_rollout_ref.actor", "critic"
    lost = (f"{actor}.fsdp_config.model_dtype=bf16", f"{critic}.fsdp.model_dtype=bf16")
    of_actor, of_critic = load(*lost, f"{actor}.optim.lr=1e-6", f"{critic}.optim.lr=1e-5").notes
    assert of_actor.startswith(f"{lost[0]} with optim.lr=1e-06: ") and "each above 5.1e-04" in of_actor
    assert of_actor.endswith(f"set {actor}.fsdp_config.model_dtype=fp32, float32 masters of a computation in float32")
    assert of_critic.startswith(f"{lost[1]} with optim.lr=1e-05: ")
    assert load(lost[0], f"{actor}.optim.lr=1e-3").notes == load().notes == []


@pytest.mark.parametrize("lr", [1e-6, 1e-4])
def test_no_element_above_512_times_its_update_moves_in_bfloat16(lr):
    """The warning's rule, by an update of the size of the learning rate of every positive bfloat16."""
    weights = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    moved = (weights.double() - lr).to(torch.bfloat16) != weights
    assert float(weights[moved].max()) <= 512 * lr < 4 * float(weights[moved].max())


def test_the_reference_is_sharded_as_the_policy_unless_it_is_said(load):
    key = "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
    section = load(f"actor_rollout_ref.actor.{key}=A").config.actor_rollout_ref
    assert section.ref.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap == ["A"]
    section = load(f"actor_rollout_ref.actor.{key}=A", f"actor_rollout_ref.ref.{key}=B").config.actor_rollout_ref
    assert section.ref.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap == ["B"]


def test_code_of_a_model_that_is_not_trusted_is_reported_before_it_is_wanted(load):
    write(model_type="nobodys_model", auto_map={"AutoConfig": "configuration.Nobody"})
    assert errors_of(load) == [
        "actor_rollout_ref.model.path=model: its config.json names Python files of the model (auto_map), which run "
        "only if they are trusted; read them, then set actor_rollout_ref.model.trust_remote_code=true"
    ]
    load("actor_rollout_ref.model.trust_remote_code=true")
    write(model_type="phi3", auto_map={"AutoConfig": "configuration_phi3.Phi3Config"})
    notes = load().notes  # transformers has this family itself, and then reads no file of the model's
    assert any("(auto_map), which transformers' own code replaces; saved models do not name them" in x for x in notes)


@pytest.mark.parametrize("settings", [{"hidden_size": 64, "num_attention_heads": 4}, {"head_dim": 16}])
def test_a_head_size_that_the_engine_on_cpu_lacks_is_rejected(load, settings):
    write(**settings)
    assert errors_of(load, "trainer.device=cpu") == [
        "actor_rollout_ref.model.path=model: its attention heads have size 16, and vLLM on CPU supports 32, 64, "
        "80, 96, 112, 128, 160, 192, 224, 256, 512; use another model, or a GPU"
    ]
    load("trainer.device=cuda", "ray_kwargs.ray_init.address=auto")
    load("trainer.device=cpu", "actor_rollout_ref.rollout.name=sglang")  # which has any size


def test_head_sizes_on_cpu_are_those_of_vllm():
    backend = pytest.importorskip("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    assert list(CPU_HEAD_SIZES) == backend.get_supported_head_sizes()


def test_latent_attention_has_no_heads_of_one_size(load):
    write(hidden_size=64, num_attention_heads=4, kv_lora_rank=512)
    load("trainer.device=cpu")


@pytest.mark.parametrize(
    ("settings", "said", "supported"),
    [
        ({"kv_lora_rank": 48, "qk_rope_head_dim": 16, "head_dim": 16}, "kv_lora_rank is 48", "512"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 32}, "qk_rope_head_dim is 32", "64"),
        ({"linear_key_head_dim": 32, "linear_value_head_dim": 32}, "head_dim is 32", "64, 128"),
        ({"linear_key_head_dim": 64}, "linear_value_head_dim is 128", "64"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3", "4"),
    ],
)
def test_a_size_for_which_the_engine_on_cpu_has_no_kernel_is_rejected(load, settings, said, supported):
    write(**settings)
    (error,) = errors_of(load, "trainer.device=cpu")
    words = f"{said}, and vLLM on CPU supports {supported};"
    assert words in error and error.endswith("; use another model, or a GPU")
    load("trainer.device=cuda", "ray_kwargs.ray_init.address=auto")
    assert words in why_not_served(settings, 8, device="cpu"), "also of a hub model, whose settings are read later"


def test_sizes_of_latents_and_of_a_delta_rule_on_cpu_are_those_of_vllm():
    backend = pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla").CPUMLABackend
    assert backend.get_supported_head_sizes() == [sum(CPU_LATENT)]
    platform = pytest.importorskip("vllm.platforms").current_platform
    if not platform.is_cpu():
        pytest.skip("vLLM was not built for CPUs")
    platform.import_kernels()
    found = []
    for size in range(32, 288, 32):
        heads, few = torch.zeros(1, 2, 1, size, dtype=torch.bfloat16), torch.zeros(1, 2, 1)
        ends, places = torch.tensor([0, 2], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        given = (heads, heads, heads, few, few.bfloat16(), torch.zeros(1, 1, size, size), True, ends, False, True)
        with suppress(RuntimeError):
            torch.ops._C.chunk_gated_delta_rule_cpu(*given, places, 1e-5)
            found.append(size)
    assert found == list(CPU_DELTA_SIZES)


CLUSTER = "ray_kwargs.ray_init.address=auto"  # whose GPUs are not known
DELTA = {"architectures": ["Qwen3_5ForCausalLM"], "linear_num_value_heads": 4}
ROLLOUT = "actor_rollout_ref.rollout"


def test_an_engine_on_cpu_gets_what_a_recurrence_along_the_text_needs(load):
    write(**DELTA)
    loaded = load("trainer.device=cpu", "actor_rollout_ref.model.lora_rank=4")
    section = loaded.config.actor_rollout_ref
    assert (section.rollout.dtype, section.rollout.enable_prefix_caching) == ("bfloat16", False)
    assert section.model.lora.merge
    for word in ("dtype is bfloat16", "enable_prefix_caching is off", "lora.merge is on"):
        assert len([note for note in loaded.notes if word in note]) == 1
    write(mamba_d_state=8)
    section = load("trainer.device=cpu").config.actor_rollout_ref
    assert (section.rollout.dtype, section.rollout.enable_prefix_caching) == ("float32", False)


def test_the_adapter_of_a_mixture_is_merged_for_an_engine_on_cpu(load):
    write(num_experts=4)
    adapter, merged = "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge is on"
    loaded = load("trainer.device=cpu", adapter)
    assert loaded.config.actor_rollout_ref.model.lora.merge
    (note,) = [note for note in loaded.notes if merged in note]
    assert note.endswith("on CPU vLLM has no adapters for mixtures of experts")
    assert not load("trainer.device=cuda", CLUSTER, adapter).config.actor_rollout_ref.model.lora.merge
    assert not [note for note in load("trainer.device=cpu").notes if merged in note]
    (note,) = [note for note in load("trainer.device=cpu", f"{ROLLOUT}.name=sglang", adapter).notes if merged in note]
    assert note.endswith("on CPU SGLang has no adapters for mixtures of experts")


@pytest.mark.parametrize(
    ("device", "settings", "installed", "warned"),
    [
        ("cuda", DELTA, False, True),
        ("cuda", DELTA, True, False),
        ("cpu", DELTA, False, False),
        ("cuda", {"mamba_d_state": 8}, False, False),
    ],
)
def test_a_run_that_trains_linear_attention_slowly_says_so(load, monkeypatch, device, settings, installed, warned):
    monkeypatch.setitem(sys.modules, "fla", json if installed else None)
    write(**settings)
    notes = [note for note in load(f"trainer.device={device}", CLUSTER).notes if "flash-linear-attention" in note]
    assert bool(notes) == warned
    assert all("pip install flash-linear-attention" in note for note in notes), notes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_whose_module_in_vllm_imports_torchvision_is_rejected_without_it(load, monkeypatch, device):
    write(**DELTA)
    settings = f"trainer.device={device}", CLUSTER
    assert load(*settings)
    monkeypatch.setattr("hybridrl.config.checks.model.find_spec", lambda name: name != "torchvision" or None)
    monkeypatch.setattr("hybridrl.config.checks.model.version", lambda name: "2.13.0+cpu")
    (line,) = errors_of(load, *settings)
    assert line.startswith("actor_rollout_ref.model.path=model: vLLM needs torchvision for this model")
    index = " --extra-index-url https://download.pytorch.org/whl/cpu" if device == "cpu" else ""
    assert line.endswith(f"pip install torch==2.13.0+cpu torchvision{index}")
    write(linear_num_value_heads=4)
    assert load(*settings)


def test_a_type_that_a_recurrence_on_cpu_does_not_take_is_rejected(load):
    write(**DELTA)
    (line,) = errors_of(load, "trainer.device=cpu", f"{ROLLOUT}.dtype=fp32")
    assert line.startswith(f"{ROLLOUT}.dtype=fp32") and line.endswith("set bf16")


def test_what_transformers_leaves_out_of_a_deepseek_s_settings_is_put_where_an_engine_reads_it(load):
    write(model_type="deepseek_v3", scoring_func=None)
    assert load().config.actor_rollout_ref.model.override_config == {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    write(model_type="deepseek_v3", topk_method="noaux_tc", scoring_func="sigmoid")
    assert load().config.actor_rollout_ref.model.override_config == {}


@pytest.mark.parametrize(
    ("keys", "limit"),
    [
        (["fp32", "fp32"], 0.01),
        (["fp32", "bf16"], 0.2),
        (["fp32", "fp32", "max_log_prob_gap=0.5", "temperature=0.7"], 0.5),
        (["fp32", "fp32", "top_p=0.9"], None),
        (["fp32", "fp32", "top_k=5"], None),
        (["fp32", "fp32", "repetition_penalty=1.1"], None),
        (["fp32", "fp32", "min_tokens=2"], None),
        (["fp32", "fp32", "do_sample=false"], None),
    ],
)
def test_engine_and_trainer_are_compared_where_they_are_asked_for_the_same(load, keys, limit):
    trainer, engine, *more = keys
    types = [f"actor_rollout_ref.actor.fsdp_config.dtype={trainer}", f"{ROLLOUT}.dtype={engine}"]
    config = load("trainer.device=cpu", *types, *(f"{ROLLOUT}.{key}" for key in more)).config
    found = build_agreement(config.actor_rollout_ref)
    assert (found and found.limit) == limit


@pytest.mark.parametrize(
    ("keys", "disturbed"),
    [
        ([], False),
        (["lora_rank=4"], False),
        (["lora_rank=4", "lora.dropout=0.1"], True),
        (["override_config.residual_dropout=0.1"], True),
        (["override_config.residual_dropout=0.0"], False),
    ],
)
def test_dropout_that_is_asked_for_has_old_log_probs_in_a_pass_of_their_own(load, keys, disturbed):
    write(residual_dropout=0.1)
    loaded = load("trainer.device=cpu", *(f"actor_rollout_ref.model.{key}" for key in keys))
    assert build_policy_plan(loaded.config).stochastic is disturbed
    said = [note for note in loaded.notes if "residual_dropout=0.1 of config.json is disabled" in note]
    assert len(said) == ("residual_dropout" not in str(keys))


def test_a_policy_whose_weights_an_engine_cannot_take_is_rejected(load):
    write(model_type="gpt_oss")
    (line,) = errors_of(load)
    assert "model_type=gpt_oss: vLLM copies its experts past the reload" in line and line.endswith("(main_sft)")
    write(model_type="cohere2", sliding_window=512)  # rows have up to 512 + 512 tokens
    (line,) = errors_of(load)
    assert "beyond sliding_window=512 tokens vLLM computes other log-probs" in line and line.endswith("1024")


def test_a_family_that_cannot_be_trained_is_rejected_by_name(load):
    write(model_type="phimoe", router_jitter_noise=0.01)
    (line,) = errors_of(load)
    assert "model_type=phimoe: its routers choose experts at random in training" in line


def test_what_an_engine_reads_of_the_router_of_minimax_m2_is_set(load):
    write(model_type="minimax_m2")
    assert load().config.actor_rollout_ref.model.override_config == {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    }


@pytest.mark.parametrize(
    ("heads", "groups", "width", "fitting"),
    [(2, 2, 3, "1 | 2"), (12, 4, 3, "1 | 2 | 4 | 12"), (8, 1, 2, ""), (8, 2, 8, "")],
)
def test_an_engine_s_devices_divide_the_attention_heads(load, heads, groups, width, fitting):
    write(num_attention_heads=heads, num_key_value_heads=groups, head_dim=64)
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    keys = (f"{key}={width}", f"trainer.n_gpus_per_node={width}")
    if not fitting:
        assert load(*keys).config.actor_rollout_ref.rollout.tensor_model_parallel_size == width
        return
    cause = (
        f"{key}={width}: the model has {heads} attention heads in {groups} groups, which cannot be divided by {width}"
    )
    assert errors_of(load, *keys) == [f"{cause}; choose {fitting}"]


@pytest.mark.parametrize("path", ["./models/small", "/models/small", "a/b/small", "models/small"])
def test_a_mistyped_local_path_is_rejected_without_asking_the_hub(load, tmp_path, path):
    (tmp_path / "models").mkdir()
    with pytest.raises(ConfigError, match="there is no such directory"):
        load(f"actor_rollout_ref.model.path={path}")


IMMENSE = 34_312_610_000_925_249


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        (
            ["trainer.n_gpus_per_node=2", "critic.enable=true", f"critic.ulysses_sequence_parallel_size={IMMENSE}"],
            "must divide the 2 devices",
        ),
        (
            [f"trainer.n_gpus_per_node={IMMENSE}", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
            f"must divide trainer.n_gpus_per_node={IMMENSE}",
        ),
    ],
)
def test_a_fix_for_an_immense_number_of_devices_or_parts_is_found(load: Load, keys, cause) -> None:
    assert any(cause in error for error in errors_of(load, *keys))
