"""How fast a model is merged and exported, compared with copying the same bytes: `python scripts/benchmark/merge.py`

A random model of Qwen2.5-0.5B's shapes (head tied to the embedding) is saved in float32 and with AdamW's moments, as
shards of two ranks with FSDP2. In turn, each until the last byte is on disk: `cp` of as many bytes as are merged,
writing them from a buffer in memory, the merge without its checks, the export of a training run from memory, and
safetensors' own `save_file`. Warm: files are in the page cache, as after a save; cold: they are read from disk. Then
the complete command in a separate process, with its memory; and greedy responses of the sharded and the merged model.
"""

import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import SHAPES, sharded_model
from safetensors.torch import load_file, save_file
from side_by_side import Arguments
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.export import export_model, export_settings, write_shards
from hybridrl.checkpoint.files import flush_to_disk
from hybridrl.core.batch import Batch
from hybridrl.core.training.fsdp import reshard
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.packing import pack_rows
from hybridrl.model_merger.merge import write_model
from hybridrl.model_merger.source import check_tensors, open_source

RANKS = 2
PROMPT, TOKENS = [11, 4711, 20, 151000, 7], 6


def save(rank: int, shape: str, directory: Path) -> None:
    """Write one rank's part of a checkpoint, as a run does, and the greedy response of the sharded model."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), RANKS), rank=rank, world_size=RANKS)
    sharded = sharded_model(shape)
    with torch.no_grad():
        response = greedy(sharded)
    reshard(sharded)
    tensors = {name: parameter.detach() for name, parameter in sharded.model.named_parameters()}
    moments = {name: {"exp_avg": tensor, "exp_avg_sq": tensor} for name, tensor in tensors.items()}
    dcp.save({"model": tensors, "optimizer": {"state": moments}}, checkpoint_id=directory / "actor")
    if rank == 0:
        export_settings(sharded.model, directory / "actor" / "huggingface", torch.float32)
        (directory / "greedy.json").write_text(json.dumps(response))
    dist.destroy_process_group()


def prompt_of(vocabulary: int) -> list[int]:
    return [token % vocabulary for token in PROMPT]


def greedy(model: LanguageModel) -> list[int]:
    ids = prompt_of(model.model.config.vocab_size)
    for _ in range(TOKENS):
        one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        row = Batch(len(ids) * one, one, torch.tensor(ids), zero, group=zero, position=zero, sample=zero)
        hidden = model.hidden_states(pack_rows(row, padded=False))
        ids.append(int(model.model.get_output_embeddings()(hidden)[-1].argmax()))
    return ids[len(PROMPT) :]


def merged_greedy(directory: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    prompt = torch.tensor([prompt_of(model.config.vocab_size)])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False)
    return ids[0, len(PROMPT) :].tolist()


def write_block(target: Path, size: int) -> None:
    """Write as many bytes as one tensor from one buffer in memory: the best that this disk can do."""
    block = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    pieces = (("a", first, block[: size - first]) for first in range(0, size, 1 << 20))
    target.mkdir()
    write_shards(target, {"a": torch.empty(size, dtype=torch.uint8, device="meta")}, pieces)


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)


def drop_from_cache(*directories: Path) -> None:
    """Remove files from the page cache, so that they are read from disk again."""
    for path in (path for directory in directories for path in directory.rglob("*") if path.is_file()):
        flush_to_disk(path)
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@dataclass(frozen=True)
class Elapsed:
    """Wall-clock seconds, and processor seconds of this process and its children."""

    wall: float
    processor: float


def timed(work: Callable[..., Any], *arguments: Any) -> Elapsed:
    began, before = time.monotonic(), os.times()
    work(*arguments)
    return Elapsed(time.monotonic() - began, sum(os.times()[:4]) - sum(before[:4]))


def write(target: Path, work: Callable[[], object]) -> None:
    """Do the work, and wait until all of the new directory is on disk."""
    work()
    for path in (*target.rglob("*"), target):
        flush_to_disk(path)


def measure(directory: Path, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Time every way to write the model in this type, all in turn."""
    source, target, merged = open_source(directory / "actor", dtype), directory / "target", directory / str(dtype)
    write_model(source, merged)
    size = sum(path.stat().st_size for path in merged.rglob("*") if path.is_file())
    weights = load_file(merged / "model.safetensors")
    whole = {name: tensor.float() for name, tensor in weights.items()}
    ways: dict[str, Callable[[], object]] = {
        "cp": lambda: copy(merged, target),
        "write from a buffer": lambda: write_block(target, size),
        "merge": lambda: write_model(source, target),
        "export from memory": lambda: export_model(whole.items(), source.model, target, dtype, writes=True),
        "safetensors save_file": lambda: (target.mkdir(), save_file(weights, target / "model.safetensors")),
    }
    elapsed: dict[str, list[Elapsed]] = {}
    for _ in range(rounds):
        for name in (*ways, "cp, cold", "merge, cold"):
            os.sync()
            if name.endswith("cold"):
                drop_from_cache(directory / "actor", merged)
            elapsed.setdefault(name, []).append(timed(write, target, ways[name.removesuffix(", cold")]))
            shutil.rmtree(target)
        elapsed.setdefault("check of the tensors", []).append(timed(check_tensors, source, merged))
    return {"bytes": size, "elapsed": {name: [asdict(one) for one in runs] for name, runs in elapsed.items()}}


