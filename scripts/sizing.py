"""Number of GPUs that a model takes: `python scripts/sizing.py` writes the tables of docs/machines.md and of
docs/long_reasoning.md, some of which a test compares.

The doctor plans (docs/memory.md) GRPO without a reference model for Qwen2.5's sizes, on more and more GPUs until
it fits; for mixtures what each layout holds and moves; and the stages of recipes/long_reasoning. Nothing is loaded; the
plan itself was not measured on CUDA.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path

from hybridrl.config import PPOConfig
from hybridrl.config.load import resolve_config
from hybridrl.doctor.memory import Plan, PlannedRun, make_plans
from hybridrl.doctor.memory_sizes import Models, Shard, read_models

TOP = Path(__file__).parent.parent
PAGE, LONG_PAGE = TOP / "docs" / "machines.md", TOP / "docs" / "long_reasoning.md"
BEGIN, MIXED, END = "<!-- scripts/sizing.py -->\n", "<!-- scripts/sizing.py, mixtures -->\n", "<!-- end -->\n"
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
QWEN3 = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "head_dim": 128}
QWEN3 |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 40960}
MIXTURES = {  # the config.json of each on the hub; what is not here of DeepSeek's are its family's defaults
    "Qwen3-30B-A3B": QWEN3
    | {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "moe_intermediate_size": 768},
    "Qwen3-235B-A22B": QWEN3
    | {"num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536},
    "DeepSeek-V3": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256},
}
GPUS = (24, 48, 80, 141)  # GB
PROMPT, RESPONSE, MICRO_BATCH = 1024, 2048, 4096  # tokens
SPARE = 0.05  # of a GPU, left free
LEAST_ROWS = 32  # full rows that each GPU's part of an engine's cache must have the memory of
PER_MACHINE = 8
ACTOR = "actor_rollout_ref.actor.fsdp_config"
OFFLOADS = (f"{ACTOR}.param_offload=true", f"{ACTOR}.optimizer_offload=true")
WAYS = {
    "": (),
    "offload": OFFLOADS,
    "LoRA": ("actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.target_modules=all-linear"),
}
EP = (f"{ACTOR}.expert_parallel_size=8",)
LAYOUTS = {"FSDP": (), "EP 8": EP, "TP 2 x EP 8": (*EP, f"{ACTOR}.tensor_parallel_size=2")}
# How a mixture is made to fit, and the full rows that a GPU's part of a cache must then hold.
MEANS = {"yes": (), "both offloads": OFFLOADS, "`offload_policy`": (f"{ACTOR}.offload_policy=true",)}
MIXTURE_TOKENS, MIXTURE_ROWS = 16384, 8
STAGES, LONG_GPUS, LONG_SIZES = ("stage1_8k", "stage2_16k", "stage3_32k"), (1, 8, 64), ("1.5B", "7B")
MIXTURE_GPUS = {"Qwen3-30B-A3B": (8, 128), "Qwen3-235B-A22B": (8, 32, 128), "DeepSeek-V3": (8, 128)}

MODELS: dict[tuple, Models] = {}  # read already, by name, division and rank of the adapter


def fewest(size: str, gigabytes: int, way: str, root: Path) -> int | None:
    """The fewest GPUs on which a model fits; None: not on 128."""
    counts = (1, 2, 4, 8, 16, 32, 64, 128)
    return next((gpus for gpus in counts if fitting(size, gigabytes, WAYS[way], gpus, root, LEAST_ROWS)), None)


def fitting(size: str, gigabytes: int, keys: tuple[str, ...], gpus: int, root: Path, least: int) -> list[Plan]:
    """The plans with the first width of the engines and share of memory for them that fit, if any does; `least` rows
    must fit into a GPU's part of a cache."""
    for width in (1, 2, 4, 8):
        run = planned(size, keys, gpus, width, root) if width <= min(gpus, PER_MACHINE) else None
        for share in range(18, 3, -1) if run else ():
            assert run is not None
            run.config.actor_rollout_ref.rollout.gpu_memory_utilization = share / 20
            asked = PlannedRun(run.config, run.models, gigabytes * 10**9)
            plans, rows = make_plans(asked), asked.cache // asked.row_bytes
            if plans[0].peak <= (1 - SPARE) * asked.gpu and rows >= least:
                return plans
    return []


@cache
def planned(size: str, keys: tuple[str, ...], gpus: int, width: int, root: Path) -> PlannedRun | None:
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
        *keys,
    ]
    resolved = resolve_config(PPOConfig, arguments, "ppo_trainer", offline=True)
    if resolved.config is None or resolved.findings.errors:
        return None
    fsdp = resolved.config.actor_rollout_ref.actor.fsdp_config
    division = fsdp.tensor_parallel_size, fsdp.expert_parallel_size, resolved.config.actor_rollout_ref.model.lora_rank
    if (size, *division) not in MODELS:
        MODELS[size, *division] = read_models(resolved.config)
    return PlannedRun(resolved.config, MODELS[size, *division], 0)


