"""The memory estimate, worked out by hand."""

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, NemotronHConfig

from hybridrl.config import PPOConfig
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.load import resolve_config
from hybridrl.config.values import value_keys
from hybridrl.core.device import KEPT_BYTES
from hybridrl.core.training.planning import MicroBatchBudget
from hybridrl.doctor.memory import (
    DEVICE_BYTES,
    MACHINE_BYTES,
    PlannedRun,
    engine_memory,
    host_memory,
    make_plans,
    memory_plan,
    plan_run,
    suggest_fix,
    trainer_memory,
)
from hybridrl.doctor.memory_sizes import ModelSizes, meta_model, read_models, sync_buffer
from hybridrl.doctor.start import choose_recomputation
from hybridrl.required import required
from hybridrl.runs.settings import build_policy_plan
from tests.vision_models import write_model_that_sees

GIB = 2**30
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 80,
    "hidden_size": 8,
    "head_dim": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# Per layer: query, key and value with their biases, output, the three of the MLP, two norms.
LAYER = (8 * 64 + 64) + 2 * (8 * 32 + 32) + 64 * 8 + 3 * 8 * 16 + 2 * 8
EMBEDDING, NORM = 80 * 8, 8
PARAMETERS = EMBEDDING + 2 * LAYER + NORM
# Matrices that an engine fuses (query, key and value; output; gate and up; down), biases and norms: powers of two. Of
# all layers, the embedding and the last norm.
ROUNDED = 2 * (1024 + 512 + 256 + 128 + 128 + 16) + 1024 + 8

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FSDP, UTILIZATION = f"{ACTOR}.fsdp_config", "actor_rollout_ref.rollout.gpu_memory_utilization"
ADAPTER = ("actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.target_modules=all-linear")
SEPARATE = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.n_gpus_per_node=1")
NEVER_SAVED = ("trainer.save_freq=-1", "trainer.ckpt_freq_secs=-1")
TRAINED = ("parameters", "optimizer", "gradients")
# Micro-batches are as long as ppo_max_token_len_per_gpu allows, 16384 tokens; nothing is saved.
LONG_ROWS = (
    "data.max_prompt_length=1024",
    "data.max_response_length=3072",
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    *NEVER_SAVED,
)

Load = Callable[..., PPOConfig]


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


