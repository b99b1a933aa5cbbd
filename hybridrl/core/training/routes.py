"""Router replay: the policy is updated with the experts that the engine chose (R3, Ma et al. 2025, arXiv 2510.11370).

A router's scores differ slightly between engine and trainer. Where two experts are close, the choice may differ, and
log-probs then differ by much more than rounding. Here each token has the engine's experts in each layer. The family's
own router still computes the weights of these experts, so its gradient is theirs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hybridrl.config.catalog import EXPERTS
from hybridrl.core.carried import UNROUTED

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\..*(?<=\.)experts$")


class RouterReplay:
    """Makes the routers of a mixture choose given experts [tokens of a forward pass, layers, experts of a token]; with
    None they choose freely. The experts stay set for the backward pass, which may recompute layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        settings = model.config.get_text_config()
        self.family, self.layers = model.config.model_type, settings.num_hidden_layers
        self.experts = next((int(vars(settings)[name]) for name in EXPERTS if vars(settings).get(name)), 0)
        self.per_token = int(getattr(settings, "num_experts_per_tok", 0))
        self.begin(None)
        places = {name: int(match[1]) for name, _ in model.named_modules() if (match := LAYER.search(name))}
        if not places:
            raise self._fault("no layer chooses")
        self.routers = len(places)
        for name, layer in places.items():
            block = model.get_submodule(name.rpartition(".")[0])
            for router in [child for child in block.children() if hasattr(child, "top_k")] or [block]:
                router.forward = partial(self._route, router.forward, layer)

    def begin(self, routes: Tensor | None) -> None:
        """Set the experts of a forward pass."""
        self.routes, self.replaced = routes, torch.zeros(())

    def statistics(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return statistics of the last forward pass by name [tokens]: the share of replayed experts that the router
        would not have chosen; and 1 for tokens without the engine's choice."""
        if self.routes is None:
            zeros = torch.zeros(tokens.numel(), device=tokens.device)
            return {"replaced_experts": zeros, "tokens_without_routes": zeros + 1}
        own = (self.routes[:, 0, 0] == UNROUTED).float()
        return {"replaced_experts": self.replaced / (self.per_token * self.routers), "tokens_without_routes": own}

    def _fault(self, cause: str) -> ValueError:
        fix = "set actor_rollout_ref.actor.router_replay.mode=disabled"
        return ValueError(f"{self.family}: {cause} its experts in a way that can be replayed; {fix}")

    def _route(self, forward: Callable[..., Any], layer: int, *arguments: Any, **options: Any) -> Any:
        if self.routes is None:
            return forward(*arguments, **options)
        with _Choice(self.routes[:, layer].long(), self.experts) as choice:
            output = forward(*arguments, **options)
        if choice.calls != 1:
            raise self._fault(f"layer {layer} does not choose")
        self.replaced = self.replaced + choice.replaced
        return output


class _Choice(TorchFunctionMode):
    """Replaces the result of the `topk` by which a router chooses experts.

    The call is recognised by its shapes, so every family's own arithmetic around it stays. Some routers first choose
    groups of experts, and mask the scores of the other groups: the groups must then be those of the replayed experts.
    """

    def __init__(self, replayed: Tensor, experts: int) -> None:
        self.replayed, self.experts, self.calls = replayed, experts, 0  # [tokens, experts of a token]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        scores = args[0] if func in (torch.topk, Tensor.topk) else None
        if scores is None or scores.dim() != 2 or len(scores) != len(self.replayed):
            return func(*args, **options)
        if scores.shape[1] < self.experts:
            groups = self.replayed.div(self.experts // scores.shape[1], rounding_mode="floor")
            forced = scores.scatter(1, groups.clamp(min=0), torch.inf)
            return func(torch.where(self.replayed[:, :1] == UNROUTED, scores, forced), *args[1:], **options)
        own = func(*args, **options)
        if own.indices.shape != self.replayed.shape:
            return own
        self.calls += 1
        chosen = torch.where(self.replayed == UNROUTED, own.indices, self.replayed)
        self.replaced = (chosen[:, :, None] != own.indices[:, None]).all(-1).sum(-1)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))
