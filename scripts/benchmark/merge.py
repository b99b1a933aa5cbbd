"""How fast a model is merged and exported, beside copying the same bytes: `python scripts/benchmark/merge.py`

A random model of Qwen2.5-0.5B's shapes (head tied to the embedding) is saved in float32 and with AdamW's moments, as
shards of two ranks with FSDP2. In turn, each to the last byte on the disk: `cp` of as many bytes as are merged, writing
them from a buffer in memory, the merge without its checks, the training side's export from memory, and safetensors' own
`save_file`. Warm: what is read lies in memory, as after a save; cold: it has to come from the disk. Then the whole
command in a process of its own, with its memory; and what the sharded model and the merged one answer greedily.
"""

import argparse
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
from transformers import AutoModelForCausalLM

from hybridrl.batch import Batch
from hybridrl.checkpoint.disk import reach_disk
from hybridrl.checkpoint.export import export_model, export_settings
from hybridrl.checkpoint.write import write_shards
from hybridrl.model_merger.checks import check_tensors
from hybridrl.model_merger.merge import write_model
from hybridrl.model_merger.source import open_source
from hybridrl.training.fsdp import reshard
from hybridrl.training.model import LanguageModel
from hybridrl.training.packing import lay_out

RANKS = 2
PROMPT, ANSWER = [11, 4711, 20, 151000, 7], 6


def save(rank: int, shape: str, directory: Path) -> None:
    """One rank's part of a saved step, as a run writes it; and what the sharded model answers greedily."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), RANKS), rank=rank, world_size=RANKS)
    sharded = sharded_model(shape)
    with torch.no_grad():
        answer = greedy(sharded)
    reshard(sharded)
    tensors = {name: parameter.detach() for name, parameter in sharded.model.named_parameters()}
    moments = {name: {"exp_avg": tensor, "exp_avg_sq": tensor} for name, tensor in tensors.items()}
    dcp.save({"model": tensors, "optimizer": {"state": moments}}, checkpoint_id=directory / "actor")
    if rank == 0:
        export_settings(sharded.model, directory / "actor" / "huggingface", torch.float32)
        (directory / "greedy.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


def greedy(model: LanguageModel) -> list[int]:
    ids = list(PROMPT)
    for _ in range(ANSWER):
        one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        row = Batch(len(ids) * one, one, torch.tensor(ids), zero, group=zero, position=zero, sample=zero)
        hidden = model.hidden_states(lay_out(row, padded=False))
        ids.append(int(model.model.get_output_embeddings()(hidden)[-1].argmax()))
    return ids[len(PROMPT) :]


def merged_greedy(directory: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    prompt = torch.tensor([PROMPT])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER, do_sample=False)
    return ids[0, len(PROMPT) :].tolist()


def write_block(target: Path, size: int) -> None:
    """As many bytes in one tensor, from one buffer in memory: what this disk takes at best."""
    block = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    pieces = (("a", first, block[: size - first]) for first in range(0, size, 1 << 20))
    target.mkdir()
    write_shards(target, {"a": torch.empty(size, dtype=torch.uint8, device="meta")}, pieces)


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)


def forget(*directories: Path) -> None:
    """Have files read from the disk again."""
    for path in (path for directory in directories for path in directory.rglob("*") if path.is_file()):
        reach_disk(path)
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@dataclass(frozen=True)
class Took:
    """Seconds on the wall, and of all processors for this process and those that it started."""

    wall: float
    processor: float


def timed(work: Callable[..., Any], *arguments: Any) -> Took:
    began, before = time.monotonic(), os.times()
    work(*arguments)
    return Took(time.monotonic() - began, sum(os.times()[:4]) - sum(before[:4]))


def write(target: Path, work: Callable[[], object]) -> None:
    """Until all of a new directory is on the disk."""
    work()
    for path in (*target.rglob("*"), target):
        reach_disk(path)


def measure(directory: Path, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """What every way to write the model in this type takes, all in turn."""
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
    found: dict[str, list[Took]] = {}
    for _ in range(rounds):
        for name in (*ways, "cp, cold", "merge, cold"):
            os.sync()
            if name.endswith("cold"):
                forget(directory / "actor", merged)
            found.setdefault(name, []).append(timed(write, target, ways[name.removesuffix(", cold")]))
            shutil.rmtree(target)
        found.setdefault("check of the tensors", []).append(timed(check_tensors, source, merged))
    return {"bytes": size, "took": {name: [asdict(took) for took in runs] for name, runs in found.items()}}


def command(directory: Path, dtype: str) -> dict[str, Any]:
    """The command with its checks, in a process of its own: seconds, and memory at its peak."""
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
    """The greatest of each kind (RssAnon: its own; RssFile: mapped from files) until the process ends."""
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
    """Peak memory of the command's imports."""
    code = "import hybridrl.model_merger.command; print(*open('/proc/self/status'))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return int(told.split("VmHWM:")[1].split()[0]) * 1024


def tell(dtype: str, measured: dict[str, Any]) -> None:
    size, walls = measured["bytes"], {name: [run["wall"] for run in runs] for name, runs in measured["took"].items()}
    print(f"\n{dtype}: {size / 1e9:.2f} GB    median (least to most) s   processor s   GB/s   x cp   of a buffer's")
    for name, wall in walls.items():
        processor = median(run["processor"] for run in measured["took"][name])
        ratio = middle(wall, walls["cp, cold" if name.endswith("cold") else "cp"])
        share = middle(walls["write from a buffer"], wall)
        span = f"({min(wall):.2f} to {max(wall):.2f})"
        speed = size / 1e9 / median(wall)
        print(f"  {name:24}{median(wall):6.2f} {span:16} {processor:6.2f} {speed:6.2f} {ratio:6.2f} {share:6.2f}")


def middle(over: list[float], under: list[float]) -> float:
    """The median of what each was over what was measured beside it."""
    return median(one / other for one, other in zip(over, under, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="on the disk to measure; what is written there is removed")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, {platform.release()}", "load": os.getloadavg()}
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
            found[dtype] = measure(directory, getattr(torch, dtype), arguments.rounds)
            tell(dtype, found[dtype])
        found["imports"] = imports_alone()
        print(f"\nthe command, whole; importing its libraries alone takes {found['imports'] / 2**20:.0f} MiB")
        for dtype in ("float32", "bfloat16"):
            found[dtype]["command"] = ran = command(directory, dtype)
            peaks = ", ".join(f"{kind} {size / 2**20:.0f}" for kind, size in ran["sampled_peaks"].items())
            print(f"  {dtype:10}{ran['seconds']:6.1f} s, peak memory {ran['peak_memory'] / 2**20:.0f} MiB ({peaks})")
            found[dtype]["greedy"] = merged_greedy(directory / "merged")
        found["greedy"] = json.loads((directory / "greedy.json").read_text())
        print(f"greedy tokens: sharded {found['greedy']}; merged, float32 {found['float32']['greedy']}")
        assert found["greedy"] == found["float32"]["greedy"]
    found["load"] = [*found["load"], *os.getloadavg()]
    print("load over the last minute, five and fifteen: before {} {} {}, after {} {} {}".format(*found["load"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
