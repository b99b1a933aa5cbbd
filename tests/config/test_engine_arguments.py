"""Arguments of vLLM's engine in the configuration: those that hybridrl sets, and names that vLLM does not have."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from hybridrl.config.checks.engine import FIXED, KEY, SET_BY, vllm_arguments
from hybridrl.config.load import resolve_config
from hybridrl.config.schema import PPOConfig

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
