"""The memory estimate, worked out by hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hybridrl.config import PPOConfig
from hybridrl.config.findings import Findings
from hybridrl.config.keys import value_keys
from hybridrl.config.load import resolve_config
from hybridrl.core.training.packing import MicroBatchBudget
from hybridrl.doctor import memory_plan as memory_plan_module
from hybridrl.doctor import memory_sizes
from hybridrl.doctor.machine import Gpu
from hybridrl.doctor.memory_plan import (
    DEVICE_BYTES,
    MACHINE_BYTES,
    PlannedRun,
    machine_memory,
    make_plans,
    memory_plan,
    phase_memory,
    suggest_fix,
)
from hybridrl.doctor.memory_sizes import (
    ModelSizes,
    Shard,
    blank,
    model_sizes,
    read_models,
    sync_buffer,
)
from hybridrl.runs.settings import build_policy_plan

# -- the formulas: two layers of 100 elements and 50 outside of them, 4 wide -------------------------------------------


WHOLE = ModelSizes(
    parameters=250,
    trained=250,
    outside=50,
    layer=100,
    largest=40,
    small_fused=200,
    page_locked=320,
    tied=True,
    layers=2,
    hidden=4,
    query=4,
    key=2,
    intermediate=10,
    vocabulary=12,
)
ADAPTED = ModelSizes(
    parameters=270,
    trained=20,
    outside=50,
    layer=110,
    largest=8,
    small_fused=220,
    page_locked=320,
    tied=False,
    layers=2,
    hidden=4,
    query=4,
    key=2,
    intermediate=10,
    vocabulary=12,
)
FULL, MIXED = Shard(WHOLE, 4, 4, ranks=1), Shard(WHOLE, 4, 2, ranks=2)
MIXED_ADAPTED = replace(MIXED, sizes=ADAPTED)


def test_a_shard_has_parameters_gradients_and_two_moments_in_the_stored_type() -> None:
    assert MIXED.parameters == 250 * 4 / 2
    assert MIXED.gradients == 250 * 4 / 2
    assert MIXED.moments == 2 * 250 * 4 / 2


def test_muon_has_one_moment_per_parameter_in_the_layers() -> None:
    assert replace(FULL, muon=True).moments == (200 + 2 * 50) * 4


def test_a_frozen_model_under_an_adapter_has_the_computed_type_and_neither_gradients_nor_moments() -> None:
    assert MIXED_ADAPTED.parameters == (20 * 4 + 250 * 2) / 2
    assert MIXED_ADAPTED.gradients == 20 * 4 / 2
    assert replace(MIXED_ADAPTED, muon=True).moments == 2 * 20 * 4 / 2
    assert MIXED_ADAPTED.reduced == 0


def test_a_rank_gathers_the_parameters_outside_the_layers_and_two_layers() -> None:
    assert MIXED.gathered == (50 + 2 * 100) * 2
    assert replace(MIXED, resharded=False).gathered == 250 * 2
    assert MIXED.optimizer_step == 2 * 40 * 4 / 2


def test_gradients_are_unsharded_in_the_computed_type_and_in_float32_while_they_are_reduced() -> None:
    assert MIXED.reduced == 100 * (2 + 4) + 12 * 4 * 2  # a layer, while the head's gradient waits
    assert replace(MIXED, sizes=replace(WHOLE, outside=150)).reduced == 150 * (2 + 4)


def test_activations_are_those_of_all_layers() -> None:
    # Per token and layer in float32: 6 x 4 of the norms, 2 x (4 + 2) + 4 of the attention, 4 x 10 of the MLP.
    every = {"checkpointed": False, "selective": False}
    assert FULL.activations(7, **every, by_rows=True) == 7 * 2 * (24 + 16 + 40) * 4
    # In half precision norms keep more; packed attention keeps its output once.
    assert MIXED.activations(7, **every, by_rows=False) == 7 * 2 * (32 + 12 + 40) * 2


def test_with_checkpointing_activations_are_every_layer_s_input_and_one_layer() -> None:
    inputs = {"checkpointed": True, "selective": False}
    assert FULL.activations(7, **inputs, by_rows=True) == 7 * (2 * 4 + 80) * 4
    # In every layer also queries and attention's output (4 each), keys and values (2), two results of 4 and two of 10.
    products = {"checkpointed": True, "selective": True}
    assert FULL.activations(7, **products, by_rows=True) == 7 * (2 * (4 + 8 + 4 + 8 + 20) + 80) * 4


def test_a_forward_pass_without_gradients_holds_the_largest_tensors_of_one_layer() -> None:
    assert FULL.forward(7) == 7 * (30 + 8) * 4


@pytest.mark.parametrize(("tokens", "size"), [(5, 2.5 * 5 * 12 * 4), (100, 2.5 * 20 * 12 * 4)])
def test_logits_are_those_of_the_tokens_and_at_most_a_chunk(tokens: int, size: int) -> None:
    assert FULL.logits(tokens, at_once=20, on_cpu=True) == size
    assert MIXED.logits(tokens, at_once=20, on_cpu=False) == min(tokens, 20) * 12 * 2


def test_an_engine_keeps_further_copies_on_cpu() -> None:
    assert WHOLE.engine_weights(2, on_cpu=False) == 250 * 2
    assert WHOLE.engine_weights(4, on_cpu=True) == (250 + 200 + 4 * 12 * 4) * 4
    assert ADAPTED.engine_weights(4, on_cpu=True) == (270 + 220) * 4


def test_the_cache_of_a_row_has_keys_and_values_of_every_layer() -> None:
    assert WHOLE.row_cache(10, 2) == 2 * 2 * 2 * 10 * 2


# -- the plan: 1864 parameters, 648 of them outside the two layers -----------------------------------------------------


GIB = 2**30
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 80,  # so that the parameters outside the layers are more than a layer
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# Per layer: query, key and value with their biases, output, the three of the MLP, two norms.
LAYER = (8 * 8 + 8) + 2 * (8 * 4 + 4) + 8 * 8 + 3 * 8 * 16 + 2 * 8
EMBEDDING, NORM = 80 * 8, 8
PARAMETERS = EMBEDDING + 2 * LAYER + NORM

# Micro-batches are as long as ppo_max_token_len_per_gpu allows, 16384 tokens; nothing is saved.
LONG_ROWS = (
    "data.max_prompt_length=1024",
    "data.max_response_length=3072",
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "trainer.save_freq=-1",
    "trainer.ckpt_freq_secs=-1",
)

Load = Callable[..., PPOConfig]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """A configuration on CPU, as for another machine, with further overrides."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model" / "model.safetensors").touch()

    # Heads of 4: small enough to count by hand, and smaller than any engine's.
    monkeypatch.setattr("hybridrl.config.checks.model.CPU_HEAD_SIZES", (4,))

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
        judgement = resolve_config(PPOConfig, words, "ppo_trainer", offline=True)
        judgement.findings.close()
        assert judgement.config is not None
        return judgement.config

    return run


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set how many bytes of this machine's memory are free."""

    def free(size: float) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(size)))

    free(100 * GIB)
    return free