def command(directory: Path, dtype: str) -> dict[str, Any]:
    """Run the command with its checks in a separate process. Returns seconds and peak memory."""
    arguments = ["merge", "--local_dir", directory / "actor", "--target_dir", directory / "merged", "--dtype", dtype]
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "hybridrl.model_merger", *arguments], stdout=subprocess.DEVNULL)
    peaks: dict[str, int] = {}
    watching = threading.Thread(target=watch_memory, args=(process.pid, peaks))
    watching.start()
    assert process.wait() == 0
    watching.join()
    report = json.loads((directory / "merged" / "merge_report.json").read_text())
    return {
        "seconds": time.monotonic() - began,
        "of which": report["seconds"],
        "peak_memory": report["peak_memory_bytes"],
        "sampled_peaks": peaks,
    }


def watch_memory(pid: int, peaks: dict[str, int]) -> None:
    """Record the peak of each kind (RssAnon: private; RssFile: mapped files) until the process ends."""
    while True:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        sizes = {
            line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssFile"))
        }
        if not sizes:
            return
        for name, size in sizes.items():
            peaks[name] = max(peaks.get(name, 0), size)
        time.sleep(0.005)


def imports_alone() -> int:
    """Return the peak memory of the command's imports."""
    process = subprocess.Popen([sys.executable, "-m", "hybridrl.model_merger.merge"])
    peaks: dict[str, int] = {}
    watch_memory(process.pid, peaks)
    assert process.wait() == 0
    return sum(peaks.values())


def print_table(dtype: str, measured: dict[str, Any]) -> None:
    size, walls = measured["bytes"], {name: [run["wall"] for run in runs] for name, runs in measured["elapsed"].items()}
    print(f"\n{dtype}: {size / 1e9:.2f} GB    median (least to most) s   processor s   GB/s   x cp   of a buffer's")
    for name, wall in walls.items():
        processor = median(run["processor"] for run in measured["elapsed"][name])
        ratio = median_ratio(wall, walls["cp, cold" if name.endswith("cold") else "cp"])
        share = median_ratio(walls["write from a buffer"], wall)
        span = f"({min(wall):.2f} to {max(wall):.2f})"
        speed = size / 1e9 / median(wall)
        print(f"  {name:24}{median(wall):6.2f} {span:16} {processor:6.2f} {speed:6.2f} {ratio:6.2f} {share:6.2f}")


def median_ratio(over: list[float], under: list[float]) -> float:
    """Return the median of the ratios, round by round."""
    return median(one / other for one, other in zip(over, under, strict=True))


def main() -> None:
    parser = Arguments(__doc__, shape="tiny", rounds=1)
    parser.add_argument("--directory", help="on the disk to measure; what is written there is removed")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, {platform.release()}", "load": os.getloadavg()}
    with TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        ranks = multiprocessing.get_context("spawn")
        processes = [ranks.Process(target=save, args=(rank, arguments.shape, directory)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        for dtype in ("float32", "bfloat16"):
            figures[dtype] = measure(directory, getattr(torch, dtype), arguments.rounds)
            print_table(dtype, figures[dtype])
        figures["imports"] = imports_alone()
        print(f"\nthe complete command; importing its libraries takes {figures['imports'] / 2**20:.0f} MiB")
        for dtype in ("float32", "bfloat16"):
            figures[dtype]["command"] = ran = command(directory, dtype)
            peaks = ", ".join(f"{kind} {size / 2**20:.0f}" for kind, size in ran["sampled_peaks"].items())
            print(f"  {dtype:10}{ran['seconds']:6.1f} s, peak memory {ran['peak_memory'] / 2**20:.0f} MiB ({peaks})")
            figures[dtype]["greedy"] = merged_greedy(directory / "merged")
        figures["greedy"] = json.loads((directory / "greedy.json").read_text())
        print(f"greedy tokens: sharded {figures['greedy']}; merged, float32 {figures['float32']['greedy']}")
        assert figures["greedy"] == figures["float32"]["greedy"]
    figures["load"] = [*figures["load"], *os.getloadavg()]
    print("load over the last minute, five and fifteen: before {} {} {}, after {} {} {}".format(*figures["load"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
