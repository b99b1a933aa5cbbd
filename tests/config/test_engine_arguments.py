"""Arguments of an engine in the configuration: those that hybridrl sets, and names that the engine does not have."""

import ast
import inspect
import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import Qwen3_5MoeTextConfig, Qwen3Config, Qwen3MoeConfig

from hybridrl.config.checks.engine import ENGINES, SGLANG, VLLM
from hybridrl.config.load import resolve_config
from hybridrl.config.schema import PPOConfig
from hybridrl.required import required

ROLLOUT = "actor_rollout_ref.rollout"
KEY, SGLANG_KEY = ".engine_kwargs.vllm", ".engine_kwargs.sglang"
CPU, CUDA = ["trainer.device=cpu"], ["trainer.device=cuda", "trainer.n_gpus_per_node=1"]


def findings(*overrides: str, severity: str = "error") -> list[str]:
    overrides = ("data.train_files=x", "actor_rollout_ref.model.path=m", *overrides)
    items = resolve_config(PPOConfig, [*overrides], "ppo_trainer", offline=True).findings.items
    return [one.text for one in items if one.severity == severity]


def errors(argument: str) -> list[str]:
    return findings(f"+{ROLLOUT}{KEY}.{argument}")


def sglang_errors(argument: str, *more: str) -> list[str]:
    return findings(f"{ROLLOUT}.name=sglang", f"+{ROLLOUT}{SGLANG_KEY}.{argument}", *more)


def test_an_argument_that_a_key_sets_is_rejected_with_that_key():
    (text,) = errors("model=b")
    key = "actor_rollout_ref.model.path"
    assert text == f"{ROLLOUT}{KEY}.model=b: {key} sets it, for trainer and engine alike; set {key}=b"


def test_an_argument_that_would_make_every_importance_ratio_wrong_is_rejected():
    (text,) = errors("logprobs_mode=raw_logprobs")
    assert "or every importance ratio is wrong; leave it out" in text


def test_pictures_for_an_engine_that_takes_none_are_rejected_by_its_name(monkeypatch):
    key = f"{ROLLOUT}.limit_images"
    assert not findings(f"{key}=2") and not findings(f"{ROLLOUT}.name=sglang", f"{key}=0")
    (text,) = findings(f"{ROLLOUT}.name=sglang", f"{key}=2")
    assert text.startswith(f"{key}=2") and text.endswith("SGLang is not given pictures yet, vLLM is")
    (text,) = errors("limit_mm_per_prompt=2")
    assert text.endswith(f"{key} sets it, for trainer and engine alike; set {key}=2")
    monkeypatch.setitem(vars(VLLM), "known", VLLM.known - {"mm_device_do_normalize"})  # as of 0.26
    (text,) = findings(f"{key}=2")
    assert text.endswith("vLLM takes pictures since 0.32")


def test_a_name_that_the_engine_does_not_have_is_rejected_with_the_nearest_one():
    (text,) = errors("kv_cache_dtyp=fp8")
    assert "the engine of the installed vLLM has no such argument; did you mean kv_cache_dtype" in text


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("model_path=b", "actor_rollout_ref.model.path", "b"),
        ("disable_radix_cache=true", f"{ROLLOUT}.enable_prefix_caching", "false"),
        ("device=cuda", "trainer.device", "cuda"),
    ],
)
def test_an_argument_of_sglang_that_a_key_sets_is_rejected_with_that_key(argument, key, value):
    (text,) = sglang_errors(argument)
    assert text == (f"{ROLLOUT}{SGLANG_KEY}.{argument}: {key} sets it, for trainer and engine alike; set {key}={value}")


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("load_format=auto", "weights come from the trainer"),
        ("sampling_backend=flashinfer", "pytorch is the one that samples by the seed of each request"),
        ("dp_size=2", "hybridrl starts one engine per tensor-parallel group of devices"),
        ("chunked_prefill_size=-1", "max_num_batched_tokens sets it, or .enable_chunked_prefill=false"),
        ("enable_return_routed_experts=true", "are not replayed yet"),
    ],
)
def test_an_argument_of_sglang_that_must_be_as_hybridrl_sets_it_is_rejected_with_the_reason(argument, reason):
    (text,) = sglang_errors(argument)
    assert reason in text and text.endswith("; leave it out")


