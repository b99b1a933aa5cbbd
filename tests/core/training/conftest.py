"""A small random model of each family on disk, and rows for it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.core.batch import Batch
from tests.core.training.families import FAMILIES, SPECIAL, VOCABULARY


@pytest.fixture(scope="session")
def directories(tmp_path_factory) -> dict[str, str]:
    """A small random language model of each family, saved."""
    paths = {}
    for number, (family, config) in enumerate((FAMILIES | SPECIAL).items()):
        torch.manual_seed(number)
        path = tmp_path_factory.mktemp("models") / str(number)
        model = AutoModelForCausalLM.from_config(config)
        for buffer in dict(model.named_buffers()).values():
            if buffer.dim() and not buffer.any():  # a router's corrections, which begin as zeros
                torch.nn.init.normal_(buffer)
        model.save_pretrained(path)
        paths[family] = str(path)
    return paths


@pytest.fixture
def directory(directories) -> str:
    return directories["two heads a key"]


@pytest.fixture(scope="session")
def rows(make_batch) -> Batch:
    batch = make_batch([4, 1, 7, 3], prompts=[2, 5, 1, 3])
    generator = torch.Generator().manual_seed(0)
    batch.prompt_ids = torch.randint(VOCABULARY, batch.prompt_ids.shape, generator=generator)
    batch.response_ids = torch.randint(VOCABULARY, batch.response_ids.shape, generator=generator)
    return batch
