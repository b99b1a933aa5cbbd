"""The parameters of a model that is not sharded, in the type in which it computes."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridrl.required import required

GRADIENT_BYTES = 64 << 20  # of gradients in the type of computation, from which on they are added to their sums


@dataclass(eq=False)
class Copy:
    """A parameter's copy, the modules that have it by name, and the sum of its gradients so far in float32."""

    parameter: nn.Parameter
    copy: nn.Parameter
    places: list[tuple[nn.Module, str]]
    total: Tensor | None = None


class WorkingCopies:
    """Copies of the parameters whose type is not that of the computation, and of trained ones in half precision, whose
    gradients have to add up in float32. `gather` puts the copies in the parameters' place, `release` puts these back
    with their gradients.

    On a single rank FSDP2 gathers nothing, and yet casts, allocates, copies and reduces each parameter by itself in
    every forward and backward pass of a layer, which keeps the host busy for half of an update. Here one operation
    copies all parameters. Gradients leave the type of computation during the backward pass, so that both kinds are
    never in memory together.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype, self.gathered = model, dtype, False
        self.copies: list[Copy] | None = None  # made when they are first needed, since loading replaces parameters
        self.arrived: list[Copy] = []  # whose gradients are not in their sums yet
        self.arrived_bytes = 0

    def gather(self) -> None:
        """Let the model compute with the copies, of the parameters' present values, if it does not yet."""
        self._add()  # before the next backward pass adds to the same gradients
        if self.gathered:
            return
        self.gathered, self.copies = True, self._made() if self.copies is None else self.copies
        for each in self.copies:
            same = each.parameter.dtype == self.dtype
            each.copy.data = each.parameter.data if same else torch.empty_like(each.parameter, dtype=self.dtype)
        others = [each for each in self.copies if each.parameter.dtype != self.dtype]
        if others:
            torch._foreach_copy_([each.copy.data for each in others], [each.parameter.data for each in others])
        self._put(copies=True)

    def release(self) -> None:
        """Put the parameters back, with the gradients of all backward passes since `gather`, and free the copies."""
        if not self.gathered:
            return
        self._add()
        self._put(copies=False)
        self.gathered = False
        for each in required(self.copies):
            each.copy.data = each.copy.data.new_empty(0)
            if each.total is not None:
                each.parameter.grad, each.total = each.total.to(each.parameter.dtype), None

    def _made(self) -> list[Copy]:
        copies: dict[nn.Parameter, Copy] = {}
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter.dtype == self.dtype and not (parameter.requires_grad and self.dtype != torch.float32):
                    continue
                if parameter not in copies:
                    data = torch.empty(0, dtype=self.dtype, device=parameter.device)
                    copies[parameter] = made = Copy(parameter, nn.Parameter(data, parameter.requires_grad), [])
                    if parameter.requires_grad:
                        made.copy.register_post_accumulate_grad_hook(lambda _, made=made: self._arrive(made))
                copies[parameter].places.append((module, name))
        return [*copies.values()]

    def _put(self, *, copies: bool) -> None:
        for each in required(self.copies):
            for module, name in each.places:
                module._parameters[name] = each.copy if copies else each.parameter

    def _arrive(self, made: Copy) -> None:
        self.arrived.append(made)
        self.arrived_bytes += made.copy.nbytes
        if self.arrived_bytes >= GRADIENT_BYTES:
            self._add()

    @torch.no_grad()
    def _add(self) -> None:
        """Add the gradients that have arrived to their sums."""
        if not self.arrived:
            return
        gradients = [required(each.copy.grad) for each in self.arrived]
        wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        torch._foreach_copy_(wide, gradients)
        sums = [each.total for each in self.arrived if each.total is not None]
        if sums:
            torch._foreach_add_(
                sums, [more for each, more in zip(self.arrived, wide, strict=True) if each.total is not None]
            )
        for each, first in zip(self.arrived, wide, strict=True):
            each.copy.grad, each.total = None, first if each.total is None else each.total
        self.arrived, self.arrived_bytes = [], 0
