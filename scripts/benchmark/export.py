"""How fast a model is exported to safetensors, relative to the speed of the disk: `python scripts/benchmark/export.py`

A random model in float32 is in this process, sharded over one rank. In turn, each until the last byte is on disk: the
export of a training run, writing as many bytes from a buffer, and safetensors' own `save_file`.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from models import SHAPES, sharded_model
from safetensors.torch import load_file, save_file
from side_by_side import ROUNDS, Row, arguments, formatted, in_turn, report

from hybridrl.checkpoint.export import export_model, parts
from hybridrl.core.training.fsdp import full_tensor, full_tensors, reshard

BLOCK = 16 << 20


def flushed(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def main() -> None:
    parser = arguments(__doc__, shape="tiny", rounds=1)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--directory", type=Path, help="on the disk to write to; default: that of temporary files")
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.directory) as place:
        directory = Path(place)
        dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 1), rank=0, world_size=1)
        model = sharded_model(options.shape)
        reshard(model)

        def export() -> None:
            tensors = full_tensors(model.model, parts(model.model, torch.float32))
            export_model(tensors, model.model, directory / "here", torch.float32, writes=True)

        export()
        files = sorted((directory / "here").glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        own = dict(model.model.state_dict())
        assert all(torch.equal(tensor, full_tensor(own[name])) for name, tensor in tensors.items())
        tensors, block = {name: tensor.clone() for name, tensor in tensors.items()}, os.urandom(BLOCK)

        def plain() -> None:
            with open(directory / "plain", "wb", buffering=0) as file:
                for _ in range(-(-size // BLOCK)):
                    file.write(block)
            flushed(directory / "plain")

        def save_with_safetensors() -> None:
            save_file(tensors, directory / "save_file.safetensors")
            flushed(directory / "save_file.safetensors")

        def cleared(work: Callable[[], None], path: Path) -> Callable[[], None]:
            def run() -> None:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                work()

            return run

        sides = {
            "here": cleared(export, directory / "here"),
            "disk": cleared(plain, directory / "plain"),
            "save_file": cleared(save_with_safetensors, directory / "save_file.safetensors"),
        }
        seconds = in_turn(sides, options.rounds)
        dist.destroy_process_group()
    share = seconds["disk"].median / seconds["here"].median
    what = f"export of {size / 1e9:.2f} GB over a plain write"
    other = f"{formatted(seconds['disk'])}; save_file {formatted(seconds['save_file'])}"
    report([Row(what, formatted(seconds["here"]), other, share, "at least 0.7 (aim 0.9)")], options.json)


if __name__ == "__main__":
    main()
