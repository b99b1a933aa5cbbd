"""Verifies model families, each with a small random model, and writes the table in docs/models.md:

python scripts/benchmark/families.py [NAME ...] [--docs FILE]

Each is trained on two ranks with two vLLM engines, in float32 (except for engines that only support bfloat16): weights
are synced and log-probs of sampled responses compared, and again after an update; the model is saved and merged, and
the merged model compared with the saved tensors, in transformers and in vLLM. The last line is JSON. Exits with status
1 if a family that the checks accept fails.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from side_by_side import Arguments
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.config.checks.model import why_not_served, why_unsupported
from hybridrl.core.batch import Batch
from hybridrl.core.carried import Encoded
from hybridrl.core.cluster import RaySession, kill
from hybridrl.core.experience.batching import group_by_prompt, to_batch
from hybridrl.core.experience.trajectory import Episode, Trajectory, Turn
from hybridrl.core.hybrid_engine import HybridEngine
from hybridrl.core.rollout import Request, Sampling, request_seed
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.data.prompts import Prompt
from hybridrl.rewards.score import Score
from hybridrl.runs.ppo import probe_ids, start_devices
from hybridrl.runs.ranks import fitting_plan
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from hybridrl.runs.setup import start_session

TOP = Path(__file__).absolute().parents[2]
BEGIN, END = "<!-- families -->", "<!-- /families -->"
PROMPT, RESPONSE = 32, 24  # tokens at most
TOLERANCE = {"float32": 1e-4, "bfloat16": 1.0}  # of a log-prob, by the engine's dtype
IN_BFLOAT16 = "not checked: on CPU vLLM supports this family only in bfloat16"
SHAPES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # responses that are far from uniform
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Experts as in DeepSeek, selected with a correction buffer, after one dense layer.
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Multi-head latent attention.
LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
# Three layers of linear attention for each layer of full attention.
LINEAR = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "initializer_range": 0.1,  # in bfloat16, where larger weights would cause a gap by rounding
}
# Every expert processes each token: in bfloat16 engine and trainer would select different ones of equal score.
ALL_EXPERTS = {"num_experts_per_tok": 4, "shared_expert_intermediate_size": 64}
# By name: the model type, and differences from SHAPES.
FAMILIES = {
    "Qwen2": ("qwen2", {}),
    "Qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"head_dim": 32}),
    "Llama": ("llama", {}),
    "Llama, tied": ("llama", {"tie_word_embeddings": True}),
    "Mistral": ("mistral", {"sliding_window": 16, "head_dim": 32}),
    "Gemma 2": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma 3": (
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "tie_word_embeddings": True},
    ),
    "Phi-3": ("phi3", {}),
    "Granite": (
        "granite",
        {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.1},
    ),
    "Cohere": ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "GPT-2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128, "tie_word_embeddings": True}),
    "Qwen3-MoE": ("qwen3_moe", {"head_dim": 32, **EXPERTS}),
    "Mixtral": ("mixtral", EXPERTS),
    "GLM-4-MoE": (
        "glm4_moe",
        {"head_dim": 32, **ROUTED},
    ),
    "DeepSeek-V3": ("deepseek_v3", {**LATENT, **ROUTED}),
    "Qwen3-Next": ("qwen3_next", {**LINEAR, **EXPERTS, **ALL_EXPERTS}),
    "Qwen3.5": ("qwen3_5_text", LINEAR),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", {**LINEAR, **EXPERTS, **ALL_EXPERTS}),
    "GPT-OSS": ("gpt_oss", {"head_dim": 32, **EXPERTS}),
    "StableLM": ("stablelm", {}),
    "MiniMax-M2": ("minimax_m2", {"head_dim": 32, "rotary_dim": 16, **EXPERTS}),
    "Falcon-H1": (
        "falcon_h1",
        {
            "head_dim": 32,
            "lm_head_multiplier": 0.3,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
        },
    ),
    "Bamba": (
        "bamba",
        {
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "attn_layer_indices": [1],
        },
    ),
    "Apertus": ("apertus", {}),
    # The window in vLLM is a token wider, so rows must not be longer than it.
    "Cohere 2": ("cohere2", {"sliding_window": 64, "logit_scale": 0.25, "head_dim": 32, "tie_word_embeddings": True}),
    "Phi-3.5-MoE": ("phimoe", EXPERTS),
}
SAMPLING = Sampling(max_tokens=RESPONSE, stop_ids=(2,))


@dataclass
class Row:
    """The results for a family; `failed` is the error, if there was one."""

    family: str
    parameters: int = 0
    gap_before: float | None = None
    moved: float | None = None
    gap_after: float | None = None
    sync_seconds: float | None = None
    in_transformers: str = ""
    in_vllm: str = ""
    rejected: str = ""
    failed: str = ""


def make_model(family: str, directory: Path) -> int:
    kind, changes = FAMILIES[family]
    settings = CONFIG_MAPPING[kind](**SHAPES | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases, initialized to ones and zeros: stale values would not be noticed
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    for buffer in model.buffers():
        if buffer.dim() and not buffer.any():  # a router's corrections, initialized to zeros
            torch.nn.init.normal_(buffer, 0.0, 0.1)
    model.save_pretrained(directory)
    return model.num_parameters()


def load_config(model: Path, directory: Path, more: list[str]) -> PPOConfig:
    rows = directory / "rows.jsonl"
    rows.write_text("{}\n")
    values = {
        "data.train_files": rows,
        "data.train_batch_size": 6,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": RESPONSE,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.max_num_seqs": 32,
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "algorithm.adv_estimator": "grpo",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 2,
        "trainer.default_local_dir": directory,
    }
    return load_ppo_config([f"{key}={value}" for key, value in values.items()] + more)


@contextmanager
def devices(config: PPOConfig, session: RaySession, logs: Path) -> Iterator[tuple[HybridEngine, TrainWorkers]]:
    """Yield the engine and the workers of one model, and kill them afterwards."""
    logs.mkdir()
    worker = ppo_worker_config(config, build_algorithm(config), logs, steps=1)
    group, engine = start_devices(config, session, worker, logs, probe_ids([1, 20, 30, 40, 50]))
    try:
        plan = fitting_plan(group, RankPlan(worker.models, build_policy_plan(config)), 300)
        yield engine, TrainWorkers(group, plan, "float32", 300)
    finally:
        for actor in [*group.actors, *engine.fleet.servers.actors]:
            kill(actor)


def sample(engine: HybridEngine, version: int) -> tuple[Batch, float]:
    """Return rows of sampled responses, with the engine's log-probs, and the seconds of the weight sync before them."""
    engine.to_rollout(version)
    seconds = engine.take_metrics()["timing_s/update_weights"]
    requests = [Request(p, s, [1, 20, 30, 40 + p], request_seed(1, p, s), SAMPLING) for p in range(6) for s in range(2)]
    completions = engine.client.generate_all(requests)
    engine.to_training()
    episodes = [
        Episode(
            Prompt(r.prompt, r.prompt_ids, "", "", "", {}),
            r.prompt,
            r.sample,
            Trajectory([Turn.of(Encoded(r.prompt_ids), completion)]),
            "",
            Score(r.sample),
        )
        for r, completion in zip(requests, completions, strict=True)
    ]
    return to_batch(group_by_prompt(episodes)), seconds


