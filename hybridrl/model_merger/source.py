"""Merge sources: the tensors of a saved model, and the model that its configuration describes; both must match. And
checks that two sets of tensors are equal: a written directory and its source, or two saved models."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.checkpoint.export import as_published, one_thread, parts
from hybridrl.checkpoint.files import MANIFEST, faults
from hybridrl.checkpoint.read import PAIR, Adapter, merged, open_adapter, open_tensors, read_safetensors, stored_tensors
from hybridrl.checkpoint.resume import model_fingerprint
from hybridrl.checkpoint.store import STATE
from hybridrl.checkpoint.tensors import UNREADABLE, Tensors
from hybridrl.config import ConfigError
from hybridrl.config.files import ADAPTER_CONFIG, holds_adapter, holds_verl, resolve_model
from hybridrl.core.rounding import beyond_rounding, rounded_otherwise
from hybridrl.required import required
from hybridrl.tracking.console import Terminal

CONFIG = "config.json"
VALUE_HEADS = ("score.weight", "classifier.weight")
# Ending of an architecture's name -> its auto class; all others (GPT2LMHeadModel) are language models.
AUTO = {
    "ForConditionalGeneration": transformers.AutoModelForImageTextToText,
    "ForTokenClassification": transformers.AutoModelForTokenClassification,
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
}


class CheckFailed(Exception):
    """Files that were read or written are wrong; the message names them."""


@dataclass(frozen=True)
class MergeSource:
    """A saved model and the `model` it must match, on the meta device. `names`: the tensors in the model's order;
    `parameters`: those that training changes; `tied`: aliases -> names; `dtype`: the type to write. A model that was
    trained through an `adapter` is merged with its `base` as it is read."""

    directory: Path
    huggingface: Path
    tensors: Tensors
    model: transformers.PreTrainedModel
    names: tuple[str, ...]
    parameters: frozenset[str]
    tied: dict[str, str]
    dtype: torch.dtype
    adapter: Adapter | None = None
    base: Tensors | None = None

    @property
    def is_value_model(self) -> bool:
        return not self.model.can_generate()

    @property
    def saved(self) -> dict[str, Tensor]:
        """Shapes and types as saved."""
        return {name: self.tensors.meta[name] for name in self.names}

    @property
    def meta(self) -> dict[str, Tensor]:
        """Shapes and types as they will be written."""
        return {name: self.rounded(name, tensor) for name, tensor in self.saved.items()}

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter in the type to write; buffers keep theirs, such as a router's corrections in float32."""
        return tensor.to(self.dtype) if name in self.parameters else tensor

    def settings(self) -> dict[str, Any]:
        """Return the configuration to write: the saved one with this type and, for a value model, its class."""
        settings = json.loads((self.huggingface / CONFIG).read_text(encoding="utf-8"))
        settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = type_name(self.dtype)
        settings["architectures"] = [type(self.model).__name__]
        if self.is_value_model:
            settings |= {"id2label": self.model.config.id2label, "label2id": self.model.config.label2id}
        return settings


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def type_names(meta: dict[str, Tensor]) -> str:
    return " and ".join(sorted({type_name(tensor.dtype) for tensor in meta.values()}))


def open_source(
    directory: Path,
    dtype: torch.dtype | None = None,
    *,
    base: str | None = None,
    value_model: bool = False,
    trusted: bool = False,
) -> MergeSource:
    """Open a saved model and compare its tensors with its configuration. `dtype`: the type of the merged model, by
    default the type it computed in. `base`: directory of an adapter's base, if it has moved. `trusted`: custom code of
    the model may run. Raises ConfigError, or CheckFailed if tensors are missing, unknown, or of another shape."""
    described, adapter, unadapted = directory, None, None
    if holds_adapter(str(directory)):
        adapter = open_adapter(directory)
        described = _base_of(adapter, base)
        unadapted = open_tensors(described)
        tensors = merged(unadapted, adapter)
    else:
        tensors = open_tensors(directory)
        if adapters := [name for name in tensors.meta if "lora_" in name]:
            cause = f"{directory} holds a LoRA adapter ({adapters[0]}), which cannot be merged yet"
            raise ConfigError(cause, fix="merge it with peft")
    huggingface = resolve_model(str(described))
    model = _blank_model(huggingface, tensors.meta, value_model=value_model, trusted=trusted)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    tied = {name: first[id(value)] for name, value in state.items() if first.get(id(value), name) != name}
    all_parts, parameters = parts(model), dict(model.named_parameters())
    expected = {name: value for part in all_parts for name, value in part.published.items()}
    tensors = as_published(tensors, model)
    if mismatch := _mismatch(tensors.meta, expected, tied):
        raise CheckFailed(
            f"{directory}: of the tensors of {type(model).__name__}, {mismatch}; it is incomplete, or "
            f"{huggingface / CONFIG} describes another model"
        )
    trained = frozenset(name for part in all_parts if part.names[0] in parameters for name in part.published)
    if dtype is None:
        # The type it computed in, but none wider than saved, which would add nothing. hybridrl records it in the
        # configuration; verl does not, and its own merger writes bfloat16.
        widest = max((tensors.meta[name].dtype for name in trained), key=lambda kind: kind.itemsize)
        dtype = torch.bfloat16 if holds_verl(directory) else model.config.dtype
        dtype = widest if dtype is None or dtype.itemsize > widest.itemsize else dtype
    names = tuple(expected)
    return MergeSource(directory, huggingface, tensors, model, names, trained, tied, dtype, adapter, unadapted)


