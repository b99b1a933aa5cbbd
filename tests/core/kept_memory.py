"""Frees 200 MB of tensors and prints how many MB this process had, and has after each way to give their pages back:
`python -m tests.core.kept_memory`"""

from itertools import islice

import psutil
import torch

from hybridrl.core.device import release_cached_memory, release_host_memory


def megabytes() -> int:
    return psutil.Process().memory_info().rss // 2**20


def main() -> None:
    blocks = [torch.ones(2**14) for _ in range(3200)]  # glibc gives larger ones back by itself
    kept = list(islice(blocks, 0, None, 20))  # what lies between them, also the last, keeps glibc from freeing all
    print(megabytes())
    del blocks
    release_cached_memory("cpu")
    print(megabytes())
    release_host_memory()
    print(megabytes())
    assert all(block.sum() == 2**14 for block in kept)


if __name__ == "__main__":
    main()