@pytest.fixture
def load(tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """A configuration on CPU, as for another machine, with further overrides."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "rows.jsonl").write_text("{}\n")

    def run(*overrides: str) -> PPOConfig:
        words = [
            f"data.train_files={tmp_path}/rows.jsonl",
            f"actor_rollout_ref.model.path={tmp_path}/model",
            f"trainer.default_local_dir={tmp_path}/run",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.max_num_seqs=2",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "data.max_prompt_length=100",
            "data.max_response_length=156",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            *overrides,
        ]
        resolved = resolve_config(PPOConfig, words, "ppo_trainer", offline=True)
        resolved.findings.close()
        assert resolved.config is not None
        return resolved.config

    return run


def run_of(config: PPOConfig, gpu: float = 0, free: float = 0) -> PlannedRun:
    return PlannedRun(config, read_models(config), gpu, free)


def report(config: PPOConfig, gpu: float = 0, free: float = 100 * GIB) -> list[Finding]:
    findings = Findings()
    if run := plan_run(config, findings, [int(gpu)] if gpu else [], int(free)):
        memory_plan(run, findings)
    return findings.items


def test_devices_that_share_rows_hold_their_part_of_a_micro_batch(load):
    """16 rows of 256 tokens per update on each device, and one row per micro-batch: half a row on each of two."""
    keys = ["trainer.n_gpus_per_node=2", f"{ACTOR}.ppo_max_token_len_per_gpu=100"]
    for size, tokens in ((1, 256), (2, 128)):
        run = run_of(load(*keys, f"{ACTOR}.ulysses_sequence_parallel_size={size}"))
        assert run.micro_batch(build_policy_plan(run.config).updates.budget, prompts=8) == tokens


def test_a_micro_batch_takes_rows_up_to_the_budget_or_a_single_longer_one(load):
    run = run_of(load())  # 2 prompts are 8 rows, of up to 256 tokens
    sizes = {(5000, None): 2048, (1000, None): 1000, (50, None): 256, (50, 3): 768, (50, 9): 2048}
    for (tokens, rows), size in sizes.items():
        assert run.micro_batch(MicroBatchBudget(tokens, rows), prompts=2) == size


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_sizes_are_read_from_config_json_alone(load):
    assert vars(ModelSizes(meta_model(load().actor_rollout_ref.model, "model"))) == {
        "parameters": PARAMETERS,
        "trained": PARAMETERS,
        "held": PARAMETERS,
        "unsharded": PARAMETERS,
        "outside": EMBEDDING + NORM,
        "layer": LAYER,
        "largest": EMBEDDING,
        "tower": (0, 0, 0, 0),
        **{
            "tensor": 1,
            "expert": 1,
            "heads": 1,
            "experts": 0,
            "by_rows": 0,
            "by_columns": 0,
            "per_token": 0,
            "routed": 0,
        },
        "layers": 2,
        "hidden": 8,
        "query": 2 * 32,
        "key": 32,
        "cached": 2 * 32,
        "intermediate": 16,
        "vocabulary": 80,
        "tied": EMBEDDING,
        "copied": PARAMETERS + EMBEDDING,
        "page_locked": ROUNDED,
    }


def test_large_matrices_are_not_copied_by_an_engine_on_cpu(load, model_file):
    model_file.write_text(json.dumps(CONFIG | {"hidden_size": 1024, "intermediate_size": 5000}))
    sizes = ModelSizes(meta_model(load().actor_rollout_ref.model, "model"))
    gate_and_up = 2 * 1024 * 5000  # more than 2**23; the down projection is less
    assert sizes.copied == sizes.parameters - 2 * gate_and_up + 80 * 1024


def test_only_the_adapter_of_a_model_is_trained(load):
    sizes = ModelSizes(meta_model(load("actor_rollout_ref.model.lora_rank=2").actor_rollout_ref.model, "model"))
    pairs = 2 * ((8 + 64) + 2 * (8 + 32) + (64 + 8) + 3 * (8 + 16))
    assert (sizes.trained, sizes.parameters) == (2 * pairs, PARAMETERS + 2 * pairs)


def test_a_critic_has_a_head_of_one_number_in_place_of_the_vocabulary(load):
    sizes = read_models(load("algorithm.adv_estimator=gae")).sizes["critic"]
    assert sizes is not None
    assert sizes.parameters == PARAMETERS + 8 + 1  # the head's weight and bias


def test_experts_count_as_many_as_a_token_goes_through(load, model_file):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    content = CONFIG | experts | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    model_file.write_text(json.dumps(content))
    assert ModelSizes(meta_model(load().actor_rollout_ref.model, "model")).intermediate == 2 * 6


MIXTURE = CONFIG | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2}
MIXTURE |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
# Per layer: query, key, value and output; four experts; router, norms of the layer and of heads.
CUT, EXPERTS, WHOLE = 4 * 8 * 64, 4 * 3 * 8 * 6, 4 * 8 + 2 * 8 + 2 * 32
LAYOUTS = {  # tensor and expert -> what a device gathers of a layer; copies of what is whole, in all
    "FSDP 4": ((1, 1), CUT + WHOLE + EXPERTS, 1),
    "TP 2 x FSDP 2, of experts too": ((2, 2), CUT / 2 + WHOLE + EXPERTS / 2, 2),
    "EP 4": ((1, 4), CUT + WHOLE + EXPERTS / 4, 1),
    "EP 2 x FSDP 2": ((1, 2), CUT + WHOLE + EXPERTS / 2, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_decides_what_a_device_gathers_and_how_often_it_is_held(load, model_file, name):
    (tensor, expert), layer, copies = LAYOUTS[name]
    model_file.write_text(json.dumps(MIXTURE))
    sizes = [f"{FSDP}.tensor_parallel_size={tensor}", f"{FSDP}.expert_parallel_size={expert}"]
    run = run_of(load("trainer.n_gpus_per_node=4", f"{ACTOR}.ppo_max_token_len_per_gpu=256", *sizes))
    needs, outside = trainer_memory(run, "policy update"), EMBEDDING + NORM
    held = 2 * (CUT + EXPERTS) + copies * (2 * WHOLE + outside)
    assert needs["parameters"] == needs["gradients"] == 4 * held / 4
    assert needs["optimizer"] == 8 * held / 4
    assert needs["gathered"] == 4 * (outside + 2 * layer) + max(8 * outside, 8 * layer + 4 * EMBEDDING)
    # Both layers' inputs, and one layer: norms, attention, MLP, and inputs and outputs of two experts.
    token = 2 * 8 + 6 * 8 + (3 * 64 + 2 * 64 + 4 * 2 * 6 + 2 * 2 * 8) / tensor
    assert needs["activations"] == 256 * 4 * token


def test_a_trained_tower_keeps_the_activations_of_the_pictures_in_a_micro_batch(tmp_path, load):
    """Two layers of 32 elements inside and 48 in the middle, four patches per token; of 256 tokens in each of four
    rows 100 are of the prompt."""
    path = f"actor_rollout_ref.model.path={write_model_that_sees(tmp_path / 'sees')}"

    def activations(images: int, *keys: str) -> float:
        config = load(path, f"{ACTOR}.ppo_max_token_len_per_gpu=1024", *keys)
        config.actor_rollout_ref.rollout.limit_images = images
        return trainer_memory(run_of(config), "policy update")["activations"]

    layer, tokens = 4 * (10 * 32 + 4 * 48), 1024 * 100 / 256
    whole, every = (f"actor_rollout_ref.model.enable_gradient_checkpointing={value}" for value in ("false", "true"))
    assert activations(1, whole) - activations(0, whole) == tokens * 4 * 2 * layer
    small = "+data.mm_processor_kwargs.max_pixels=10240"  # ten tokens
    assert activations(2, whole, small) - activations(0, whole) == 1024 * 20 / 256 * 4 * 2 * layer
    assert activations(1, every) - activations(0, every) == tokens * 4 * (2 * 4 * 32 + layer)
    assert activations(1, whole, f"{ACTOR}.freeze_vision_tower=true") == activations(0, whole)
    adapter = (whole, "actor_rollout_ref.model.lora_rank=4")
    assert activations(1, *adapter) == activations(0, *adapter)


def test_what_a_layout_moves_is_reported_of_mixtures_and_divided_layers(load, model_file):
    """Parameters gathered twice and a gradient, from the other three quarters; 256 tokens to two experts and back in
    the forward pass, which runs twice, and the backward pass."""

    def moved(*keys: str) -> list[str]:
        items = report(load("trainer.n_gpus_per_node=4", f"{ACTOR}.ppo_max_token_len_per_gpu=256", *keys))
        return [item.text.partition(" receives, ")[2] for item in items if item.code == "memory.moved"]

    assert moved() == []
    model_file.write_text(json.dumps(MIXTURE | {"hidden_size": 8 << 10}))
    dense, experts = (CUT << 10) + (48 << 10) + 64, EXPERTS << 10
    parameters, tokens = 12 * 3 / 4 * (dense + experts) / GIB, 12 * 3 / 4 * dense / GIB
    assert moved() == [f"in GiB: {parameters:.2f} of parameters and gradients (arithmetic, not measured)"]
    routed = 6 * 3 / 4 * 256 * 2 * (8 << 10) * 4 / GIB
    kinds = f"{tokens:.2f} of parameters and gradients, {routed:.2f} of tokens of experts"
    assert moved(f"{FSDP}.expert_parallel_size=4") == [f"in GiB: {kinds} (arithmetic, not measured)"]


def test_an_engine_caches_one_vector_per_token_of_latent_attention(load, model_file):
    latent = {"q_lora_rank": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 24, "v_head_dim": 24}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 6, "head_dim": 64}
    names = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    model_file.write_text(json.dumps(CONFIG | latent | experts | names))
    sizes = ModelSizes(meta_model(load().actor_rollout_ref.model, "model"))
    assert (sizes.cached, sizes.query) == (512 + 64, 2 * (24 + 64))


def test_the_weight_sync_has_memory_for_two_buckets(load):
    model = meta_model(load().actor_rollout_ref.model, "model")
    layer = 64 * sum(-(-2 * size // 64) for size in (512, 64, 256, 32, 256, 32, 512, 128, 128, 128, 8, 8))
    assert sync_buffer(model, "bfloat16", 1) == 2 * layer  # tensors begin at multiples of 64 bytes


# -- phases on CPU -----------------------------------------------------------------------------------------------------


def test_an_update_holds_parameters_gradients_moments_and_one_micro_batch(load):
    run = run_of(load(f"{ACTOR}.ppo_max_token_len_per_gpu=512"))
    needs = trainer_memory(run, "policy update")
    token = 2 * 8 + 6 * 8 + 3 * 64 + 2 * 32 + 4 * 16  # checkpointed: both layers' inputs, and one layer
    assert needs["parameters"] == needs["gradients"] == 4 * PARAMETERS
    assert needs["optimizer"] == 8 * PARAMETERS
    assert needs["activations"] == 512 * 4 * token
    assert needs["logits"] == 2.5 * (512 * 80 * 4)
    assert needs["gathered"] == 4 * EMBEDDING, "the largest gradient of a micro-batch, which its sum takes up"
    assert engine_memory(run, "policy update")["rollout weights"] == 4 * (2 * PARAMETERS + EMBEDDING)
    half = trainer_memory(run_of(load(f"{ACTOR}.fsdp_config.dtype=bfloat16")), "policy update")
    assert half["gathered"] == 2 * PARAMETERS + (2 + 4) * EMBEDDING, "copies, and a gradient, also in float32"


CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
REDUCED = 2 * 4 * LAYER + 4 * EMBEDDING  # a layer's gradient, twice, and the head's
LAYER_WIDTH = 6 * 8 + 3 * 64 + 2 * 32 + 4 * 16


@pytest.mark.parametrize(
    ("key", "kind", "size"),
    [
        (f"{CHECKPOINTING}=false", "activations", 512 * 4 * 2 * LAYER_WIDTH),
        (f"{CHECKPOINTING}=2", "activations", 512 * 4 * (LAYER_WIDTH + 8 + LAYER_WIDTH)),  # of two layers one
        (f"{ACTOR}.optim.optimizer=Muon", "optimizer", 4 * (2 * LAYER + 2 * (EMBEDDING + NORM))),
        ("trainer.n_gpus_per_node=2", "gathered", 4 * (EMBEDDING + NORM + 2 * LAYER) + REDUCED),
        (f"trainer.n_gpus_per_node=2 {FSDP}.reshard_after_forward=false", "gathered", 4 * PARAMETERS + REDUCED),
    ],
)
def test_an_update_depends_on_how_the_model_is_trained(load, key, kind, size):
    keys = [f"{ACTOR}.ppo_max_token_len_per_gpu=512", *key.split()]
    assert trainer_memory(run_of(load(*keys)), "policy update")[kind] == size


def test_layers_that_are_compiled_selectively_keep_half_and_all_of_one_while_it_is_differentiated(load):
    keys = ("trainer.device=cuda", "actor_rollout_ref.model.selective_checkpointing=true")
    kept = {}
    for compiled in ("true", "false"):
        run = run_of(load(f"{ACTOR}.ppo_max_token_len_per_gpu=512", *keys, f"{FSDP}.compile_layers={compiled}"))
        kept[compiled] = trainer_memory(run, "policy update")["activations"]
    width = 8 * 8 + 3 * 64 + 4 * 16  # norms in float32, no copy of attention by rows
    assert kept == {"true": 512 * 2 * (2 * width / 2 + width), "false": 512 * 2 * (2 * 8 + width)}


def test_a_frozen_model_under_an_adapter_has_the_computed_type_and_neither_gradients_nor_moments(load):
    run = run_of(load("trainer.device=cuda", *ADAPTER), 10 * GIB)
    needs, trained = trainer_memory(run, "policy update"), run.models.policy.trained
    assert needs["parameters"] == 4 * trained + 2 * PARAMETERS
    assert (needs["gradients"], needs["optimizer"]) == (4 * trained, 8 * trained)
    largest = run.models.policy.largest
    assert needs["gathered"] == 2 * trained + (2 + 4) * largest, "its copies, and a gradient: none of the base"


def test_log_probs_hold_the_largest_tensors_of_one_layer(load):
    needs = trainer_memory(run_of(load("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=512")), "log-probs")
    assert needs["activations"] == 512 * 4 * (3 * 16 + 2 * 8)


def test_a_machine_holds_all_its_devices_and_processes(load):
    (plan,) = make_plans(run_of(load("trainer.n_gpus_per_node=2")))
    needs = plan.needs["policy update"]
    assert needs["processes"] == MACHINE_BYTES + 2 * DEVICE_BYTES
    assert needs["parameters"] == 4 * PARAMETERS  # shards
    assert needs["rollout weights"] == 2 * 4 * (2 * PARAMETERS + EMBEDDING)  # an engine has all


def test_a_machine_holds_the_experts_of_a_steps_tokens_that_are_replayed(load, model_file):
    """2 prompts with 4 responses of up to 256 tokens, two layers of two experts, four times in 16 bits."""
    model_file.write_text(json.dumps(MIXTURE))
    config = load(f"{ACTOR}.router_replay.mode=R3")
    (plan,), rollout = make_plans(run_of(config)), config.actor_rollout_ref.rollout
    rows = config.data.train_batch_size * rollout.n
    assert plan.needs["policy update"]["routes"] == 4 * rows * (rollout.max_model_len or 0) * 2 * 2 * 2
    assert "routes" not in make_plans(run_of(load()))[0].needs["policy update"]


def test_layers_whose_names_do_not_speak_of_attention_have_sizes_too():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(NemotronHConfig(vocab_size=16, hidden_size=64))
    assert not any("att" in name for name, _ in model.named_parameters())
    assert ModelSizes(model).heads == 1


def test_checkpoints_keep_a_copy_of_what_they_write(load):
    def staged(*keys: str, phase: str = "rollout") -> float:
        return host_memory(run_of(load(*keys)), phase)["checkpoint staging"]

    assert staged(*NEVER_SAVED) == 0
    assert staged("trainer.save_freq=1") == 12 * PARAMETERS
    assert staged("trainer.save_freq=1", f"{ACTOR}.checkpoint.save_contents=[model]") == 4 * PARAMETERS
    assert staged("trainer.save_freq=1", phase="policy update") == 0, "it is written, and freed on CPU"
    assert staged("trainer.save_freq=1", "trainer.device=cuda", phase="at most") == 12 * PARAMETERS


def test_an_engine_on_cpu_samples_from_tables_of_logits_and_loads_a_tied_embedding_next_to_the_old_one(
    load, model_file
):
    model_file.write_text(json.dumps(CONFIG | {"vocab_size": 262_144, "hidden_size": 640}))
    for rows, most in ((2, 100), (100, 2)):  # of a step, and of an engine
        run = run_of(load(f"data.train_batch_size={rows}", f"{ROLLOUT}.n=1", f"{ROLLOUT}.max_num_seqs={most}"))
        assert engine_memory(run, "rollout")["engine's work"] == 5 * 2 * 262_144 * 4
    embedding = 262_144 * 640 * 4
    assert engine_memory(run, "weight sync")["engine's work"] == embedding
    assert engine_memory(run, "policy update")["engine's work"] == KEPT_BYTES  # more is given back
    assert trainer_memory(run, "rollout")["unused blocks"] == KEPT_BYTES
    assert host_memory(run)["tokenizers"] == 2 * 1000 * 262_144


def test_a_reference_is_held_only_if_one_is_used(load):
    assert "reference" not in trainer_memory(run_of(load()), "log-probs")
    used = run_of(load(f"{ACTOR}.use_kl_loss=true"))
    assert trainer_memory(used, "log-probs")["reference"] == 4 * PARAMETERS


def test_a_model_with_which_the_loss_compares_the_policy_adds_a_copy_of_its_head_and_its_hidden_states(load):
    """The sampled KL is computed before; the exact one within the update, and so is a teacher's."""
    keys = [[f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={kind}"] for kind in ("k3", "full")]
    sampled, exact = (run_of(load(*each)) for each in keys)
    before, after = (trainer_memory(run, "policy update")["activations"] for run in (sampled, exact))
    tokens = exact.micro_batch(exact.learners[0].budget, exact.config.actor_rollout_ref.actor.ppo_mini_batch_size)
    sizes = exact.models.policy
    assert after - before == 4 * (sizes.vocabulary + tokens) * sizes.hidden


# -- phases on CUDA ----------------------------------------------------------------------------------------------------


def test_an_engine_has_its_share_during_rollout_and_nothing_during_training(load):
    run = run_of(load("trainer.device=cuda", f"{UTILIZATION}=0.6"), 10 * GIB)
    rollout, update = engine_memory(run, "rollout"), engine_memory(run, "policy update")
    assert rollout["rollout weights"] + rollout["KV cache"] == 0.6 * 10 * GIB
    assert rollout["rollout weights"] == 2 * PARAMETERS  # bfloat16
    assert update == {"CUDA contexts": 0.7 * GIB, "sleeping engine": 0.8 * GIB}


def test_offloaded_parts_are_in_host_memory(load):
    run = run_of(load("trainer.device=cuda", f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"))
    host, log_probs = host_memory(run), trainer_memory(run, "log-probs")
    assert (host["parameters"], host["optimizer"]) == (4 * PARAMETERS, 8 * PARAMETERS)
    assert (log_probs["parameters"], log_probs["optimizer"]) == (4 * PARAMETERS, 0)
    assert trainer_memory(run, "rollout")["parameters"] == 0


def test_under_offload_policy_a_gpu_holds_no_parameters_gradients_or_moments(load):
    run = run_of(load("trainer.device=cuda", f"{FSDP}.offload_policy=true"))
    host, update = host_memory(run), trainer_memory(run, "policy update")
    assert [host[kind] for kind in TRAINED] == [4 * PARAMETERS, 8 * PARAMETERS, 4 * PARAMETERS]
    assert [update[kind] for kind in TRAINED] == [0, 0, 0]
    assert trainer_memory(run, "start-up")["parameters"] == 4 * PARAMETERS, "on their way from the files"


def test_gradients_of_policy_and_critic_do_not_exist_together(load):
    keys = [f"{FSDP}.offload_policy=true", "critic.fsdp.offload_policy=true"]
    run = run_of(load("algorithm.adv_estimator=gae", "trainer.device=cuda", *keys))
    assert host_memory(run)["gradients"] == 4 * (PARAMETERS + 8 + 1)  # the critic's, which are more


def test_offloaded_parameters_leave_a_gpu_while_the_other_model_is_updated(load):
    keys = [f"{FSDP}.param_offload=true", "critic.fsdp.param_offload=true", *NEVER_SAVED]
    run = run_of(load("algorithm.adv_estimator=gae", "trainer.device=cuda", *keys))
    policy, critic = 4 * PARAMETERS, 4 * (PARAMETERS + 8 + 1)
    update, other = trainer_memory(run, "policy update"), trainer_memory(run, "critic update")
    assert (update["parameters"], update["critic"]) == (policy, 2 * critic)  # the critic's moments
    assert (other["parameters"], other["critic"]) == (0, 3 * critic)
    host = host_memory(run)
    assert (host["parameters"], host["critic"]) == (policy, critic), "their place is kept"


SEVEN_B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
SEVEN_B |= {"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False}
HALF_B = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936}
HALF_B |= {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("shape", "layer", "outside", "parameters", "gpus", "total"),
    [  # of Qwen2.5: a layer's matrices and biases, embedding, head and norm
        (SEVEN_B, 2 * 3584 * 3584 + 3584 + 2 * (3584 * 512 + 512) + 3 * 3584 * 18944 + 2 * 3584,
         2 * 152064 * 3584 + 3584, 7_615_616_512, 8, 33.0),
        (HALF_B, 2 * 896 * 896 + 896 + 2 * (896 * 128 + 128) + 3 * 896 * 4864 + 2 * 896,
         151936 * 896 + 896, 494_032_768, 1, 13.9),
    ],
    ids=["7B", "0.5B"],
)  # fmt: skip
def test_the_update_of_a_real_model(load, model_file, shape, layer, outside, parameters, gpus, total):
    """In bfloat16, with 16384 tokens in a micro-batch."""
    model_file.write_text(json.dumps(CONFIG | shape))
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    layers, hidden, intermediate, vocabulary = (shape[name] for name in sizes)
    assert layers * layer + outside == parameters
    run = run_of(load("trainer.device=cuda", f"trainer.n_gpus_per_node={gpus}", *LONG_ROWS))
    update = trainer_memory(run, "policy update") + engine_memory(run, "policy update")
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    # Embedding and head, a layer and the next; gradients of embedding and head, and their copy in float32. On one GPU
    # copies of all parameters, and the largest gradient.
    gathered = 2 * (outside + 2 * layer) + (2 + 4) * outside
    if gpus == 1:
        gathered = 2 * parameters + (2 + 4) * vocabulary * hidden
    assert update == {
        "CUDA contexts": (1.3 + 0.7) * GIB,
        "sleeping engine": 0.8 * GIB,
        "parameters": 4 * parameters / gpus,
        "gradients": 4 * parameters / gpus,
        "optimizer": 8 * parameters / gpus,
        "gathered": gathered,
        # Every layer's input, and one layer: 8 of norms and residual stream, query and key, four of the MLP.
        "activations": 16384 * 2 * (layers * hidden + 8 * hidden + 2 * (hidden + keys) + 4 * intermediate),
        "logits": (2**30 // (4 * vocabulary)) * vocabulary * 2,  # a chunk
    }
    assert round(update.total() / GIB, 1) == total


def test_the_base_of_an_adapter_waits_in_page_locked_memory_while_its_engine_sleeps(load):
    run = run_of(load("trainer.device=cuda", "trainer.n_gpus_per_node=2", *ADAPTER))
    assert host_memory(run)["sleeping base"] == 2 * 2 * ROUNDED  # two engines, bfloat16
    for other in (
        ["trainer.device=cuda"],
        ["trainer.device=cuda", *ADAPTER, "actor_rollout_ref.model.lora.merge=true"],
        ["trainer.device=cuda", *ADAPTER, "actor_rollout_ref.rollout.free_cache_engine=false"],
        ["trainer.device=cuda", *ADAPTER, *SEPARATE],
        ["trainer.device=cpu", *ADAPTER],
    ):
        assert host_memory(run_of(load(*other)))["sleeping base"] == 0


def test_gpus_of_rollout_servers_have_a_plan_of_their_own(load):
    run = run_of(load("trainer.device=cuda", "trainer.n_gpus_per_node=1", *SEPARATE), 10 * GIB)
    *_, plan = make_plans(run)
    assert (plan.place, plan.available) == ("each GPU of the rollout servers", 10 * GIB)
    engine = {"rollout weights": 2 * PARAMETERS, "KV cache": 0.9 * 10 * GIB - 2 * PARAMETERS}
    assert plan.needs["rollout"] == Counter(engine | {"CUDA contexts": 0.7 * GIB})
    assert plan.needs["weight sync"]["sync buckets"] == run.models.bucket > 0
    assert len(make_plans(run_of(load("trainer.device=cuda"), 10 * GIB))) == 2


# -- recomputation -----------------------------------------------------------------------------------------------------


def chosen(config: PPOConfig, gpu: float = 0, free: float = 0) -> tuple[bool | int | None, int, list[str]]:
    """The layers that are recomputed, the tokens of a micro-batch, and the lines about both."""
    run = choose_recomputation(run_of(config, gpu, free), findings := Findings())
    section = run.config.actor_rollout_ref
    assert section is config.actor_rollout_ref
    layers, tokens = section.model.enable_gradient_checkpointing, section.actor.ppo_max_token_len_per_gpu
    assert run.learners[0].budget.tokens == tokens
    return layers, tokens, [finding.text for finding in findings.items]


def test_the_first_of_none_half_a_micro_batch_every_second_layer_and_all_that_fits_is_chosen(load, model_file):
    """In 80% of a GPU; a GPU of which nothing is known has all layers recomputed."""
    model_file.write_text(json.dumps(CONFIG | HALF_B))
    keys = ("trainer.device=cuda", *LONG_ROWS)
    expected = [(False, 16384), (False, 8192), (2, 8192), (True, 16384)]
    needs = []
    for layers, tokens in expected:
        fixed = load(*keys, f"{CHECKPOINTING}={layers}", f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}")
        needs.append(make_plans(run_of(fixed))[0].needs["policy update"].total())
    assert sorted(needs, reverse=True) == needs
    for need, choice in zip(needs, expected, strict=True):
        assert chosen(load(*keys), need / 0.8 + 1)[:2] == choice
        assert chosen(load(*keys), need / 0.8 - GIB / 10)[:2] != choice or choice == expected[-1]
    *_, (line,) = chosen(load(*keys), needs[1] / 0.8 + 1)
    assert line == (
        f"recomputation: none, layers are compiled; the plan of the policy update takes {needs[1] / GIB:.1f} of "
        f"{needs[1] / 0.8 / GIB:.1f} GiB in micro-batches of 8192 tokens, not 16384"
    )
    layers, tokens, (line,) = chosen(load(*keys))
    assert (layers, tokens) == (True, 16384) and "all layers" in line and "memory that is not known here" in line


def test_micro_batches_of_8192_tokens_of_longer_rows_or_of_a_number_of_rows_are_not_halved(load, model_file):
    model_file.write_text(json.dumps(CONFIG | HALF_B | {"max_position_embeddings": 16384}))
    for keys in (
        [f"{ACTOR}.ppo_max_token_len_per_gpu=8192", *LONG_ROWS],
        [*LONG_ROWS, "data.max_response_length=9000"],
        [*LONG_ROWS, f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"],
    ):
        config = load("trainer.device=cuda", *keys)
        tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        made = [chosen(copy.deepcopy(config), gpu * GIB)[:2] for gpu in (0, 14, 16, 18, 20, 22, 24, 28, 32, 80)]
        assert {layers for layers, _ in made} == {True, 2, False} and {size for _, size in made} == {tokens}


def test_a_machine_without_gpus_keeps_more_free_and_what_is_configured_stays(load):
    (plan,) = make_plans(run_of(load(f"{CHECKPOINTING}=false")))
    need = plan.needs["policy update"].total()
    assert [chosen(load(), free=need / share)[0] for share in (0.59, 0.62)] == [False, True]
    for key, layers in (("true", True), ("2", 2), ("false", False)):
        assert chosen(load(f"{CHECKPOINTING}={key}"), free=100 * GIB)[:2] == (layers, 16384)


def test_the_critic_is_decided_by_its_own_update(load, model_file):
    model_file.write_text(json.dumps(CONFIG | HALF_B))
    keys = ("trainer.device=cuda", *LONG_ROWS, "algorithm.adv_estimator=gae", "critic.ppo_max_token_len_per_gpu=8192")
    config = load(*keys, f"{CHECKPOINTING}=true")
    assert chosen(config, 100 * GIB)[:2] == (True, 16384)
    assert config.critic.model.enable_gradient_checkpointing is False


# -- findings ----------------------------------------------------------------------------------------------------------


def test_a_plan_that_fits_is_one_line_and_one_that_does_not_a_table_and_the_cache_is_in_rows(load):
    items = report(load())
    assert {finding.severity for finding in items} == {"info"}
    assert re.fullmatch(r"estimated memory of this machine, .*: at most [\d.]+ GiB of 100.00, in [\w ]+", items[0].text)
    (plan,) = make_plans(run_of(load()))
    lines = report(load(), free=plan.peak - 1)[0].text.splitlines()
    assert lines[0] == "estimated memory of this machine, all processes together, in GiB:"
    assert lines[1].split("  ")[-1].strip() == "weight sync"
    assert lines[-1].startswith("total")
    assert items[1].text == "the KV cache of an engine holds an estimated 2 rows of 256 tokens (max_num_seqs=2)"


def test_a_shortage_is_an_error_only_if_what_is_counted_exactly_does_not_fit(load):
    config = load()
    (plan,) = make_plans(run_of(config))
    assert plan.certain == MACHINE_BYTES + DEVICE_BYTES + 16 * PARAMETERS  # gradients and two moments
    for free, severity in ((plan.certain + 1, "warning"), (plan.certain - 1, "error")):
        assert [finding.severity for finding in report(config, free=free) if finding.fix] == [severity]
    assert {finding.severity for finding in report(config, free=0)} == {"info"}, "not known, on another machine"


def test_the_smallest_gpu_must_hold_what_each_holds(load):
    config = load("trainer.device=cuda", "trainer.n_gpus_per_node=2")
    lacking = []
    for gpus in ([40_000, 80 * GIB], [80 * GIB, 40_000], [80 * GIB, 80 * GIB]):
        memory_plan(required(plan_run(config, findings := Findings(), gpus, 100 * GIB)), findings)
        lacking.append([finding.cause for finding in findings.items if finding.code == "memory.lack"])
    assert lacking[0] == lacking[1] and lacking[2] == []
    (cause,) = (cause for cause in lacking[0] if "each GPU" in cause)
    assert cause.startswith("memory of each GPU: policy update takes an estimated")


def test_an_engine_that_fills_its_gpu_is_offered_a_smaller_share(load):
    items = report(load("trainer.device=cuda", "trainer.n_gpus_per_node=1", *SEPARATE), gpu=6 * GIB)
    (finding,) = (item for item in items if "memory of each GPU of the rollout servers: " in item.cause)
    assert (finding.severity, finding.fix) == ("warning", f"set {UTILIZATION}=0.85")


def test_an_engine_whose_weights_leave_no_room_for_a_cache_is_offered_more_devices(load):
    keys = ("trainer.device=cuda", "trainer.n_gpus_per_node=4", f"{UTILIZATION}=0.5")
    items = report(load(*keys), gpu=3.5 * PARAMETERS)  # the weights are in bfloat16: 2 bytes per parameter
    (finding,) = (item for item in items if item.code == "memory.cache")
    assert finding.fix.endswith("or set actor_rollout_ref.rollout.tensor_model_parallel_size=2")


def test_a_layer_to_shard_that_the_model_lacks_is_an_error(load):
    key = f"{FSDP}.wrap_policy.transformer_layer_cls_to_wrap"
    (finding,) = report(load(f"{key}=LlamaDecoderLayer"))
    assert f"{key}=LlamaDecoderLayer: the model has no such layer; it has Qwen2DecoderLayer" in finding.cause


def test_a_model_that_cannot_be_read_here_is_reported(load, model_file):
    config = load()
    model_file.write_text("{")
    (finding,) = report(config)
    assert (finding.code, finding.severity) == ("memory.unknown", "info")
    assert finding.cause.startswith("memory is not estimated: a model's config.json cannot be read (")


def test_the_suggested_override_makes_the_run_fit(load):
    prompts = ("data.train_batch_size=400", f"{ACTOR}.ppo_mini_batch_size=400")
    keys = (*prompts, "data.max_response_length=3000", f"{ACTOR}.ppo_max_token_len_per_gpu=3000000")
    free = 4.1 * GIB
    (finding,) = (item for item in report(load(*keys), free=free) if item.severity != "info")
    assert finding.fix.startswith(f"set {ACTOR}.ppo_max_token_len_per_gpu=")
    (plan,) = make_plans(run_of(load(*keys, *finding.fix.removeprefix("set ").split())))
    assert plan.peak <= free


def test_an_insufficient_set_of_overrides_is_reported_and_no_adapter_to_a_run_that_has_one(load):
    adapter = ", or an adapter (actor_rollout_ref.model.lora_rank=32)"
    for keys, end in (((), adapter), (ADAPTER, "")):
        (finding,) = (item for item in report(load(*keys), free=GIB) if item.fix)
        assert finding.fix.endswith(f"take a smaller model, a machine with more memory{end}")


def test_the_number_of_devices_that_would_do_is_named(load):
    run = run_of(load("trainer.device=cuda", "trainer.n_gpus_per_node=2"))
    fix = suggest_fix(run, lambda changed: 16 * PARAMETERS / changed.config.trainer.devices, 16 * PARAMETERS / 8)
    assert "take a smaller model, 8 devices (trainer.nnodes x trainer.n_gpus_per_node)" in fix


@pytest.mark.parametrize(
    ("keys", "fix"),
    [((), f"{FSDP}.optimizer_offload=true"), ((f"{FSDP}.optimizer_offload=true",), f"{FSDP}.offload_policy=true")],
)
def test_an_optimizer_on_the_cpu_is_proposed_only_if_nothing_else_helps(load, keys, fix):
    small = (f"{FSDP}.param_offload=true", f"{ACTOR}.ppo_max_token_len_per_gpu=256")
    run = run_of(load("trainer.device=cuda", *small, *keys))
    peak = make_plans(run)[0].peak
    assert suggest_fix(run, lambda changed: make_plans(changed)[0].peak, peak - 1) == f"set {fix}"


def test_merged_weights_are_proposed_where_a_sleeping_base_does_not_fit(load):
    run = run_of(load("trainer.device=cuda", *ADAPTER))
    fix = suggest_fix(run, lambda changed: host_memory(changed)["sleeping base"], host_memory(run)["sleeping base"] - 1)
    assert fix == "set actor_rollout_ref.model.lora.merge=true"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_suggestion_changes_what_is_learned(load, device):
    """Every override that can be suggested is, if each of them helps and none suffices."""
    run = run_of(load(f"trainer.device={device}"))
    keys = value_keys(PPOConfig)
    usual = [attrgetter(key)(run.config) for key in keys]

    def peak(changed: PlannedRun) -> float:
        return 1000.0 - sum(attrgetter(key)(changed.config) != value for key, value in zip(keys, usual, strict=True))

    fix = suggest_fix(run, peak, 0.0)
    names = [word.partition("=")[0].rpartition(".")[2] for word in fix.split(",")[0].split()[1:]]
    assert len(names) > 3
    lengths = {"max_prompt_length", "max_response_length", "prompt_length", "response_length", "max_model_len"}
    assert not {"train_batch_size", "ppo_mini_batch_size", "ppo_epochs", "n", *lengths} & set(names)