def _blank_model(
    directory: Path, saved: dict[str, Tensor], *, value_model: bool, trusted: bool
) -> transformers.PreTrainedModel:
    """Build the model of a configuration on the meta device: a value model if stated, or if its head was saved, as verl
    keeps the language model's architecture in a critic's configuration. A reward model's head has no bias."""
    file = directory / CONFIG
    if not file.is_file():
        cause = f"{file} is missing, which describes the model"
        raise ConfigError(cause, fix="copy it from the model that training started with")
    try:
        settings = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    except (OSError, ValueError, KeyError) as error:
        fix = "" if trusted else "--trust-remote-code runs custom code of the model"
        raise ConfigError(f"{file}: {str(error).splitlines()[0][:200]}", fix=fix) from error
    heads = [name for name in VALUE_HEADS if name in saved]
    architecture = (settings.architectures or [""])[0]
    if value_model or heads:
        rewards = "score.weight" in saved and "score.bias" not in saved
        architecture = "ForSequenceClassification" if rewards else "ForTokenClassification"
    if heads:
        settings.num_labels = saved[heads[0]].shape[0]
    endings = (ending for ending in AUTO if architecture.endswith(ending))
    kind = AUTO.get(next(endings, ""), transformers.AutoModelForCausalLM)
    with torch.device("meta"):
        try:
            return kind.from_config(settings, trust_remote_code=trusted)
        except ValueError as error:
            raise ConfigError(f"{file}: {str(error).splitlines()[0][:200]}") from error


def _mismatch(saved: dict[str, Tensor], expected: dict[str, Tensor], tied: dict[str, str]) -> str:
    """Describe the first of three ways in which tensors differ from the model's; empty if they match."""
    common = [name for name in expected if name in saved and saved[name].shape != expected[name].shape]
    mismatches = {
        "missing": [name for name in expected if name not in saved],
        "not the model's": [name for name in saved if name not in expected and name not in tied],
        "of another shape": [f"{n}: {list(saved[n].shape)} for {list(expected[n].shape)}" for n in common],
    }
    lines = (f"{len(names)} are {kind} ({', '.join(names[:3])})" for kind, names in mismatches.items() if names)
    return next(lines, "")


def _base_of(adapter: Adapter, moved: str | None) -> Path:
    """Return the directory of an adapter's base model. Raises ConfigError if it is missing, or its weights differ from
    those in training."""
    directory, name = adapter.directory, moved or adapter.settings.get("base_model_name_or_path")
    if not name:
        cause = f"{directory} is an adapter whose {ADAPTER_CONFIG} names no base model"
        raise ConfigError(cause, fix="name the directory of that model: --base DIR")
    path = Path(name)
    if not path.is_dir():
        try:
            path = Path(snapshot_download(name))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            cause = f"{directory} is an adapter of {name}, which is not there"
            raise ConfigError(cause, fix="name the directory of that model: --base DIR") from error
    state = directory.absolute().parent / STATE
    bases = json.loads(state.read_text(encoding="utf-8")).get("bases", {}) if state.is_file() else {}
    fingerprints = [base for key, base in bases.items() if key.startswith("critic") == (directory.name == "critic")]
    if fingerprints and model_fingerprint(str(path) if Path(name).is_dir() else name) not in fingerprints:
        cause = f"{name} has other weights than the model that {directory} was trained on"
        raise ConfigError(cause, fix="name that model: --base")
    return path


# -- checks ------------------------------------------------------------------------------------------------------------


# Compares a written directory with its source; returns a description of the result, or raises CheckFailed.
ParityCheck = Callable[[MergeSource, Path], str]

# Integer types by size: floating-point numbers are compared by their bits.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

TOKENS = 64
PROMPT, RESPONSE = 8, 24  # tokens of the check in vLLM
ATTENTION = "eager"  # exact for every family: other implementations ignore the logit caps of Gemma 2


