"""Arguments of vLLM's engine in the configuration: those that hybridrl sets, and names that vLLM does not have."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import Qwen3_5MoeTextConfig, Qwen3Config, Qwen3MoeConfig

from hybridrl.config.checks.engine import FIXED, KEY, SET_BY, vllm_arguments
from hybridrl.config.load import resolve_config
from hybridrl.config.schema import PPOConfig
from hybridrl.core.required import required

ROLLOUT = "actor_rollout_ref.rollout"


def errors(argument: str) -> list[str]:
    overrides = ["data.train_files=x", "actor_rollout_ref.model.path=m", f"+{ROLLOUT}{KEY}.{argument}"]
    return [one.text for one in resolve_config(PPOConfig, overrides, "ppo_trainer", offline=True).findings.errors]


def test_an_argument_that_a_key_sets_is_rejected_with_that_key():
    (text,) = errors("max_model_len=4096")
    assert text == (
        f"{ROLLOUT}{KEY}.max_model_len=4096: {ROLLOUT}.max_model_len sets it, for trainer and engine alike; "
        f"set {ROLLOUT}.max_model_len=4096"
    )


def test_an_argument_that_would_make_every_importance_ratio_wrong_is_rejected():
    (text,) = errors("logprobs_mode=raw_logprobs")
    assert "or every importance ratio is wrong; leave it out" in text


def test_a_name_that_the_engine_does_not_have_is_rejected_with_the_nearest_one():
    (text,) = errors("kv_cache_dtyp=fp8")
    assert "the engine of the installed vLLM has no such argument; did you mean kv_cache_dtype" in text


REPLAY = "actor_rollout_ref.actor.router_replay.mode"
ROUTES = f"{ROLLOUT}.enable_rollout_routing_replay"
CACHING, COMPILED = f"{ROLLOUT}.enable_prefix_caching", "actor_rollout_ref.actor.fsdp_config.compile_layers"
ON_CUDA = ["trainer.device=cuda", "trainer.n_gpus_per_node=1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for name, settings in {
        "mixture": Qwen3MoeConfig(num_experts=8),
        "dense": Qwen3Config(),
        "recurrent mixture": Qwen3_5MoeTextConfig(),
    }.items():
        made[name] = tmp_path_factory.mktemp("model")
        settings.save_pretrained(made[name])
        (made[name] / "model.safetensors").touch()
    made["unknown mixture"] = tmp_path_factory.mktemp("model")
    (made["unknown mixture"] / "model.safetensors").touch()
    (made["unknown mixture"] / "config.json").write_text('{"num_experts": 8, "top_k_experts": 2}')
    return made


def replay(model: Path, *keys: str) -> tuple[str, list[str], PPOConfig]:
    """The mode that results, with errors and warnings about it."""
    overrides = ["data.train_files=x", f"actor_rollout_ref.model.path={model}", *keys]
    resolved = resolve_config(PPOConfig, overrides, "ppo_trainer", offline=True)
    config, found = required(resolved.config), [one.text for one in resolved.findings.items if REPLAY in one.text]
    return config.actor_rollout_ref.actor.router_replay.mode, found, config


@pytest.mark.parametrize(
    ("model", "keys", "mode"),
    [
        ("mixture", [], "disabled"),
        ("mixture", [f"{REPLAY}=R3"], "R3"),
        ("mixture", [f"{REPLAY}=auto"], "disabled"),  # on CPU the engine computes in float32
        ("mixture", [f"{REPLAY}=auto", f"{ROLLOUT}.dtype=bf16"], "R3"),
        ("mixture", [f"{REPLAY}=auto", *ON_CUDA], "R3"),
        ("recurrent mixture", [f"{REPLAY}=auto", *ON_CUDA], "R3"),
        ("mixture", [f"{REPLAY}=auto", f"{ROLLOUT}.dtype=bf16", f"{ROLLOUT}.enable_prefix_caching=false"], "disabled"),
        ("mixture", [f"{REPLAY}=auto", f"{ROLLOUT}.dtype=bf16", f"{ROUTES}=false"], "disabled"),
        ("dense", [f"{REPLAY}=auto", f"{ROLLOUT}.dtype=bf16"], "disabled"),
        ("unknown mixture", [f"{REPLAY}=auto", f"{ROLLOUT}.dtype=bf16"], "disabled"),
        ("recurrent mixture", [f"{REPLAY}=auto"], "disabled"),  # on CPU no prefix of it is cached
    ],
)
def test_the_experts_of_the_engine_are_replayed_where_that_is_wanted_and_helps(models, model, keys, mode):
    resolved, found, config = replay(models[model], *keys)
    assert (resolved, found) == (mode, [])
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay is (mode == "R3")


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("dense", [], f"is no mixture of experts; set {REPLAY}=disabled"),
        ("unknown mixture", [], f"its config.json does not name num_experts_per_tok; set {REPLAY}=disabled"),
        ("mixture", [f"{CACHING}=false"], f"vLLM keeps experts with its prefixes; set {CACHING}=true"),
        ("mixture", [f"{ROUTES}=false"], "the engine returns no experts; leave it out"),
        ("mixture", [*ON_CUDA, f"{COMPILED}=true"], f"it is not in compiled layers; set {COMPILED}=false"),
        ("recurrent mixture", [], f"vLLM keeps experts with its prefixes; set {CACHING}=true"),
    ],
)
def test_replay_that_cannot_work_is_rejected_before_the_start(models, model, keys, message):
    _, (text,), _ = replay(models[model], f"{REPLAY}=R3", *keys)
    assert text.endswith(message)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("R2", "which may differ from the engine's, are not replayed; set R3, which replays the engine's"),
        ("R33", "choose disabled | auto | R3"),
    ],
)
def test_another_mode_is_rejected_with_those_that_there_are(models, mode, message):
    _, (text,), _ = replay(models["mixture"], f"{REPLAY}={mode}")
    assert message in text


def test_whether_a_model_that_is_not_here_is_a_mixture_is_not_decided_without_a_word():
    mode, (text,), _ = replay(Path("someone/a-model"), f"{REPLAY}=auto", *ON_CUDA)
    assert mode == "disabled" and text.endswith(f"is not on this machine; set {REPLAY}=R3 if it is a mixture")


def test_experts_that_nothing_replays_are_not_returned(models):
    mode, (text,), config = replay(models["mixture"], f"{ROUTES}=true")
    assert mode == "disabled" and text.endswith(f"has no effect; set {REPLAY}=R3")
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay is False


@pytest.mark.parametrize("argument", ["kv_cache_dtype=fp8", "seed=null", "attention_backend=TRITON_ATTN"])
def test_other_arguments_reach_the_engine(argument):
    assert errors(argument) == []


def test_the_names_are_those_of_vllm_itself():
    from vllm import AsyncEngineArgs  # slow to import

    assert vllm_arguments() == {field.name for field in fields(AsyncEngineArgs)}
    assert vllm_arguments() >= {*SET_BY, *FIXED}


# What hybridrl sets and a user may change, or what follows from keys of LoRA, which are checked with the model.
FREE = {
    *("disable_log_stats", "kv_cache_memory_bytes", "structured_outputs_config"),
    *("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras"),
}


def test_every_argument_that_hybridrl_gives_the_engine_is_in_a_table():
    source = (Path(__file__).parents[2] / "hybridrl" / "core" / "rollout" / "vllm" / "engine.py").read_text(
        encoding="utf-8"
    )
    function = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "engine_arguments")
    nodes = [*ast.walk(function)]
    given = {
        key.value for node in nodes if isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)
    }
    given |= {
        node.slice.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    }
    assert len(given) > 20
    assert given - {*SET_BY, *FIXED} == FREE
