"""What a sharded model answers greedily while it is trained, and what the merged one answers in transformers."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hybridrl.batch import Batch
from hybridrl.checkpoint.export import export_settings
from hybridrl.config.model_directory import HUGGINGFACE
from hybridrl.model_merger.merge import merge
from hybridrl.model_merger.source import open_source
from hybridrl.training.model import LanguageModel
from hybridrl.training.packing import lay_out
from hybridrl.training.state import state_of
from hybridrl.training.state_writer import StateWriter
from tests.training.families import FAMILIES
from tests.training.on_ranks import on_ranks
from tests.training.test_state import ALL, build, train, wait_for

PROMPT, ANSWER = [5, 41, 17], 12


def trained_and_saved(path: str, directory: Path) -> list[int]:
    """Updates on these ranks, a save as a run makes it, and what the model that they share answers then."""
    learner, writer = build(path), StateWriter("cpu")
    train(learner, range(2))
    writer.start({directory: state_of(learner.model, learner.optimizers, ALL)})
    wait_for(writer)
    if dist.get_rank() == 0:
        export_settings(learner.model.model, directory / HUGGINGFACE, torch.float32)
    return greedy(learner.model.eval())


@torch.no_grad()
def greedy(model: LanguageModel) -> list[int]:
    """One token at a time, each from a forward pass over all that came before it."""
    ids = list(PROMPT)
    for _ in range(ANSWER):
        zero = torch.zeros(1, dtype=torch.int64)
        row = Batch(
            torch.tensor([len(ids)]), torch.ones(1, dtype=torch.int64), torch.tensor(ids), zero, zero, zero, zero
        )
        hidden = model.hidden_states(lay_out(row, padded=False))
        ids.append(int(model.model.get_output_embeddings()(hidden)[-1].argmax()))
    return ids[len(PROMPT) :]


def generated(directory: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = torch.tensor([PROMPT])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER, do_sample=False)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("family", ["two heads a key", "all heads one key, tied head", "learned positions"])
def test_the_merged_model_answers_greedily_as_the_trainers_did(tmp_path, family):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path / "start")
    answers = on_ranks(2, trained_and_saved, str(tmp_path / "start"), tmp_path / "actor")
    merge(open_source(tmp_path / "actor"), tmp_path / "merged")
    assert answers == [generated(tmp_path / "merged")] * 2
    assert answers[0] != generated(tmp_path / "start")