def check_damage(source: MergeSource) -> str:
    """Raise CheckFailed if files differ from the checksums that were saved with them, if any."""
    step, damaged = source.directory.absolute().parent, source.tensors.faults()
    with_manifest = (step / MANIFEST).is_file()
    if with_manifest:
        damaged += faults(step, f"{source.directory.name}/")
    if damaged:
        raise CheckFailed(f"{source.directory} is damaged: {'; '.join(damaged[:3])}; merge another checkpoint")
    return f"files match {MANIFEST}" if with_manifest else f"without {MANIFEST}"


@one_thread()
def check_tensors(source: MergeSource, directory: Path) -> str:
    """Read back the written directory, and its source again, and compare them bit for bit."""
    written = stored_tensors(directory)
    layout = {name: (stored.shape, stored.dtype) for name, stored in written.items()}
    if layout != {name: (tensor.shape, tensor.dtype) for name, tensor in source.meta.items()}:
        raise CheckFailed("the written tensors have other names, shapes or types than planned")
    differing = []
    for name in tracked(source.names, "checking"):
        pieces = ((source.rounded(name, piece).reshape(-1), first) for first, piece in source.tensors.pieces(name))
        if not all(_same(piece, written[name].elements(first, piece.numel())) for piece, first in pieces):
            differing.append(name)
    if differing:
        raise CheckFailed(f"{len(differing)} tensors differ from what was read: {', '.join(differing[:3])}")
    for name, first in source.tied.items():
        if name not in source.tensors.meta:
            continue
        # Piece by piece if both tensors are cut in the same way, as is usual for equal shapes.
        pairs = zip(source.tensors.pieces(name), source.tensors.pieces(first), strict=False)
        equal = all(at == there and _same(piece, twin) for (at, piece), (there, twin) in pairs)
        if not equal and not _same(source.tensors.read(name), source.tensors.read(first)):
            raise CheckFailed(f"{name} is saved with other values than {first}, to which the configuration ties it")
    return f"{len(written)} of {len(written)} equal bit for bit"


def compare_models(source: MergeSource, directory: Path) -> str:
    """Compare two saved models, the first rounded to the types of the second; return a description of the result."""
    other = open_tensors(directory)
    only_there = [name for name in other.meta if name not in source.names and name not in source.tied]
    differences = [f"{name} is missing there" for name in source.names if name not in other.meta]
    differences += [f"{name} is only there" for name in only_there]
    for name in tracked([name for name in source.names if name in other.meta], "comparing"):
        there = other.read(name)
        here = source.tensors.read(name).to(there.dtype)
        if here.shape != there.shape:
            differences.append(f"{name} is {list(here.shape)} here and {list(there.shape)} there")
        elif not _same(here, there):
            differences.append(f"{name} differs by up to {float((here.double() - there.double()).abs().max()):.2g}")
    if differences:
        others = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckFailed(f"{source.directory} and {directory} differ: {'; '.join(differences[:3])}{others}")
    return f"{len(source.names)} tensors equal bit for bit, in {type_names(other.meta)}"


def check_merged_weights(source: MergeSource, written: Path) -> str:
    """Check that merged weights equal base + scaling * B @ A in double precision, and differ from the base."""
    values, adapter, whole = read_safetensors(written), required(source.adapter), required(source.base)
    names = [name for name in values.meta if adapter.pair(name)]
    differing, largest = 0, 0.0
    for name in names:
        base, value = whole.read(name), values.read(name)
        a, b = (adapter.tensors.read(part).double() for part in required(adapter.pair(name)))
        expected = base.double() + adapter.scaling * (b @ a)
        gap = (value.double() - base.to(value.dtype).double()).abs()
        # rounding of float32 over the sums, then of the written type
        size = base.double().abs() + adapter.scaling * (b.abs() @ a.abs())
        tolerance = size * ((len(a) + 2) * torch.finfo(torch.float32).eps + torch.finfo(value.dtype).eps)
        if bool(((value.double() - expected).abs() > tolerance).any()):
            raise CheckFailed(f"{name} is not the base's with the adapter added")
        differing, largest = differing + bool(gap.any()), max(largest, float(gap.max()))
    if len(names) * 2 != sum(PAIR in name for name in adapter.tensors.meta):
        raise CheckFailed("the adapter has tensors for layers that the model does not have")
    if not differing:
        raise CheckFailed("the merged weights equal the base's: the adapter has not been trained yet (its B is zero)")
    return (
        f"{differing} of {len(names)} adapted weights differ from the base, by up to {largest:.2g}; all equal it + BA"
    )