def largest_gap(workers: TrainWorkers, batch: Batch) -> float:
    return float((workers.forward_log_probs(batch).old_log_probs - batch.rollout_log_probs).abs().max())


def verify(row: Row, config: PPOConfig, session: RaySession, directory: Path) -> None:
    with devices(config, session, directory / "logs") as (engine, workers):
        batch, _ = sample(engine, 0)
        row.gap_before = largest_gap(workers, batch)
        batch.advantages = (batch.rewards - 0.5)[batch.response_row]
        workers.update_policy(batch, 1)
        row.moved = largest_gap(workers, batch)
        batch, row.sync_seconds = sample(engine, 1)
        row.gap_after = largest_gap(workers, batch)
        workers.start_save(directory / "saved", {"actor": ["model"]})
        while not workers.finished_save():
            time.sleep(0.05)
    dtype = config.actor_rollout_ref.rollout.dtype
    if not max(row.gap_before, row.gap_after) < TOLERANCE[dtype] < row.moved:
        raise RuntimeError("log-probs of engine and trainer differ, or the update changed nothing")
    row.in_transformers = merge(directory, "transformers")
    row.in_vllm = merge(directory, "vllm") if dtype == "float32" else IN_BFLOAT16


def merge(directory: Path, check: str) -> str:
    """Merge and check the checkpoint. Returns the result of the check as text."""
    command = [sys.executable, "-m", "hybridrl.model_merger", "merge", "--local_dir", directory / "saved" / "actor"]
    command += ["--target_dir", directory / "merged", "--verify", check]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"merging, checked in {check}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads((directory / "merged" / "merge_report.json").read_text())["checked"][check]


def verify_family(family: str, session: RaySession, directory: Path, more: list[str]) -> Row:
    row = Row(family)
    row.parameters = make_model(family, directory / "model")
    settings = json.loads((directory / "model" / "config.json").read_text())
    row.rejected = why_unsupported(settings) or why_not_served(settings, PROMPT + RESPONSE) or ""
    try:
        if not row.rejected:
            config = load_config(directory / "model", directory, more)
            verify(row, config, session, directory)
    except Exception as error:
        row.failed = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return row


def table(rows: list[Row]) -> str:
    lines = [
        "| family | log-prob gap after a weight sync | the same after an update | change by the update | "
        "merged model's log-probs of 24 tokens in vLLM |",
        "|---|--:|--:|--:|---|",
    ]
    for row in rows:
        if row.rejected or row.failed:
            ending = "rejected, see below" if row.rejected else f"fails: {row.failed}"
            lines.append(f"| {row.family} | {ending} ||||")
        else:
            served = row.in_vllm.rpartition("tokens ")[2].removesuffix(" of transformers'")
            lines.append(f"| {row.family} | {row.gap_before:.1e} | {row.gap_after:.1e} | {row.moved:.1f} | {served} |")
    return "\n".join(lines)


def main() -> int:
    parser = Arguments(__doc__, names=["Qwen2"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAMILIES)} (all)")
    parser.add_argument("--docs", type=Path, help=f"write the table between {BEGIN} and {END} of this file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the configuration")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    with TemporaryDirectory() as name:
        names = arguments.names or list(FAMILIES)
        (Path(name) / "first").mkdir()
        make_model(names[0], Path(name) / "first" / "model")
        first = load_config(Path(name) / "first" / "model", Path(name) / "first", [])
        session = start_session(first.trainer, first.ray_kwargs.ray_init)
        try:
            for number, family in enumerate(names):
                directory = Path(name) / str(number)
                directory.mkdir()
                rows.append(verify_family(family, session, directory, arguments.set))
                print(rows[-1], file=sys.stderr, flush=True)
        finally:
            session.close()
    print(table(rows))
    if arguments.docs:
        before, rest = arguments.docs.read_text().split(BEGIN)
        arguments.docs.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.split(END)[1]}")
    print(json.dumps([asdict(row) for row in rows]))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