def write_models(root: Path) -> None:
    (root / "rows.jsonl").write_text("{}\n")
    models = dict(MIXTURES)
    for size, (layers, hidden, intermediate, query, key, vocabulary) in SHAPES.items():
        settings = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16"}
        settings |= {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
        settings |= {"num_attention_heads": query, "num_key_value_heads": key, "vocab_size": vocabulary}
        settings |= {"tie_word_embeddings": size in TIED, "max_position_embeddings": 32768}
        models[size] = settings
    for size, settings in models.items():
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


def mixture_rows(runs: Iterable[tuple[str, int]]) -> Iterator[str]:
    """The rows of the table of mixtures, in GB per GPU; the host's of a machine."""
    tokens = (f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={MIXTURE_TOKENS}",)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_models(root)
        for size, gpus in runs:
            print(f"{size} on {gpus} ...", flush=True)
            layouts = [planned(size, (*keys, *tokens), gpus, PER_MACHINE, root) for keys in LAYOUTS.values()]
            cells = [size, str(gpus), *_layout_cells([run.learners[0].shard for run in layouts if run]), "-"]
            for means, keys in MEANS.items():
                if plans := fitting(size, 80, (*EP, *tokens, *keys), gpus, root, MIXTURE_ROWS):
                    cells[-1] = f"{means}, {plans[1].peak / 1e9:,.0f}"
                    break
            yield f"| {' | '.join(cells)} |\n"


def long_rows(stages: Iterable[str] = STAGES) -> Iterator[str]:
    """The rows of the table of long reasoning: on GPUs of 80 GB, in GB per GPU, and responses of the full length."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_models(root)
        for stage, size, gpus in product(stages, LONG_SIZES, LONG_GPUS):
            print(f"{stage}, {size} on {gpus} ...", flush=True)
            keys = [f"data.{part}_files={root / 'rows.jsonl'}" for part in ("train", "val")]
            keys += ["trainer.device=cuda", f"actor_rollout_ref.model.path={root / size}"]
            keys += [
                f"trainer.n_gpus_per_node={min(gpus, PER_MACHINE)}",
                f"trainer.nnodes={max(gpus // PER_MACHINE, 1)}",
            ]
            keys += ["actor_rollout_ref.rollout.gpu_memory_utilization=0.5"] if gpus == 1 else []
            config = resolve_config(PPOConfig, keys, stage, TOP / "recipes" / "long_reasoning", offline=True).config
            assert config is not None
            run = PlannedRun(config, read_models(config), 80e9)
            needs = make_plans(run)[0].needs
            rollout, update = (needs[phase].total() for phase in ("rollout", "policy update"))
            fits = "yes" if max(rollout, update) <= (1 - SPARE) * 80e9 else "no"
            held = int(run.cache // run.row_bytes) * gpus // config.actor_rollout_ref.rollout.tensor_model_parallel_size
            step = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
            cells = [
                stage,
                size,
                str(gpus),
                f"{rollout / 1e9:.1f}",
                f"{update / 1e9:.1f}",
                fits,
                f"{min(held, step):,}",
            ]
            yield f"| {' | '.join(cells)} |\n"


def _layout_cells(shards: Sequence[Shard]) -> Iterator[str]:
    moved = [shard.moved(MIXTURE_TOKENS, recomputed=True) for shard in shards]
    yield _layouts(shard.parameters + shard.gradients + shard.moments for shard in shards)
    yield _layouts(shard.gathered + shard.reduced for shard in shards)
    yield _layouts(sum(kinds.values()) for kinds in moved)
    fsdp, ep, _ = moved
    saved = fsdp["parameters and gradients"] - ep["parameters and gradients"]
    yield f"{MIXTURE_TOKENS * saved / ep['tokens of experts'] / 1000:.0f}k"


def _layouts(sizes: Iterable[float]) -> str:
    return "/".join(f"{size / 1e9:.{int(size < 1e10)}f}" for size in sizes)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    mixtures = [(size, gpus) for size in MIXTURES for gpus in MIXTURE_GPUS[size]]
    of_gpus = ["model", *(f"{memory} GB" for memory in GPUS)]
    of_mixtures = ["model", "GPUs", "held", "gathered", "moved", "break-even", "fits in 80 GB, host"]
    of_stages = ["stage", "model", "GPUs", "rollout", "update", "fits in 80 GB", "full responses at once, of 1,024"]
    tables = [(PAGE, BEGIN, of_gpus, rows(SHAPES)), (PAGE, MIXED, of_mixtures, mixture_rows(mixtures))]
    for page, begin, heads, made in (*tables, (LONG_PAGE, BEGIN, of_stages, long_rows())):
        before, _, rest = page.read_text(encoding="utf-8").partition(begin)
        table = f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n" + "".join(made)
        page.write_text(f"{before}{begin}{table}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