def run_of(config: PPOConfig, gpu: int = 0) -> PlannedRun:
    return PlannedRun(config, read_models(config), gpu)


def report(config: PPOConfig) -> Findings:
    findings = Findings()
    memory_plan(config, findings)
    return findings


def test_devices_that_share_rows_hold_their_part_of_a_micro_batch(load: Load) -> None:
    """16 rows of 256 tokens per update on each device, and one row per micro-batch: half a row on each of two."""
    keys = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100"]
    for size, tokens in ((1, 256), (2, 128)):
        run = run_of(load(*keys, f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size}"))
        assert run.micro_batch(build_policy_plan(run.config).updates.budget, prompts=8) == tokens


def test_a_micro_batch_takes_rows_up_to_the_budget_or_a_single_longer_one(load: Load) -> None:
    run = run_of(load())  # 2 prompts are 8 rows, of up to 256 tokens
    sizes = {(5000, None): 2048, (1000, None): 1000, (50, None): 256, (50, 3): 768, (50, 9): 2048}
    for (tokens, rows), size in sizes.items():
        assert run.micro_batch(MicroBatchBudget(tokens, rows), prompts=2) == size


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_sizes_are_read_from_config_json_alone(load: Load) -> None:
    sizes = model_sizes(blank(load().actor_rollout_ref.model, "model"))
    assert (sizes.parameters, sizes.trained) == (PARAMETERS, PARAMETERS)
    assert (sizes.small_fused, sizes.tied) == (PARAMETERS, True)
    assert (sizes.outside, sizes.layer, sizes.largest) == (EMBEDDING + NORM, LAYER, EMBEDDING)
    assert (sizes.layers, sizes.hidden, sizes.query, sizes.key) == (2, 8, 8, 4)
    assert (sizes.intermediate, sizes.vocabulary) == (16, 80)


def test_small_matrices_count_as_fused_in_an_engine(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = blank(load().actor_rollout_ref.model, "model")
    # Gate and up are fused to 256 elements; query, key, value and others with the same input to 192; down has 128.
    monkeypatch.setattr(memory_sizes, "SMALL", 190)
    small = 8 * 16 + 8 + 2 * 4 + 2 * 8  # down, biases, norms
    assert model_sizes(model).small_fused == 2 * small + NORM


def test_only_the_adapter_of_a_model_is_trained(load: Load) -> None:
    sizes = model_sizes(blank(load("actor_rollout_ref.model.lora_rank=2").actor_rollout_ref.model, "model"))
    pairs = 2 * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 3 * (8 + 16))
    assert (sizes.trained, sizes.parameters) == (2 * pairs, PARAMETERS + 2 * pairs)


def test_a_critic_has_a_head_of_one_number_in_place_of_the_vocabulary(load: Load) -> None:
    sizes = read_models(load("algorithm.adv_estimator=gae")).critic
    assert sizes is not None
    assert sizes.parameters == PARAMETERS + 8 + 1  # the head's weight and bias


def test_experts_count_as_many_as_a_token_goes_through(load: Load, tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "head_dim": 4}
    content = CONFIG | experts | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    assert model_sizes(blank(load().actor_rollout_ref.model, "model")).intermediate == 2 * 6


def test_the_weight_sync_has_memory_for_two_buckets(load: Load) -> None:
    model = blank(load().actor_rollout_ref.model, "model")
    layer = 64 * sum(-(-2 * size // 64) for size in (64, 8, 32, 4, 32, 4, 64, 128, 128, 128, 8, 8))
    assert sync_buffer(model, "bfloat16", 1) == 2 * layer  # tensors begin at multiples of 64 bytes


# -- phases ------------------------------------------------------------------------------------------------------------


def test_an_update_holds_parameters_gradients_moments_and_one_micro_batch(load: Load, memory: object) -> None:
    needs = phase_memory(run_of(load("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512")), "policy update").device
    token = 2 * 8 + 6 * 8 + 3 * 8 + 2 * 4 + 4 * 16  # checkpointed: both layers' inputs, and one layer
    assert needs["parameters"] == needs["gradients"] == 4 * PARAMETERS
    assert needs["rollout weights"] == 4 * (2 * PARAMETERS + 4 * EMBEDDING)
    assert needs["optimizer"] == 8 * PARAMETERS
    assert needs["activations"] == 512 * 4 * token
    assert needs["logits"] == 2.5 * (512 * 80 * 4)
    reduced = 2 * 4 * LAYER + 4 * EMBEDDING  # a layer's gradient, twice, and the head's
    assert needs["gathered"] == 4 * (EMBEDDING + NORM + 2 * LAYER) + reduced


def test_on_cpu_a_machine_holds_the_estimate_all_its_devices_and_processes(load: Load, memory: object) -> None:
    needs = machine_memory(run_of(load("trainer.n_gpus_per_node=2")), "policy update")
    assert needs["processes"] == MACHINE_BYTES + 2 * DEVICE_BYTES
    assert needs["parameters"] == 4 * PARAMETERS  # shards
    assert needs["rollout weights"] == 2 * 4 * (2 * PARAMETERS + 4 * EMBEDDING)  # an engine has all


def test_checkpoints_keep_a_copy_of_what_they_write(load: Load, memory: object) -> None:
    assert (
        phase_memory(run_of(load("trainer.save_freq=-1", "trainer.ckpt_freq_secs=-1")), "save").host[
            "checkpoint staging"
        ]
        == 0
    )
    assert phase_memory(run_of(load("trainer.save_freq=1")), "save").host["checkpoint staging"] == 12 * PARAMETERS
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[model]"
    assert (
        phase_memory(run_of(load("trainer.save_freq=1", contents)), "save").host["checkpoint staging"] == 4 * PARAMETERS
    )


def test_on_cuda_an_engine_has_its_share_during_rollout_and_nothing_during_training(load: Load, memory: object) -> None:
    run = run_of(load("trainer.device=cuda", "actor_rollout_ref.rollout.gpu_memory_utilization=0.6"), gpu=10 * GIB)
    rollout, update = phase_memory(run, "rollout").device, phase_memory(run, "policy update").device
    assert rollout["rollout weights"] + rollout["KV cache"] == 0.6 * 10 * GIB
    assert rollout["rollout weights"] == 2 * PARAMETERS  # bfloat16
    assert {"rollout weights", "KV cache"}.isdisjoint(update)


def test_on_cuda_offloaded_parts_are_in_host_memory(load: Load, memory: object) -> None:
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    run = run_of(load("trainer.device=cuda", f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true"))
    assert (
        phase_memory(run, "rollout").host["parameters"]
        == phase_memory(run, "log-probs").device["parameters"]
        == 4 * PARAMETERS
    )
    assert phase_memory(run, "log-probs").host["optimizer"] == 8 * PARAMETERS
    assert "optimizer" not in phase_memory(run, "log-probs").device


def test_under_offload_policy_a_gpu_holds_no_parameters_gradients_or_moments(load: Load, memory: object) -> None:
    run = run_of(load("trainer.device=cuda", "actor_rollout_ref.actor.fsdp_config.offload_policy=true"))
    update = phase_memory(run, "policy update")
    assert (update.host["parameters"], update.host["gradients"]) == (4 * PARAMETERS, 4 * PARAMETERS)
    assert update.host["optimizer"] == 8 * PARAMETERS
    assert {"parameters", "gradients", "optimizer"}.isdisjoint(update.device)
    assert phase_memory(run, "start-up").device["parameters"] == 4 * PARAMETERS, "on their way from the files"


def test_offloaded_parameters_leave_a_gpu_while_the_other_model_is_updated(load: Load, memory: object) -> None:
    keys = [f"{section}.param_offload=true" for section in ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp")]
    run = run_of(
        load(
            "algorithm.adv_estimator=gae",
            "trainer.device=cuda",
            "trainer.save_freq=-1",
            "trainer.ckpt_freq_secs=-1",
            *keys,
        )
    )
    policy, critic = 4 * PARAMETERS, 4 * (PARAMETERS + 8 + 1)
    update, other = phase_memory(run, "policy update"), phase_memory(run, "critic update")
    assert (update.device["parameters"], update.device["critic"]) == (policy, 2 * critic)  # the critic's moments
    assert (other.device["parameters"], other.device["critic"]) == (0, 3 * critic)
    assert update.host == other.host == {"parameters": policy, "critic": critic}, "their place is kept"


SLEEPING = {"CUDA contexts": (1.3 + 0.7) * GIB, "sleeping engine": 0.8 * GIB}


def test_the_update_of_qwen25_7b_on_eight_gpus(load: Load, memory: object, tmp_path: Path) -> None:
    """Worked out from config.json: hidden 3584, 28 layers, 28 heads and 4 of keys of 128, an untied head."""
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | shape | heads))
    attention = (3584 * 3584 + 3584) + 2 * (3584 * 512 + 512) + 3584 * 3584
    layer = attention + 3 * 3584 * 18944 + 2 * 3584
    outside = 2 * 152064 * 3584 + 3584
    parameters = 28 * layer + outside
    assert parameters == 7_615_616_512
    estimate = phase_memory(
        run_of(load("trainer.device=cuda", "trainer.n_gpus_per_node=8", *LONG_ROWS)), "policy update"
    )
    assert estimate.device == SLEEPING | {
        "parameters": 4 * parameters / 8,  # 3.55 GiB
        "gradients": 4 * parameters / 8,
        "optimizer": 8 * parameters / 8,
        # bfloat16: embedding and head, a layer and the next; gradients of embedding and head, and their float32 copy.
        "gathered": 2 * (outside + 2 * layer) + (2 + 4) * outside,  # 2.90 and 6.09 GiB
        # Every layer's input, and one layer: 8 of norms and residual stream, query and key, four of the MLP.
        "activations": 16384 * 2 * (28 * 3584 + 8 * 3584 + 2 * (3584 + 512) + 4 * 18944),  # 6.50 GiB
        "logits": (2**30 // (4 * 152064)) * 152064 * 2,  # a chunk in bfloat16: 0.50 GiB
    }
    assert round(estimate.device.total() / GIB, 1) == 33.0
    key = "actor_rollout_ref.actor.fsdp_config.offload_policy=true"
    run = run_of(load("trainer.device=cuda", "trainer.n_gpus_per_node=8", *LONG_ROWS, key))
    without = 16 * parameters / 8  # 14.2 GiB
    assert phase_memory(run, "policy update").device.total() == pytest.approx(estimate.device.total() - without)
    assert machine_memory(run, "policy update").total() - MACHINE_BYTES - 8 * DEVICE_BYTES == 8 * without


ADAPTER = ("actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.target_modules=all-linear")
# A layer's matrices as an engine fuses them (of attention all have 8 columns; gate and up), its biases and norms.
FUSED = (8 * (8 + 4 + 4 + 8), 2 * 8 * 16, 8 * 16, 8 + 4 + 4, 2 * 8)
ROUNDED = 2 * (256 + 256 + 128 + 16 + 16) + 1024 + 8  # powers of two: of both layers, the embedding and the last norm


def test_the_base_of_an_adapter_waits_in_page_locked_memory_while_its_engine_sleeps(load: Load, memory: object) -> None:
    assert FUSED == (192, 256, 128, 16, 16) and EMBEDDING == 640
    run = run_of(load("trainer.device=cuda", "trainer.n_gpus_per_node=2", *ADAPTER))
    assert [phase_memory(run, phase).host["sleeping base"] for phase in ("start-up", "policy update")] == [
        2 * ROUNDED,  # bfloat16
        2 * ROUNDED,
    ]
    assert machine_memory(run, "rollout")["sleeping base"] == 2 * 2 * ROUNDED
    for other in (
        ["trainer.device=cuda"],
        ["trainer.device=cuda", *ADAPTER, "actor_rollout_ref.model.lora.merge=true"],
        ["trainer.device=cuda", *ADAPTER, "actor_rollout_ref.rollout.free_cache_engine=false"],
        ["trainer.device=cuda", *ADAPTER, *SEPARATE],
        ["trainer.device=cpu", *ADAPTER],
    ):
        assert "sleeping base" not in phase_memory(run_of(load(*other)), "policy update").host


def test_a_machine_whose_memory_a_sleeping_base_does_not_fit_is_offered_merged_weights(load: Load, memory) -> None:
    run = run_of(load("trainer.device=cuda", *ADAPTER))

    def peak(changed: PlannedRun) -> float:
        return make_plans(changed)[1].needs["rollout"]["sleeping base"]

    assert suggest_fix(run, peak, peak(run) - 1) == "set actor_rollout_ref.model.lora.merge=true"


SEPARATE = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.n_gpus_per_node=1")


def test_gpus_of_rollout_servers_have_a_plan_of_their_own(load: Load, memory: object) -> None:
    run = run_of(load("trainer.device=cuda", "trainer.n_gpus_per_node=1", *SEPARATE), gpu=10 * GIB)
    *_, plan = make_plans(run)
    assert (plan.place, plan.available) == ("each GPU of the rollout servers", 10 * GIB)
    assert plan.needs["rollout"] == {
        "rollout weights": 2 * PARAMETERS,
        "KV cache": 0.9 * 10 * GIB - 2 * PARAMETERS,
        "CUDA contexts": 0.7 * GIB,
        "sync buckets": 0,
    }
    assert plan.needs["weight sync"]["sync buckets"] == run.models.bucket > 0
    assert len(make_plans(run_of(load("trainer.device=cuda"), gpu=10 * GIB))) == 2


def test_an_engine_that_fills_its_gpu_is_offered_a_smaller_share(
    load: Load, memory: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan_module, "visible_gpus", lambda: [Gpu(0, "", 6 * GIB, 0)] * 2)
    findings = report(load("trainer.device=cuda", "trainer.n_gpus_per_node=1", *SEPARATE))
    (finding,) = (item for item in findings.items if "memory of each GPU of the rollout servers: " in item.cause)
    assert finding.severity == "warning"
    assert finding.fix == "set actor_rollout_ref.rollout.gpu_memory_utilization=0.85"


def test_the_update_of_qwen25_05b_on_one_gpu(load: Load, memory: object, tmp_path: Path) -> None:
    """Worked out from config.json: hidden 896, 24 layers, 14 heads and 2 of keys of 64, a tied head."""
    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | shape | heads))
    attention = (896 * 896 + 896) + 2 * (896 * 128 + 128) + 896 * 896
    layer = attention + 3 * 896 * 4864 + 2 * 896
    outside = 151936 * 896 + 896
    parameters = 24 * layer + outside
    assert parameters == 494_032_768
    estimate = phase_memory(run_of(load("trainer.device=cuda", *LONG_ROWS)), "policy update").device
    assert estimate == SLEEPING | {
        "parameters": 4 * parameters,  # 1.84 GiB
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters,
        "gathered": 2 * (outside + 2 * layer) + (2 + 4) * outside,  # 0.31 and 0.76 GiB
        "activations": 16384 * 2 * (24 * 896 + 8 * 896 + 2 * (896 + 128) + 4 * 4864),  # 1.53 GiB
        "logits": (2**30 // (4 * 151936)) * 151936 * 2,  # 0.50 GiB
    }
    assert round(estimate.total() / GIB, 1) == 13.3


def test_a_reference_is_held_only_if_one_is_used(load: Load, memory: object) -> None:
    assert "reference" not in phase_memory(run_of(load()), "log-probs").device
    used = run_of(load("actor_rollout_ref.actor.use_kl_loss=true"))
    assert phase_memory(used, "log-probs").device["reference"] == 4 * PARAMETERS


def test_the_cache_is_reported_in_rows_of_full_length(load: Load, memory: object) -> None:
    texts = [finding.text for finding in report(load()).items]
    assert "the KV cache of an engine holds an estimated 2 rows of 256 tokens (max_num_seqs=2)" in texts


# -- findings ----------------------------------------------------------------------------------------------------------


def test_a_plan_that_fits_is_reported_as_a_table(load: Load, memory: object) -> None:
    findings = report(load())
    assert {finding.severity for finding in findings.items} == {"info"}
    lines = findings.items[0].text.splitlines()
    assert lines[0] == "estimated memory of this machine, all processes together, in GiB:"
    assert lines[1].split("  ")[-1].strip() == "save"
    assert lines[-1].startswith("total")


def test_a_shortage_is_an_error_only_if_what_is_counted_exactly_does_not_fit(load: Load, memory) -> None:
    config = load()
    (plan,) = make_plans(run_of(config))
    processes = MACHINE_BYTES + DEVICE_BYTES * config.trainer.n_gpus_per_node
    assert plan.certain == processes + config.trainer.n_gpus_per_node * 16 * PARAMETERS  # gradients and two moments
    memory(plan.certain + 1)
    assert [finding.severity for finding in report(config).items if finding.fix] == ["warning"]
    memory(plan.certain - 1)
    assert [finding.severity for finding in report(config).items if finding.fix] == ["error"]


def test_the_number_of_devices_that_would_do_is_named_and_no_adapter_to_a_run_that_has_one(load: Load, memory) -> None:
    run = run_of(load("trainer.device=cuda", "trainer.n_gpus_per_node=2"))

    def peak(changed: PlannedRun) -> float:
        return 16 * PARAMETERS / changed.config.trainer.devices

    last = "take a smaller model, 8 devices (trainer.nnodes x trainer.n_gpus_per_node)"
    assert last in suggest_fix(run, peak, 16 * PARAMETERS / 8)
    run.config.actor_rollout_ref.model.lora_rank = 16
    assert suggest_fix(run, peak, 16 * PARAMETERS / 8).endswith(last)


def test_an_engine_whose_weights_leave_no_room_for_a_cache_is_offered_more_devices(
    load: Load, memory: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan_module, "visible_gpus", lambda: [Gpu(0, "", int(3.5 * PARAMETERS), 0)] * 4)
    half = "actor_rollout_ref.rollout.gpu_memory_utilization=0.5"  # of weights in bfloat16: 2 bytes per parameter
    findings = report(load("trainer.device=cuda", "trainer.n_gpus_per_node=4", half))
    (finding,) = (item for item in findings.items if item.code == "memory.cache")
    assert finding.fix.endswith("or set actor_rollout_ref.rollout.tensor_model_parallel_size=2")


def test_a_layer_to_shard_that_the_model_lacks_is_an_error(load: Load, memory: object) -> None:
    key = "actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
    (finding,) = report(load(f"{key}=LlamaDecoderLayer")).errors
    assert f"{key}=LlamaDecoderLayer: the model has no such layer; it has Qwen2DecoderLayer" in finding.cause


def test_the_suggested_override_makes_the_run_fit(load: Load, memory) -> None:
    long = (
        "data.max_response_length=3000",
        "data.train_batch_size=400",
        "actor_rollout_ref.actor.ppo_mini_batch_size=400",
    )
    tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3000000"
    config = load(*long, tokens)
    memory(4.1 * GIB)
    assert make_plans(run_of(config))[0].peak > 4.1 * GIB
    (finding,) = (item for item in report(config).items if item.severity != "info")
    assert finding.fix.startswith("set actor_rollout_ref.actor.ppo_max_token_len_per_gpu=")
    changed = load(*long, tokens, *finding.fix.removeprefix("set ").split())
    assert make_plans(run_of(changed))[0].peak <= 4.1 * GIB


def test_an_insufficient_set_of_overrides_is_reported(load: Load, memory) -> None:
    memory(1 * GIB)
    (finding,) = report(load()).errors
    assert finding.fix.endswith(", a machine with more memory, or an adapter (actor_rollout_ref.model.lora_rank=32)")


def test_an_optimizer_on_the_cpu_is_proposed_only_if_nothing_else_helps(load: Load, memory: object) -> None:
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    keys = [f"{fsdp}.param_offload=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256"]
    run = run_of(load("trainer.device=cuda", *keys))

    def peak(changed: PlannedRun) -> float:
        return make_plans(changed)[0].peak

    assert suggest_fix(run, peak, peak(run) - 1) == f"set {fsdp}.optimizer_offload=true"
    run = run_of(load("trainer.device=cuda", *keys, f"{fsdp}.optimizer_offload=true"))
    assert suggest_fix(run, peak, peak(run) - 1) == f"set {fsdp}.offload_policy=true"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_suggestion_changes_what_is_learned(load: Load, memory: object, device: str) -> None:
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


def test_a_run_on_an_existing_ray_cluster_is_not_compared_with_this_machine(
    load: Load, memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(1 * GIB)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    assert {finding.severity for finding in report(load()).items} == {"info"}


def test_the_smallest_gpu_counts(load: Load, memory: object, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(index, "", total, total) for index, total in enumerate((80_000_000_000, 40_000))]
    monkeypatch.setattr(memory_plan_module, "visible_gpus", lambda: gpus)
    (finding,) = (
        item
        for item in report(load("trainer.device=cuda", "trainer.n_gpus_per_node=2")).items
        if item.code == "memory.lack" and item.cause.startswith("memory of each GPU")
    )
    assert finding.cause.startswith("memory of each GPU: policy update takes an estimated")


def test_a_model_that_cannot_be_read_here_is_reported(
    load: Load, memory: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(config: PPOConfig) -> None:
        raise OSError("no network")

    monkeypatch.setattr(memory_plan_module, "read_models", unreachable)
    (finding,) = report(load()).items
    assert (finding.code, finding.severity) == ("memory.unknown", "info")
    assert finding.cause == "memory is not estimated: a model's config.json cannot be read (no network)"