@pytest.mark.parametrize(
    "argument",
    ["page_size=16", "max_total_tokens=4096", "schedule_policy=lpm", "attention_backend=fa3", "load_format=null"],
)
def test_other_arguments_reach_sglang(argument):
    assert sglang_errors(argument, *CUDA) == []


def test_adapters_of_sglang_follow_from_the_model_s_keys():
    (text,) = sglang_errors("max_lora_rank=8")
    assert "max_lora_rank follow from actor_rollout_ref.model.lora_rank" in text


@pytest.mark.parametrize(
    ("argument", "device", "cause", "fix"),
    [
        ("attention_backend=ascend", CPU, "this attention is for NPUs", "set torch_native, or leave it out"),
        ("attention_backend=ascend", CUDA, "this attention is for NPUs", "fa3, flashinfer or triton, or leave it out"),
        ("decode_attention_backend=aiter", CUDA, "this attention is for AMD's GPUs", "or leave it out"),
        ("attention_backend=fa3", CPU, "SGLang does not compute it on CPU", "set torch_native, or leave it out"),
        ("enable_deterministic_inference=true", CPU, "SGLang has its kernels on CUDA only", "leave it out"),
    ],
)
def test_what_sglang_does_not_compute_on_the_device_is_rejected_with_what_it_does(argument, device, cause, fix):
    (text,) = sglang_errors(argument, *device)
    assert text.startswith(f"{ROLLOUT}{SGLANG_KEY}.{argument}: {cause}; ") and text.endswith(fix)


def test_attention_in_plain_torch_is_accepted_on_cpu():
    assert sglang_errors("attention_backend=torch_native", *CPU) == []


@pytest.mark.parametrize("wish", ["trainer.deterministic=true", f"{ROLLOUT}.full_determinism=true"])
def test_what_sglang_needs_for_equal_responses_on_a_gpu_is_said_to_who_wants_them(wish):
    sglang, invariant = f"{ROLLOUT}.name=sglang", f"+{ROLLOUT}{SGLANG_KEY}.enable_deterministic_inference=true"

    def lines(*overrides: str) -> list[str]:
        return [text for text in findings(*overrides, severity="warning") if "differ from run to run" in text]

    (line,) = lines(wish, sglang, *CUDA)
    assert line.startswith(f"{wish}: ") and line.endswith(f"set {invariant}")
    for others in ([sglang, *CUDA], [wish, sglang, *CPU], [wish, *CUDA], [wish, sglang, *CUDA, invariant]):
        assert lines(*others) == []


@pytest.mark.parametrize(("engine", "other"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_arguments_of_the_other_engine_have_no_effect_and_are_not_judged(engine, other):
    overrides = [f"{ROLLOUT}.name={engine}", f"+{ROLLOUT}.engine_kwargs.{other}.no_such_argument=1"]
    assert findings(*overrides) == []
    warning = f"{ROLLOUT}.engine_kwargs.{other} has no effect with {ROLLOUT}.name={engine}"
    assert warning in findings(*overrides, severity="warning")
    assert not [text for text in findings(overrides[0], severity="warning") if "engine_kwargs" in text]


REPLAY = "actor_rollout_ref.actor.router_replay.mode"
ROUTES = f"{ROLLOUT}.enable_rollout_routing_replay"
CACHING, COMPILED = f"{ROLLOUT}.enable_prefix_caching", "actor_rollout_ref.actor.fsdp_config.compile_layers"
ON_CUDA = CUDA


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
    made["absent"] = Path("someone/a-model")
    made["unknown mixture"] = tmp_path_factory.mktemp("model")
    (made["unknown mixture"] / "model.safetensors").touch()
    (made["unknown mixture"] / "config.json").write_text('{"num_experts": 8, "top_k_experts": 2}')
    return made


def replay(model: Path, *keys: str) -> tuple[str, list[str], PPOConfig]:
    """The mode that results, with errors and warnings about it."""
    overrides = ["data.train_files=x", f"actor_rollout_ref.model.path={model}", *keys]
    resolved = resolve_config(PPOConfig, overrides, "ppo_trainer", offline=True)
    config, found = required(resolved.config), [one.text for one in resolved.findings.items if REPLAY in one.keys]
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
        ("mixture", [f"{REPLAY}=auto", *ON_CUDA, f"{ROLLOUT}.name=sglang"], "disabled"),
        ("absent", [f"{REPLAY}=auto", *ON_CUDA, f"{ROLLOUT}.name=sglang"], "disabled"),
    ],
)
def test_the_experts_of_the_engine_are_replayed_where_that_is_wanted_and_helps(models, model, keys, mode):
    resolved, found, config = replay(models[model], *keys)
    assert (resolved, found) == (mode, [])
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay is (mode == "R3")


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ("dense", [], f"is not a mixture of experts; set {REPLAY}=disabled"),
        ("unknown mixture", [], f"its config.json does not name num_experts_per_tok; set {REPLAY}=disabled"),
        ("mixture", [f"{CACHING}=false"], f"vLLM keeps experts with its prefixes; set {CACHING}=true"),
        ("mixture", [f"{ROUTES}=false"], "the engine returns no experts; leave it out"),
        ("mixture", [*ON_CUDA, f"{COMPILED}=true"], f"it is not in compiled layers; set {COMPILED}=false"),
        ("recurrent mixture", [], f"vLLM keeps experts with its prefixes; set {CACHING}=true"),
        ("mixture", [f"{ROLLOUT}.name=sglang"], f"sglang chose are not replayed yet; set {REPLAY}=disabled"),
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

    assert VLLM.known == {field.name for field in fields(AsyncEngineArgs)}
    assert VLLM.known >= {*VLLM.set_by, *VLLM.fixed}


@pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang")
def test_the_names_are_those_of_sglang_itself():
    from hybridrl.core.rollout.sglang import stand_ins  # noqa: F401  before SGLang
    from sglang.srt.server_args import ServerArgs  # isort: skip  # slow to import

    assert SGLANG.known == {*inspect.signature(ServerArgs).parameters}
    assert SGLANG.known >= {*SGLANG.set_by, *SGLANG.fixed} - {"cuda_graph_bs"}  # of earlier versions


def test_names_are_read_from_the_sources_of_sglang(tmp_path, monkeypatch):
    sources = tmp_path / "sglang" / "srt" / "arg_groups" / "fields"
    sources.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('this is not to be imported')\n")
    (sources / "a.py").write_text("import torch\n\nclass A:\n    page_size: int = 1\n    derived = 1\n")
    (sources / "b.py").write_text("class B:\n    schedule_policy: str\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    assert replace(SGLANG).known == {"page_size", "schedule_policy"}
    monkeypatch.setitem(ENGINES, "sglang", replace(SGLANG))
    (text,) = sglang_errors("schedule_polcy=lpm")
    assert "the engine of the installed SGLang has no such argument; did you mean schedule_policy?" in text
    assert sglang_errors("page_size=16") == []


def test_no_name_is_judged_where_the_engine_is_not_installed(monkeypatch):
    absent = replace(SGLANG, files="no_such_engine/*.py")
    assert absent.known == frozenset()
    monkeypatch.setitem(ENGINES, "sglang", absent)
    assert sglang_errors("schedule_polcy=lpm") == []


# What hybridrl sets and a user may change, or what follows from keys of LoRA, which are checked with the model.
FREE = {
    "vllm": {
        *("disable_log_stats", "kv_cache_memory_bytes", "structured_outputs_config"),
        "max_logprobs",  # a client's limit
        *("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras"),
    },
    "sglang": {
        *("constrained_json_disable_any_whitespace", "sleep_on_idle"),
        *("attention_backend", "disable_overlap_schedule", "max_total_tokens"),
        *("enable_lora", "max_lora_rank", "lora_target_modules", "max_loras_per_batch", "lora_backend"),
    },
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_argument_that_hybridrl_gives_the_engine_is_in_a_table(engine):
    source = (Path(__file__).parents[2] / "hybridrl" / "core" / "rollout" / engine / "engine.py").read_text(
        encoding="utf-8"
    )
    function = next(node for node in ast.parse(source).body if getattr(node, "name", "") == f"{engine}_arguments")
    nodes = [*ast.walk(function)]
    given = {
        key.value for node in nodes if isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)
    }
    given |= {
        node.slice.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    }
    assert len(given) > 20
    assert given - {*ENGINES[engine].set_by, *ENGINES[engine].fixed} <= FREE[engine]
