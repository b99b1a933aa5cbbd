"""For `model.external_lib`: in every process that imports this, there is no memory for a cache of more than 5 MB, as
vLLM's, a tensor of bytes, or of more than a thousand tokens, as SGLang's, tensors [2, tokens, heads, numbers]."""

import torch

MOST, TOKENS = 5_000_000, 1000
allocate = torch.zeros


def zeros(*size: object, **options: object) -> torch.Tensor:
    if options.get("dtype") is torch.int8 and isinstance(size[0], int) and size[0] > MOST:
        raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size[0]} bytes")
    if isinstance(size[0], tuple) and len(size[0]) == 4 and size[0][1] > TOKENS:
        raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size[0]} numbers")
    return allocate(*size, **options)


torch.zeros = zeros
