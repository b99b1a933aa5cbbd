"""How many GPUs a model takes: `python scripts/sizing.py` writes the table of docs/machines.md, some of which a test
compares.

The doctor plans (docs/memory.md) GRPO without a reference model for Qwen2.5's sizes, on more and more GPUs until
it fits. Nothing is loaded; the plan itself was not measured on CUDA.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from hybridrl.config import PPOConfig
from hybridrl.config.load import resolve_config
from hybridrl.doctor.memory import PlannedRun, make_plans
from hybridrl.doctor.memory_sizes import read_models

PAGE = Path(__file__).parent.parent / "docs" / "machines.md"
BEGIN, END = "<!-- scripts/sizing.py -->\n", "<!-- end -->\n"
# Layers, hidden, intermediate, query heads, key heads, vocabulary: the config.json of Qwen2.5 on the hub.
SHAPES = {
    "0.5B": (24, 896, 4864, 14, 2, 151936),
    "1.5B": (28, 1536, 8960, 12, 2, 151936),
    "3B": (36, 2048, 11008, 16, 2, 151936),
    "7B": (28, 3584, 18944, 28, 4, 152064),
    "14B": (48, 5120, 13824, 40, 8, 152064),
    "32B": (64, 5120, 27648, 40, 8, 152064),
    "72B": (80, 8192, 29568, 64, 8, 152064),
}
TIED = ("0.5B", "1.5B", "3B")  # the head is the embedding
GPUS = (24, 48, 80, 141)  # GB
PROMPT, RESPONSE, MICRO_BATCH = 1024, 2048, 4096  # tokens
SPARE = 0.05  # of a GPU, left free
LEAST_ROWS = 32  # full rows that each GPU's part of an engine's cache must have the memory of
PER_MACHINE = 8
ACTOR = "actor_rollout_ref.actor.fsdp_config"
WAYS = {
    "": (),
    "offload": (f"{ACTOR}.param_offload=true", f"{ACTOR}.optimizer_offload=true"),
    "LoRA": ("actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.target_modules=all-linear"),
}


def fewest(size: str, gigabytes: int, way: str, root: Path) -> int | None:
    """The fewest GPUs on which some width of the engines and some share of memory for them fit; None: not on 128."""
    for gpus in (1, 2, 4, 8, 16, 32, 64, 128):
        for width in (1, 2, 4, 8):
            run = planned(size, way, gpus, width, root) if width <= min(gpus, PER_MACHINE) else None
            for share in range(18, 3, -1) if run else ():
                assert run is not None
                run.config.actor_rollout_ref.rollout.gpu_memory_utilization = share / 20
                asked = PlannedRun(run.config, run.models, gigabytes * 10**9)
                device, *_ = make_plans(asked)
                rows = asked.cache // asked.row_bytes
                if device.peak <= (1 - SPARE) * asked.gpu and rows >= LEAST_ROWS:
                    return gpus
    return None


@cache
def planned(size: str, way: str, gpus: int, width: int, root: Path) -> PlannedRun | None:
    """The run of a model on a number of GPUs, or None if the configuration is rejected."""
    arguments = [
        "trainer.device=cuda",
        f"data.train_files={root / 'rows.jsonl'}",
        f"actor_rollout_ref.model.path={root / size}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={width}",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={MICRO_BATCH}",
        f"trainer.n_gpus_per_node={min(gpus, PER_MACHINE)}",
        f"trainer.nnodes={max(gpus // PER_MACHINE, 1)}",
        *WAYS[way],
    ]
    resolved = resolve_config(PPOConfig, arguments, "ppo_trainer", offline=True)
    if resolved.config is None or resolved.findings.errors:
        return None
    return PlannedRun(resolved.config, read_models(resolved.config), 0)


def write_models(root: Path) -> None:
    (root / "rows.jsonl").write_text("{}\n")
    for size, (layers, hidden, intermediate, query, key, vocabulary) in SHAPES.items():
        settings = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16"}
        settings |= {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
        settings |= {"num_attention_heads": query, "num_key_value_heads": key, "vocab_size": vocabulary}
        settings |= {"tie_word_embeddings": size in TIED, "max_position_embeddings": 32768}
        (root / size).mkdir()
        (root / size / "config.json").write_text(json.dumps(settings))
        (root / size / "model.safetensors").touch()  # a directory without weights is rejected


def rows(sizes: Iterable[str]) -> Iterator[str]:
    """The rows of the table."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_models(root)
        for size in sizes:
            print(f"{size} ...", flush=True)
            fits = [[fewest(size, memory, way, root) for way in WAYS] for memory in GPUS]
            yield f"| {size} | " + " | ".join(" / ".join(str(gpus or "-") for gpus in cell) for cell in fits) + " |\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    heads = ["model", *(f"{memory} GB" for memory in GPUS)]
    table = f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n" + "".join(rows(SHAPES))
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
