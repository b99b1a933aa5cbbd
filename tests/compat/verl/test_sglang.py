"""verl's commands for SGLang, and its keys that concern that engine."""

import json
from pathlib import Path

import pytest

from hybridrl.config import PPOConfig
from hybridrl.config.load import resolve_config

from ..translation.test_asynchronous import accepted, notes, resolved

COMMANDS = Path(__file__).parents[4] / "shared" / "data" / "verl_sglang.jsonl"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE, ARGUMENTS = f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.engine_kwargs.sglang"
ASCEND = f"{ARGUMENTS}.attention_backend=ascend: this attention is for NPUs; set fa3, flashinfer or triton"
# A script -> what its error says; nothing where the command is accepted.
SCRIPTS = {
    "grpo_trainer/run_glm4_1v_9b_fsdp": "",
    "grpo_trainer/run_qwen2_5_32b_fsdp": "",
    "grpo_trainer/run_qwen3_4b_fsdp": "",
    "grpo_trainer/run_qwen3_5_27b_fsdp": "",
    "grpo_trainer/run_qwen3_5_35b_fsdp": "",
    "grpo_trainer/run_qwen3_vl_30b_a3b_fsdp": "",
    "profile/run_qwen2_5_vl_7b_torch_memory": "",
    "special_e2e/run_v1_colocate_async_disrm": "",
    "special_npu/quick_start/run_qwen3_0_6b_fsdp2_sglang_ascend": ASCEND,
}


def commands() -> dict[str, list[str]]:
    lines = COMMANDS.read_text(encoding="utf-8").splitlines() if COMMANDS.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {row["script"].partition("/")[2].removesuffix(".sh"): row["overrides"] for row in rows}


@pytest.mark.skipif(not COMMANDS.is_file(), reason="needs verl's command lines next to the project")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_recorded_command_is_accepted_or_rejected_for_another_reason(script: str) -> None:
    overrides, reason = commands()[script], SCRIPTS[script]
    result = resolve_config(PPOConfig, overrides, "", offline=True)
    errors = [finding.text for finding in result.findings.errors]
    assert len(errors) == bool(reason) and all(reason in text for text in errors), errors
    if reason:
        return
    assert result.config is not None
    rollout, written = result.config.actor_rollout_ref.rollout, dict(text.split("=", 1) for text in overrides)
    assert rollout.name == "sglang"
    assert rollout.tensor_model_parallel_size == int(written[f"{ROLLOUT}.tensor_model_parallel_size"])
    assert str(rollout.enable_chunked_prefill) == written.get(f"{ROLLOUT}.enable_chunked_prefill", "True")
    assert not rollout.enforce_eager


@pytest.mark.skipif(not COMMANDS.is_file(), reason="needs verl's command lines next to the project")
def test_every_recorded_command_has_an_expected_outcome() -> None:
    assert commands().keys() == SCRIPTS.keys()


def test_arguments_of_sglang_are_kept_as_verl_has_them() -> None:
    arguments = {"attention_backend": "fa3", "mm_attention_backend": "fa3", "page_size": 16}
    overrides = [f"+{ARGUMENTS}.{name}={value}" for name, value in arguments.items()]
    config = accepted(ENGINE, *overrides)
    assert config.actor_rollout_ref.rollout.engine_kwargs.sglang == arguments
    assert notes(ENGINE, *overrides) == []


@pytest.mark.parametrize("value", ["true", "false"])
def test_an_engine_wakes_in_two_stages_with_any_command(value: str) -> None:
    found = notes(ENGINE, f"{ROLLOUT}.multi_stage_wake_up={value}", f"{ROLLOUT}.skip_tokenizer_init=false")
    assert found == [
        f"{ROLLOUT}.multi_stage_wake_up has no effect: an engine always wakes in two stages, its weights before the "
        "sync and its cache after it"
    ] * (value == "true")


def test_arguments_of_another_engine_are_named_and_change_nothing() -> None:
    (note,) = notes(ENGINE, f"+{ROLLOUT}.engine_kwargs.vllm.mm_processor_cache_gb=0")
    assert note == f"{ROLLOUT}.engine_kwargs.vllm has no effect with {ENGINE}"
    (note,) = notes(ENGINE, f"+{ROLLOUT}.engine_kwargs.trtllm.batch_wait_timeout_iters=32")
    assert note.endswith("has no effect: the engine is vLLM or SGLang")


def test_a_third_engine_of_verl_s_is_rejected_with_those_that_there_are() -> None:
    (error,) = resolved(f"{ROLLOUT}.name=trtllm").findings.errors
    assert error.text == f"{ROLLOUT}.name=trtllm: choose sglang | vllm"