def check_in_transformers(source: MergeSource, directory: Path) -> str:
    """Compare the outputs for fixed tokens of the directory and of the checkpoint's own tensors, in transformers."""
    ids = torch.arange(TOKENS) * 37 % source.model.config.get_text_config().vocab_size
    expected = outputs(checkpoint_model(source), ids)
    try:
        merged = type(source.model).from_pretrained(directory, dtype="auto", attn_implementation=ATTENTION)
    except UNREADABLE as error:
        raise CheckFailed(f"transformers cannot load what was written ({str(error).splitlines()[0]})") from error
    merged_outputs, kind = outputs(merged, ids), "values" if source.is_value_model else "log-probs"
    if not torch.equal(merged_outputs, expected):  # outputs of masked tokens are -inf
        gap = float((merged_outputs - expected).abs().max())
        raise CheckFailed(f"in transformers {kind} differ by up to {gap:.2g} from those of the checkpoint")
    return f"{kind} for {TOKENS} tokens equal"


def check_in_vllm(source: MergeSource, directory: Path) -> str:
    """Compare the log-probs of a greedy response in vLLM, or a reward model's score, with those of the checkpoint's own
    tensors in transformers."""
    from vllm import LLM, PoolingParams, SamplingParams
    from vllm.platforms import current_platform

    from hybridrl.core.rollout.vllm.repairs import CPU_ATTENTION, Repaired

    prompt = [number * 37 % source.model.config.get_text_config().vocab_size for number in range(PROMPT)]
    try:
        engine = LLM(
            model=str(directory),
            dtype=type_name(source.dtype),
            skip_tokenizer_init=not source.is_value_model,  # vLLM needs one to score
            enforce_eager=True,
            max_model_len=PROMPT + RESPONSE,
            max_num_seqs=1,
            kv_cache_memory_bytes=256 << 20,
            worker_extension_cls=f"{Repaired.__module__}.{Repaired.__qualname__}",
            **(CPU_ATTENTION if current_platform.is_cpu() else {}),
        )
    except UNREADABLE as error:
        cause = f"vLLM cannot load what was written ({str(error).splitlines()[0]})"
        raise CheckFailed(f"{cause}; --verify transformers needs no vLLM") from error
    ids = torch.tensor(prompt)
    if source.is_value_model:
        task = "token_classify" if "score.bias" in source.names else "classify"
        raw = PoolingParams(use_activation=False)
        pooled = engine.encode({"prompt_token_ids": prompt}, raw, pooling_task=task, use_tqdm=False)[0]
        actual, kind, size = pooled.outputs.data, "values", f"values for {PROMPT} tokens"
    else:
        greedy = SamplingParams(temperature=0.0, max_tokens=RESPONSE, ignore_eos=True, logprobs=0, detokenize=False)
        response = engine.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0].outputs[0]
        steps = zip(response.token_ids, response.logprobs, strict=True)
        actual = torch.tensor([step[token].logprob for token, step in steps])
        ids = torch.tensor([*prompt, *response.token_ids])
        kind, size = "log-probs", f"greedy log-probs of {RESPONSE} tokens"
    model = checkpoint_model(source)
    expected = outputs(model, ids)[-len(actual) :]
    with rounded_otherwise(type_name(source.dtype)):
        again = outputs(model, ids)[-len(actual) :]
    if difference := beyond_rounding(actual, expected, type_name(source.dtype), again):
        raise CheckFailed(f"in vLLM {kind} differ from those of the checkpoint {difference}")
    gap = float((actual - expected).abs().max())
    return f"{size} within {gap:.1g} of transformers'"


def checkpoint_model(source: MergeSource) -> PreTrainedModel:
    """Load the checkpoint's tensors into a model in memory, without the written files."""
    tensors = {name: source.rounded(name, source.tensors.read(name)) for name in source.names}
    options = {"dtype": source.dtype, "attn_implementation": ATTENTION}
    return type(source.model).from_pretrained(None, config=source.model.config, state_dict=tensors, **options)


@torch.no_grad()
def outputs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the log-probs of all tokens but the first, or a value model's values of all, in float64: log_softmax in
    float32 loses small probabilities of a large vocabulary on CPU."""
    logits = model.eval()(input_ids=ids[None], use_cache=False).logits[0].double()
    if not model.can_generate():
        return logits
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)


def tracked(names: Sequence[str], work: str) -> Iterable[str]:
    """Iterate over names with a progress bar, if on a terminal."""
    console = Terminal(stderr=True)
    return track(names, work, console=console, transient=True, disable=not console.is_terminal)


def _same(first: Tensor, second: Tensor) -> bool:
    """Compare bit for bit: NaN equals itself, and 0 differs from -0."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(INTEGERS[first.itemsize]) for tensor in (first, second)))
