"""The greedy response of a sharded model in training equals that of the merged one in transformers."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.export import export_settings
from hybridrl.config.files import HUGGINGFACE
from hybridrl.core.batch import Batch
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.packing import pack_rows
from hybridrl.core.training.state import StateWriter, state_of
from hybridrl.model_merger.merge import merge
from hybridrl.model_merger.source import open_source
from tests.core.training.families import FAMILIES
from tests.core.training.on_ranks import on_ranks
from tests.core.training.test_state import ALL, build, train, wait_for

PROMPT, RESPONSE = [5, 41, 17], 12


def trained_and_saved(path: str, directory: Path) -> list[int]:
    """Train on these ranks, save as a run does, and return the greedy response of the sharded model."""
    learner, writer = build(path), StateWriter("cpu")
    train(learner, range(2))
    writer.start({directory: state_of(learner.model, learner.optimizers, ALL)})
    wait_for(writer)
    if dist.get_rank() == 0:
        export_settings(learner.model.model, directory / HUGGINGFACE, torch.float32)
    return greedy(learner.model.eval())


@torch.no_grad()
def greedy(model: LanguageModel) -> list[int]:
    """Decode one token at a time, each with a forward pass over all before it."""
    ids = list(PROMPT)
    for _ in range(RESPONSE):
        zero = torch.zeros(1, dtype=torch.int64)
        row = Batch(
            torch.tensor([len(ids)]), torch.ones(1, dtype=torch.int64), torch.tensor(ids), zero, zero, zero, zero
        )
        hidden = model.hidden_states(pack_rows(row, padded=False))
        ids.append(int(model.model.get_output_embeddings()(hidden)[-1].argmax()))
    return ids[len(PROMPT) :]


def generated(directory: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = torch.tensor([PROMPT])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=RESPONSE, do_sample=False)
    return ids[0, len(PROMPT) :].tolist()


TRAINED = ("two heads a key", "all heads one key, tied head", "learned positions")


def train_all(top: Path) -> list[list[int]]:
    return [trained_and_saved(str(top / family / "start"), top / family / "actor") for family in TRAINED]


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    """The start of each family."""
    directory = tmp_path_factory.mktemp("families")
    for family in TRAINED:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(directory / family / "start")
    return directory


@pytest.fixture(scope="module")
def responses(top) -> list[list[list[int]]]:
    """By rank and family; the ranks are started once."""
    return on_ranks(2, train_all, top)


@pytest.mark.parametrize("family", TRAINED)
def test_the_merged_model_has_the_same_greedy_response(top, responses, family):
    place = top / family
    merge(open_source(place / "actor"), place / "merged")
    of_ranks = [of_rank[TRAINED.index(family)] for of_rank in responses]
    assert of_ranks == [generated(place / "merged")] * 2
    assert of_ranks[0] != generated(place / "start")
