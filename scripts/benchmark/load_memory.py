"""How much host memory a rank takes to load a model: `python scripts/benchmark/load_memory.py`

Two ranks load a random model of 142 M parameters, saved in bfloat16, and keep it in float32. Prints the peak of each
rank's memory (without pages of files), and the sizes of its shard and of the complete model.
"""

import multiprocessing
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from models import SHAPES
from side_by_side import Arguments
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.config import load_sft_config
from hybridrl.config.schema import FSDPConfig, ModelConfig
from hybridrl.core.training.fsdp import local, shard_and_fill
from hybridrl.core.training.layout import layout
from hybridrl.core.training.model import HOST, blank_language_model

RANKS, MB = 2, 1e6


def own_bytes() -> int:
    """Return the memory of this process without mapped files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def load(rank: int, directory: Path, model: ModelConfig, fsdp: FSDPConfig) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), RANKS), rank=rank, world_size=RANKS)
    grid = layout("cpu", RANKS, RANKS)
    before, peak = own_bytes(), [0]

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], own_bytes())
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    began = time.monotonic()
    loaded = shard_and_fill(blank_language_model(model, torch.float32), model.path, fsdp, grid, HOST)
    seconds = time.monotonic() - began
    time.sleep(0.05)
    shard = sum(local(parameter).nbytes for parameter in loaded.parameters())
    whole = sum(parameter.numel() * parameter.itemsize for parameter in loaded.parameters())
    print(
        f"rank {rank}: at most {(peak[0] - before) / MB:.0f} MB in {seconds:.1f} s; "
        f"its shard {shard / MB:.0f} MB, the model {whole / MB:.0f} MB"
    )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = Arguments(__doc__, shape="tiny")
    parser.add_argument("--shape", choices=SHAPES, default="142m")
    shape = SHAPES[parser.parse_args().shape]
    settings = Qwen2Config(**{"tie_word_embeddings": True} | shape, bos_token_id=1, eos_token_id=2)
    with TemporaryDirectory() as name:
        directory = Path(name)
        AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).save_pretrained(directory / "model")
        (directory / "rows.jsonl").write_text("{}\n")
        keys = {
            "model.path": directory / "model",
            "data.train_files": directory / "rows.jsonl",
            "trainer.device": "cpu",
            "trainer.n_gpus_per_node": RANKS,
        }
        config = load_sft_config([f"{key}={value}" for key, value in keys.items()])
        ranks = multiprocessing.get_context("spawn")
        arguments = (directory, config.model, config.engine.fsdp_config)
        processes = [ranks.Process(target=load, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
