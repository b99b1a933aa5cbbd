"""The plan of a model whose sizes are worked out by hand below: 1864 parameters, 648 of them outside its two layers."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hybridrl.config import PPOConfig, model_checks
from hybridrl.config.findings import Findings
from hybridrl.config.load import judge
from hybridrl.doctor import memory_plan as plan_of
from hybridrl.doctor import memory_sizes as sizes_of
from hybridrl.doctor.gpus import Gpu
from hybridrl.doctor.memory_phases import MACHINE_BYTES, SLOT_BYTES, held, machine_needs
from hybridrl.doctor.memory_plan import memory_plan, plans, read_models
from hybridrl.doctor.memory_remedy import remedy
from hybridrl.doctor.memory_setup import Setup, setup
from hybridrl.doctor.memory_sizes import blank, hand_over_buffer, model_sizes
from hybridrl.runs.settings import build_policy_plan

GIB = 2**30
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 80,  # so that what is in no layer is more than a layer
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# Of a layer: query, key and value with their biases, output, the three of the MLP, two norms.
LAYER = (8 * 8 + 8) + 2 * (8 * 4 + 4) + 8 * 8 + 3 * 8 * 16 + 2 * 8
EMBEDDING, NORM = 80 * 8, 8
PARAMETERS = EMBEDDING + 2 * LAYER + NORM

# Passes are as long as ppo_max_token_len_per_gpu allows, 16384 tokens; nothing is saved.
LONG_ROWS = (
    "data.max_prompt_length=1024",
    "data.max_response_length=3072",
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "trainer.save_freq=-1",
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
    monkeypatch.setattr(model_checks, "CPU_HEAD_SIZES", (4,))

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
        judgement = judge(PPOConfig, words, "ppo_trainer", elsewhere=True)
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


def run_of(config: PPOConfig, gpu: int = 0) -> Setup:
    return setup(config, read_models(config), gpu)


def asked(config: PPOConfig) -> Findings:
    findings = Findings()
    memory_plan(config, findings)
    return findings


def test_of_devices_that_share_rows_each_holds_its_part_of_a_pass(load: Load) -> None:
    """16 rows of 256 tokens an update on either device, and no pass of more tokens than a row: half of one each."""
    keys = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100"]
    for size, tokens in ((1, 256), (2, 128)):
        run = run_of(load(*keys, f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size}"))
        assert run.tokens(build_policy_plan(run.config).updates.budget, prompts=8) == tokens


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_sizes_are_told_by_config_json_alone(load: Load) -> None:
    sizes = model_sizes(blank(load().actor_rollout_ref.model, "model"))
    assert (sizes.parameters, sizes.trained) == (PARAMETERS, PARAMETERS)
    assert (sizes.small_fused, sizes.tied) == (PARAMETERS, True)
    assert (sizes.outside, sizes.layer, sizes.largest) == (EMBEDDING + NORM, LAYER, EMBEDDING)
    assert (sizes.layers, sizes.hidden, sizes.query, sizes.key) == (2, 8, 8, 4)
    assert (sizes.intermediate, sizes.vocabulary) == (16, 80)


def test_what_is_small_counts_fused_in_an_engine(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = blank(load().actor_rollout_ref.model, "model")
    # Gate and up are fused to 256, query, key, value and what else reads as much to 192; down has 128.
    monkeypatch.setattr(sizes_of, "SMALL", 190)
    small = 8 * 16 + 8 + 2 * 4 + 2 * 8  # down, biases, norms
    assert model_sizes(model).small_fused == 2 * small + NORM


def test_of_a_model_with_an_adapter_the_adapter_is_trained(load: Load) -> None:
    sizes = model_sizes(blank(load("actor_rollout_ref.model.lora_rank=2").actor_rollout_ref.model, "model"))
    pairs = 2 * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 3 * (8 + 16))
    assert (sizes.trained, sizes.parameters) == (2 * pairs, PARAMETERS + 2 * pairs)


def test_a_critic_has_a_head_of_one_number_in_place_of_the_vocabulary(load: Load) -> None:
    sizes = read_models(load("algorithm.adv_estimator=gae")).critic
    assert sizes is not None
    assert sizes.parameters == PARAMETERS + 8 + 1  # the head's weight and bias


def test_experts_count_as_many_as_a_token_goes_through(load: Load, tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "head_dim": 4}
    told = CONFIG | experts | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(told))
    assert model_sizes(blank(load().actor_rollout_ref.model, "model")).intermediate == 2 * 6


def test_the_hand_over_has_memory_for_two_buckets(load: Load) -> None:
    model = blank(load().actor_rollout_ref.model, "model")
    layer = 64 * sum(-(-2 * size // 64) for size in (64, 8, 32, 4, 32, 4, 64, 128, 128, 128, 8, 8))
    assert hand_over_buffer(model, "bfloat16", 1) == 2 * layer  # tensors begin at multiples of 64 bytes


# -- phases ------------------------------------------------------------------------------------------------------------


def test_an_update_holds_parameters_gradients_moments_and_one_pass(load: Load, memory: object) -> None:
    needs = held(run_of(load("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512")), "policy update").device
    token = 2 * 8 + 6 * 8 + 3 * 8 + 2 * 4 + 4 * 16  # checkpointed: both layers' inputs, and one layer
    assert needs["parameters"] == needs["gradients"] == 4 * PARAMETERS
    assert needs["rollout weights"] == 4 * (2 * PARAMETERS + 4 * EMBEDDING)
    assert needs["optimizer"] == 8 * PARAMETERS
    assert needs["activations"] == 512 * 4 * token
    assert needs["logits"] == 2.5 * (512 * 80 * 4)
    reduced = 2 * 4 * LAYER + 4 * EMBEDDING  # a layer's gradient, twice, and the head's
    assert needs["gathered"] == 4 * (EMBEDDING + NORM + 2 * LAYER) + reduced


def test_on_cpu_a_machine_holds_what_all_its_slots_hold_and_their_processes(load: Load, memory: object) -> None:
    needs = machine_needs(run_of(load("trainer.n_gpus_per_node=2")), "policy update")
    assert needs["processes"] == MACHINE_BYTES + 2 * SLOT_BYTES
    assert needs["parameters"] == 4 * PARAMETERS  # shards
    assert needs["rollout weights"] == 2 * 4 * (2 * PARAMETERS + 4 * EMBEDDING)  # an engine has all


def test_saves_keep_a_copy_of_what_they_write(load: Load, memory: object) -> None:
    assert held(run_of(load("trainer.save_freq=-1")), "save").host["staging of saves"] == 0
    assert held(run_of(load("trainer.save_freq=1")), "save").host["staging of saves"] == 12 * PARAMETERS
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[model]"
    assert held(run_of(load("trainer.save_freq=1", contents)), "save").host["staging of saves"] == 4 * PARAMETERS


def test_on_cuda_an_engine_has_its_share_while_it_rolls_out_and_nothing_while_training(
    load: Load, memory: object
) -> None:
    run = run_of(load("trainer.device=cuda", "actor_rollout_ref.rollout.gpu_memory_utilization=0.6"), gpu=10 * GIB)
    rollout, update = held(run, "rollout").device, held(run, "policy update").device
    assert rollout["rollout weights"] + rollout["KV cache"] == 0.6 * 10 * GIB
    assert rollout["rollout weights"] == 2 * PARAMETERS  # bfloat16
    assert {"rollout weights", "KV cache"}.isdisjoint(update)


def test_on_cuda_what_is_offloaded_is_in_host_memory(load: Load, memory: object) -> None:
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    run = run_of(load("trainer.device=cuda", f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true"))
    assert held(run, "rollout").host["parameters"] == held(run, "log-probs").device["parameters"] == 4 * PARAMETERS
    assert held(run, "log-probs").host["optimizer"] == 8 * PARAMETERS
    assert "optimizer" not in held(run, "log-probs").device


def test_under_offload_policy_a_gpu_holds_no_parameters_gradients_or_moments(load: Load, memory: object) -> None:
    run = run_of(load("trainer.device=cuda", "actor_rollout_ref.actor.fsdp_config.offload_policy=true"))
    update = held(run, "policy update")
    assert (update.host["parameters"], update.host["gradients"]) == (4 * PARAMETERS, 4 * PARAMETERS)
    assert update.host["optimizer"] == 8 * PARAMETERS
    assert {"parameters", "gradients", "optimizer"}.isdisjoint(update.device)
    assert held(run, "start-up").device["parameters"] == 4 * PARAMETERS, "on their way from the files"


def test_what_may_leave_a_gpu_leaves_it_while_the_other_model_learns(load: Load, memory: object) -> None:
    keys = [f"{section}.param_offload=true" for section in ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp")]
    run = run_of(load("algorithm.adv_estimator=gae", "trainer.device=cuda", "trainer.save_freq=-1", *keys))
    policy, critic = 4 * PARAMETERS, 4 * (PARAMETERS + 8 + 1)
    update, other = held(run, "policy update"), held(run, "critic update")
    assert (update.device["parameters"], update.device["critic"]) == (policy, 2 * critic)  # the critic's moments
    assert (other.device["parameters"], other.device["critic"]) == (0, 3 * critic)
    assert update.host == other.host == {"parameters": policy, "critic": critic}, "a place there is kept"


SLEEPING = {"CUDA contexts": 2 * 0.5 * GIB, "sleeping engine": 1.5 * GIB}


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
    found = held(run_of(load("trainer.device=cuda", "trainer.n_gpus_per_node=8", *LONG_ROWS)), "policy update")
    assert found.device == SLEEPING | {
        "parameters": 4 * parameters / 8,  # 3.55 GiB
        "gradients": 4 * parameters / 8,
        "optimizer": 8 * parameters / 8,
        # bfloat16: embedding and head, a layer and the next; these two's gradients, and their copy in float32.
        "gathered": 2 * (outside + 2 * layer) + (2 + 4) * outside,  # 2.90 and 6.09 GiB
        # Every layer's input, and one layer: 8 of the norms and the stream, query and key, four of the MLP.
        "activations": 16384 * 2 * (28 * 3584 + 8 * 3584 + 2 * (3584 + 512) + 4 * 18944),  # 6.50 GiB
        "logits": (2**30 // (4 * 152064)) * 152064 * 2,  # a chunk in bfloat16: 0.50 GiB
    }
    assert round(found.device.total() / GIB, 1) == 32.7
    key = "actor_rollout_ref.actor.fsdp_config.offload_policy=true"
    run = run_of(load("trainer.device=cuda", "trainer.n_gpus_per_node=8", *LONG_ROWS, key))
    without = 16 * parameters / 8  # 14.2 GiB
    assert held(run, "policy update").device.total() == found.device.total() - without
    assert machine_needs(run, "policy update").total() - MACHINE_BYTES - 8 * SLOT_BYTES == 8 * without


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
    found = held(run_of(load("trainer.device=cuda", *LONG_ROWS)), "policy update").device
    assert found == SLEEPING | {
        "parameters": 4 * parameters,  # 1.84 GiB
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters,
        "gathered": 2 * (outside + 2 * layer) + (2 + 4) * outside,  # 0.31 and 0.76 GiB
        "activations": 16384 * 2 * (24 * 896 + 8 * 896 + 2 * (896 + 128) + 4 * 4864),  # 1.53 GiB
        "logits": (2**30 // (4 * 151936)) * 151936 * 2,  # 0.50 GiB
    }
    assert round(found.total() / GIB, 1) == 13.0


def test_a_reference_is_held_only_where_one_is_used(load: Load, memory: object) -> None:
    assert "reference" not in held(run_of(load()), "log-probs").device
    used = run_of(load("actor_rollout_ref.actor.use_kl_loss=true"))
    assert held(used, "log-probs").device["reference"] == 4 * PARAMETERS


def test_the_cache_is_told_by_the_rows_of_full_length_it_holds(load: Load, memory: object) -> None:
    told = [finding.text for finding in asked(load()).found]
    assert "the KV cache of an engine holds 2 rows of 256 tokens (max_num_seqs=2)" in told


# -- what is said ------------------------------------------------------------------------------------------------------


def test_a_plan_that_fits_is_told_as_a_table(load: Load, memory: object) -> None:
    findings = asked(load())
    assert {finding.severity for finding in findings.found} == {"information"}
    lines = findings.found[0].text.splitlines()
    assert lines[0] == "memory of this machine, in all processes together, in GiB:"
    assert lines[1].split("  ")[-1].strip() == "save"
    assert lines[-1].startswith("together")


def test_a_lack_within_the_plans_error_is_a_warning_and_a_larger_one_is_refused(load: Load, memory) -> None:
    config = load()
    peak = plans(run_of(config))[0].peak
    memory(0.9 * peak)
    assert [finding.severity for finding in asked(config).found if finding.fix] == ["warning"]
    memory(0.7 * peak)
    assert [finding.severity for finding in asked(config).found if finding.fix] == ["refused"]


def test_the_override_that_is_named_mends_the_lack(load: Load, memory) -> None:
    long = (
        "data.max_response_length=3000",
        "data.train_batch_size=400",
        "actor_rollout_ref.actor.ppo_mini_batch_size=400",
    )
    tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3000000"
    config = load(*long, tokens)
    memory(4.1 * GIB)
    assert plans(run_of(config))[0].peak > 4.1 * GIB
    (finding,) = (item for item in asked(config).found if item.severity != "information")
    assert finding.fix.startswith("set actor_rollout_ref.actor.ppo_max_token_len_per_gpu=")
    mended = load(*long, tokens, *finding.fix.removeprefix("set ").split())
    assert plans(run_of(mended))[0].peak <= 4.1 * GIB


def test_where_no_override_is_enough_it_is_said(load: Load, memory) -> None:
    memory(1 * GIB)
    (finding,) = asked(load()).refused
    assert finding.fix.endswith("or an adapter (actor_rollout_ref.model.lora_rank=32)")


def test_an_optimizer_on_the_cpu_is_proposed_only_where_nothing_else_helps(load: Load, memory: object) -> None:
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    keys = [f"{fsdp}.param_offload=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256"]
    run = run_of(load("trainer.device=cuda", *keys))

    def peak(changed: Setup) -> float:
        return plans(changed)[0].peak

    assert remedy(run, peak, peak(run) - 1) == f"set {fsdp}.optimizer_offload=true"
    run = run_of(load("trainer.device=cuda", *keys, f"{fsdp}.optimizer_offload=true"))
    assert remedy(run, peak, peak(run) - 1) == f"set {fsdp}.offload_policy=true"


def test_a_run_on_a_ray_that_is_joined_is_not_judged_by_this_machine(
    load: Load, memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(1 * GIB)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    assert {finding.severity for finding in asked(load()).found} == {"information"}


def test_a_gpu_that_is_too_small_is_told_with_what_may_leave_it(
    load: Load, memory: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu(index, "", total, total) for index, total in enumerate((80_000_000_000, 40_000))]
    monkeypatch.setattr(plan_of, "visible_gpus", lambda: gpus)
    (finding,) = (
        item
        for item in asked(load("trainer.device=cuda", "trainer.n_gpus_per_node=2")).found
        if item.severity == "refused"
    )
    assert finding.cause.startswith("memory of each GPU: policy update takes")


def test_a_model_that_cannot_be_read_here_is_told(load: Load, memory: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(config: PPOConfig) -> None:
        raise OSError("no network")

    monkeypatch.setattr(plan_of, "read_models", unreachable)
    (finding,) = asked(load()).found
    assert (finding.code, finding.severity) == ("memory.unknown", "information")
    assert finding.cause == "memory is not planned: a model's config.json cannot be read (no network)"
