"""Has an engine choose other experts than the router, for about half of the tokens that it samples one at a time. Named
as external_lib: trainers import it, too, and have no vLLM."""

import sys
from typing import Any

import torch
from torch import Tensor

FEW = 8  # tokens of an iteration: prompts have more, also that of the probe after a weight sync

if "vllm" in sys.modules:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    compute = CPURouter._compute_routing

    def choose(
        self: CPURouter, hidden: Tensor, logits: Tensor, dtype: torch.dtype | None, **more: Any
    ) -> tuple[Tensor, Tensor]:
        weights, experts = compute(self, hidden, logits, dtype, **more)
        planted = (logits[:, :1] > 0) & (len(logits) < FEW)
        others = torch.where(planted, (experts + 1) % logits.shape[1], experts)
        chosen = logits.float().softmax(-1).gather(1, others.long())
        chosen = chosen / chosen.sum(-1, keepdim=True) if self.renormalize else chosen
        return torch.where(planted, chosen, weights), others

    CPURouter._compute_routing = choose
