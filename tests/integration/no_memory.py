"""For `model.external_lib`: in every process that imports this, there is no memory for a cache of more than 5 MB."""

import torch

MOST = 5_000_000
allocate = torch.zeros


def zeros(*size: object, **options: object) -> torch.Tensor:
    if options.get("dtype") is torch.int8 and isinstance(size[0], int) and size[0] > MOST:
        raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size[0]} bytes")
    return allocate(*size, **options)


torch.zeros = zeros
