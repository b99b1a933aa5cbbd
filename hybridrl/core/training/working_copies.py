"""Parameters in the type of the computation, for a model that is not sharded."""

import torch
from torch import Tensor, nn


class WorkingCopies:
    """Copies of the parameters whose type is not that of the computation, and of trained ones in half precision, as
    gradients are added in float32. `gather` puts the copies in the parameters' place; `release` undoes this, and gives
    the parameters the sums of their gradients since then.

    On a single rank FSDP2 gathers nothing. It still casts, allocates, copies and reduces each parameter by itself in
    every pass of a layer, half of the host's work in an update. Here one operation copies all parameters.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype, self.gathered = model, dtype, False
        self.copies: dict[nn.Parameter, nn.Parameter] | None = None  # later, as loading replaces parameters
        self.places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []  # by module and name
        self.sums: dict[nn.Parameter, Tensor] = {}

    def gather(self) -> None:
        """Let the model compute with copies of the parameters' present values, if it does not yet."""
        if self.gathered:
            return
        if self.copies is None:
            adds = self.dtype == torch.float32  # parameters of this type take their gradients themselves
            copied = (p for p in self.model.parameters() if p.dtype != self.dtype or (p.requires_grad and not adds))
            self.copies = {p: self._copy_of(p) for p in copied}
            registers = [module._parameters for module in self.model.modules()]
            items = [(register, *item) for register in registers for item in register.items()]
            self.places = [(register, name, p) for register, name, p in items if p in self.copies]
        for parameter, copy in self.copies.items():
            same = parameter.dtype == self.dtype
            copy.data = parameter.data if same else torch.empty_like(parameter, dtype=self.dtype)
        others = {parameter: copy for parameter, copy in self.copies.items() if parameter.dtype != self.dtype}
        if others:
            torch._foreach_copy_([copy.data for copy in others.values()], [parameter.data for parameter in others])
        for register, name, parameter in self.places:
            register[name] = self.copies[parameter]
        self.gathered = True

    def release(self) -> None:
        """Put the parameters back with their gradients, and free the copies, if the model computes with them."""
        if not self.gathered or self.copies is None:
            return
        for register, name, parameter in self.places:
            register[name] = parameter
        for copy in self.copies.values():
            copy.data = copy.data.new_empty(0)
        for parameter, total in self.sums.items():
            parameter.grad = total.to(parameter.dtype)
        self.sums, self.gathered = {}, False

    def _copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(torch.empty(0, dtype=self.dtype, device=parameter.device), parameter.requires_grad)

        def add(_: Tensor) -> None:
            gradient, total, copy.grad = copy.grad, self.sums.get(parameter), None
            if gradient is not None:
                self.sums[parameter] = gradient.float() if total is None else total.add_(gradient)

        if parameter.requires_grad:
            copy.register_post_accumulate_grad_hook(add)
        return copy
