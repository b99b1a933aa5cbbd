"""Merging a LoRA adapter: the base that it was trained on, the two as one model, and the proof that they are."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor

from hybridrl.checkpoint.adapter import ADAPTER_WEIGHTS, PAIR, PREFIX, Adapter, merged, open_adapter
from hybridrl.checkpoint.disk import publish
from hybridrl.checkpoint.read import open_tensors, read_safetensors
from hybridrl.checkpoint.resume import model_fingerprint
from hybridrl.checkpoint.saved import STATE
from hybridrl.checkpoint.tensors import Tensors
from hybridrl.config import ConfigError
from hybridrl.config.model_directory import ADAPTER_CONFIG, resolve_model
from hybridrl.model_merger.merge import byte_count, refuse_target
from hybridrl.model_merger.report import REPORT, files_in, write_report
from hybridrl.model_merger.source import CheckFailed, Source, open_source

SUBFOLDER = "lora_adapter"  # of a merged model, where both are wanted, as verl has it


@dataclass(frozen=True)
class Parts:
    """An adapter, and the model that it was trained on; `tensors` are those of the two together."""

    adapter: Adapter
    directory: Path
    base: Tensors

    @property
    def tensors(self) -> Tensors:
        """Of a value model without the language model's head, in whose place it has its own."""
        together = merged(self.base, self.adapter)
        within = {name.removeprefix(PREFIX).split(".")[0] for name in self.adapter.tensors.meta}
        gives_values = self.adapter.settings.get("task_type") == "TOKEN_CLS"
        kept = {n: t for n, t in together.meta.items() if not gives_values or n.split(".")[0] in within}
        return replace(together, meta=kept)

    def source(self, dtype: torch.dtype | None, *, value_model: bool, trusted: bool) -> Source:
        options = {"value_model": value_model, "trusted": trusted, "tensors": self.tensors}
        return open_source(self.adapter.directory, dtype, huggingface=resolve_model(str(self.directory)), **options)


def open_parts(directory: Path, base: str | None) -> Parts:
    """An adapter and its base, which may be named where it is no longer where it was.

    Raises ConfigError where the base cannot be had, or has other weights than those that the adapter was trained on.
    """
    adapter = open_adapter(directory)
    name = base or adapter.base
    place = _base_directory(name, directory)
    known = _known_bases(directory)
    if known and model_fingerprint(str(place) if Path(name).is_dir() else name) not in known:
        raise ConfigError(f"{name} has other weights than the model that {directory} was trained on; name that: --base")
    return Parts(adapter, place, open_tensors(place))


def _base_directory(name: str, adapter: Path) -> Path:
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{adapter} is an adapter of {name}, which is not there; name where that model lies: --base DIR"
        ) from error


def _known_bases(directory: Path) -> list[str]:
    """Fingerprints of the bases of a saved step's adapters; the critic's for a critic."""
    file = directory.absolute().parent / STATE
    bases = json.loads(file.read_text(encoding="utf-8")).get("bases", {}) if file.is_file() else {}
    of_critic = directory.name == "critic"
    return [value for key, value in bases.items() if key.startswith("critic") == of_critic]


def check_merged(parts: Parts, source: Source, written: Path) -> str:
    """Hold merged weights against base + scaling * B @ A in double precision, and against the base, from which they
    must differ. Returns what was found, in words."""
    found, adapter = read_safetensors(written), parts.adapter
    names = [name for name in found.meta if adapter.pair(name)]
    differing, largest = 0, 0.0
    for name in names:
        base, value = parts.base.read(name), found.read(name)
        a, b = (adapter.tensors.read(part).double() for part in adapter.pair(name))
        delta = adapter.scaling * (b @ a)
        expected, gap = base.double() + delta, (value.double() - base.to(value.dtype).double()).abs()
        if bool(((value.double() - expected).abs() > _rounding(value.dtype, base, a, b, adapter.scaling)).any()):
            raise CheckFailed(f"{name} is not the base's with the adapter added")
        differing, largest = differing + bool(gap.any()), max(largest, float(gap.max()))
    if len(names) * 2 != sum(PAIR in name for name in adapter.tensors.meta):
        raise CheckFailed("the adapter has parts for layers that the model does not have")
    if not differing:
        raise CheckFailed(
            "the merged weights are those of the base: the adapter has not been trained yet (its B is zero)"
        )
    return (
        f"{differing} of {len(names)} adapted weights differ from the base's, by up to {largest:.2g}; all are it + BA"
    )


def _rounding(dtype: torch.dtype, base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """How far a weight may be off: float32 over the sums, then the type that it is written in."""
    size = base.double().abs() + scaling * (b.abs() @ a.abs())
    return size * ((len(a) + 2) * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps)


def write_adapter(adapter: Adapter, directory: Path) -> str:
    """Write peft's directory, and read it back. Returns what was found, in words."""
    ignore = shutil.ignore_patterns("*.safetensors", REPORT)
    shutil.copytree(resolve_model(str(adapter.directory)), directory, ignore=ignore)
    tensors = {name: adapter.tensors.read(name) for name in adapter.tensors.meta}
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    written = read_safetensors(directory, ADAPTER_WEIGHTS)
    wrong = [name for name, tensor in tensors.items() if not torch.equal(written.read(name), tensor)]
    if wrong or not (directory / ADAPTER_CONFIG).is_file():
        raise CheckFailed(f"{len(wrong)} tensors of the adapter were written otherwise than they were read")
    return f"an adapter of rank {adapter.settings['r']}, {len(tensors)} tensors equal bit for bit"


def publish_adapter(adapter: Adapter, target: Path) -> str:
    """Write an adapter by itself: aside, checked there, and published by one rename. Returns what was found, in words.

    Raises ConfigError where the directory may not be written.
    """
    target = target.absolute()
    refuse_target(target, byte_count(adapter.tensors.meta))
    aside, replaced = (target.with_name(f".{target.name}.{word}") for word in ("writing", "replaced"))
    shutil.rmtree(aside, ignore_errors=True)
    try:
        told = write_adapter(adapter, aside)
        source = {"directory": str(adapter.directory.absolute()), "form": adapter.tensors.form}
        write_report(aside, {"source": source, "files": files_in(aside), "checked": {"tensors": told}})
        publish(aside, target, replaced)
    finally:
        for path in (aside, replaced):
            shutil.rmtree(path, ignore_errors=True)
    return told
