"""A stand-in for a GPU that counts what a program makes of one: launches, waits of the host, and copies from it.

It is torch's meta device, whose tensors have shapes and no values. What the host reads of them is made up: numbers are
0 and conditions true.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hybridrl
from hybridrl.core import device as devices
from hybridrl.core.training import logit_kernels, token_outputs
from hybridrl.core.training.heads import TopTokens
from hybridrl.core.training.token_outputs import TokenOutputs

DEVICE = torch.device("meta")
SOURCES = tuple(f"{Path(package.__file__).parent}/" for package in (hybridrl, transformers))
PRODUCTS = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0}  # and the place of the first factor among the arguments
# Operations without a kernel: views of the same memory, new memory, and questions about a shape.
VIEWS = "view _unsafe_view t transpose permute expand slice select unsqueeze squeeze detach alias as_strided split "
VIEWS += "split_with_sizes unbind _reshape_alias unflatten lift_fresh chunk narrow diagonal view_as"
MEMORY = "empty empty_like new_empty empty_strided new_empty_strided set_ resize_"
SHAPES = "is_same_size sym_size sym_numel result_type prim_device"
WITHOUT_KERNEL = {*VIEWS.split(), *MEMORY.split(), *SHAPES.split()}
# Operations whose result, or the size of it, the host reads from the device.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "bincount"}
WAITS |= {"_unique2", "unique_dim", "unique_consecutive"}


class Launches(TorchDispatchMode):
    """Counts by `part`, the name that the program has set last. `waits` and `copies` are counted by the line of the
    program that makes them, with the part in which it does."""

    def __init__(self) -> None:
        super().__init__()
        self.part = ""
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # that the kernels read and write
        self.operations: Counter[str] = Counter()  # of matrix products
        self.waits: Counter[tuple[str, str]] = Counter()
        self.copies: Counter[tuple[str, str]] = Counter()

    def kernel(self, tensors: Sequence[Tensor]) -> None:
        """Count a launch that reads or writes these tensors."""
        self.kernels[self.part] += 1
        self.bytes[self.part] += sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())

    def copy(self) -> None:
        """Count a copy from the host."""
        self.copies[self.part, line()] += 1

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        name = func.overloadpacket.__name__
        read = _tensors((args, options))
        here = any(tensor.device == DEVICE for tensor in read)
        if here and (name in WAITS or _has_unknown_size(name, args, options)):
            self.waits[self.part, line()] += 1
            if name == "_local_scalar_dense":
                return torch.ones((), dtype=read[0].dtype).item() if not read[0].is_floating_point() else 0.0
        if name == "_to_copy" and here and str(options.get("device")) == "cpu":
            self.waits[self.part, line()] += 1
            return torch.zeros(read[0].shape, dtype=options.get("dtype") or read[0].dtype)
        written = func(*args, **options)
        results = _tensors(written)
        if name in ("_to_copy", "copy_") and _from_host(read, results):
            self.copy()
        elif here and name not in WITHOUT_KERNEL:
            self.kernel([*read, *results])
            if name in PRODUCTS:
                first, second = args[PRODUCTS[name] : PRODUCTS[name] + 2]
                self.operations[self.part] += 2 * first.numel() * second.shape[-1]
        return written


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _from_host(read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    return any(one.device == DEVICE for one in written) and any(one.device.type == "cpu" for one in read)


def _has_unknown_size(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether the size of an operation's result depends on values: the host then waits for these."""
    if name == "repeat_interleave":
        return options.get("output_size") is None
    return name in ("index", "index_put_") and any(one.dtype == torch.bool for one in _tensors(args[1]))


def line() -> str:
    """Return the innermost line of hybridrl or transformers that is being executed."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(SOURCES):
            return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.line}"
    return "torch"


class _Literals(TorchFunctionMode):
    """Counts tensors that are made on the device from a number or a list: copies, which are no operation of torch's."""

    def __init__(self, launches: Launches) -> None:
        self.launches = launches

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        made_there = func is Tensor.new_tensor and args[0].device == DEVICE
        if made_there or (func in (torch.tensor, torch.as_tensor) and options.get("device") == DEVICE):
            self.launches.copy()
        return func(*args, **options)


class _Kernels(logit_kernels.LogitKernels):
    """The kernels of the logits as launches."""

    launches: Launches

    def _read(self, logits: Tensor, head: Any, requested: tuple[bool, ...]) -> tuple[TokenOutputs, Tensor]:
        columns = iter(torch.empty(sum(requested) + 1, len(logits), dtype=torch.float32, device=logits.device))
        outputs = TokenOutputs(*(next(columns) if want else None for want in requested))
        self.launches.kernel([logits])
        return outputs, next(columns)

    def _compare(self, other: logit_kernels.ComparedLogits) -> tuple[Tensor, Tensor]:
        divergences, unreached = torch.empty(2, len(self.logits), dtype=torch.float32, device=self.logits.device)
        self.launches.kernel([self.logits, other.logits])
        return divergences, unreached

    def gradient(self, by: TokenOutputs) -> Tensor:
        self.launches.kernel([self.logits, *(other.logits for other in self.others)])
        self.launches.bytes[self.launches.part] += self.logits.nbytes  # it is written, too
        return self.logits


@contextmanager
def counted() -> Iterator[Launches]:
    """Count what runs on the meta device. It computes as a GPU does: with the kernels of attention and logits."""
    launches = Launches()

    def arithmetic(chunks: token_outputs.Chunks) -> token_outputs.LogitTables:
        if isinstance(chunks.spec.teacher, TopTokens):
            return token_outputs.LogitTables(chunks.head, chunks.spec, chunks.size)
        kernels = _Kernels(chunks.head, chunks.spec, chunks.size)
        kernels.launches = launches
        return kernels

    def all_reduce(tensor: Tensor, *_: object, **__: object) -> None:
        launches.kernel([tensor])

    with ExitStack() as stack:
        as_on_a_gpu = {"meta": token_outputs.CHUNK_BYTES["cuda"]}
        stack.enter_context(patch("torch.fx.experimental._config.meta_nonzero_assume_all_nonzero", True))
        stack.enter_context(patch.dict(token_outputs.CHUNK_BYTES, as_on_a_gpu))
        stack.enter_context(patch.object(devices, "has_varlen_attention", lambda device: True))
        stack.enter_context(patch.object(token_outputs.Chunks, "arithmetic", arithmetic))
        stack.enter_context(patch.object(dist, "all_reduce", all_reduce))
        stack.enter_context(_Literals(launches))
        stack.enter_context(launches)
        yield launches


def within(launches: Launches, part: str, call: Callable[..., Any], after: str = "") -> Callable[..., Any]:
    """Return a function whose launches are counted as those of a part; what follows as those of the part `after`."""

    def run(*arguments: Any, **options: Any) -> Any:
        launches.part = part
        result = call(*arguments, **options)
        launches.part = after
        return result

    return run
