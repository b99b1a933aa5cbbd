"""In an update the host copies to the device once, before the first forward pass, and waits for it once, at the end;
counted on the meta device, as on a GPU."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText

from hybridrl.config.catalog import (
    ENTROPY,
    EXACT_TEACHER,
    POLICY_LOSSES,
    POLICY_READS,
    SAMPLED_TEACHER,
    Divergence,
    LossTerm,
)
from hybridrl.config.values import Aggregation
from hybridrl.core.algorithms.algorithm import loss_terms
from hybridrl.core.algorithms.rollout_correction import Rejection, RolloutCorrection
from hybridrl.core.batch import Batch
from hybridrl.core.training.attention import implementation
from hybridrl.core.training.heads import ReferenceOutputs
from hybridrl.core.training.learner import Learner
from hybridrl.core.training.losses import LossConfig, critic_objective, policy_objective, prepare_rejection
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.packing import ModelInputs
from hybridrl.core.training.vision import READS, Vision, VisionConfig
from tests.core.algorithms.parameters import LOSS_PARAMETERS
from tests.core.training.on_ranks import begin_alike
from tests.vision_models import FAMILIES, noise_picture, reader_that_sees, settings_that_see

SCRIPTS = Path(__file__).parents[3] / "scripts" / "benchmark"
PARTS = [[0, 1, 2], [3], []]  # the last keeps ranks aligned, with a dummy row
PLAIN = LossConfig(loss_terms("vanilla"), "token-mean", 1.0, 1.0, 1.0, LOSS_PARAMETERS)
UPDATE = replace(PLAIN, old_from_update=True, log_entropy=True)
EXTRA = LossTerm("extra", ENTROPY.function, 0.5, outputs=ENTROPY.outputs, mask="chosen")
LOSSES = {f"aggregation {mode}": replace(PLAIN, aggregation=mode) for mode in get_args(Aggregation)}
LOSSES |= {name: replace(PLAIN, terms=loss_terms(name)) for name in POLICY_LOSSES}
LOSSES |= {f"KL {form}": replace(PLAIN, terms=loss_terms("vanilla", 0.0, form, 0.1)) for form in ("k3", "k1+", "full")}
LOSSES |= {
    "entropy": replace(PLAIN, terms=loss_terms("vanilla", 0.1)),
    "a term with a mask": replace(PLAIN, terms=(*PLAIN.terms, EXTRA)),
    "log-probs of the update": replace(PLAIN, old_from_update=True, log_entropy=True),
    "weights of tokens": replace(PLAIN, correction=RolloutCorrection("token", None, 2.0, False, ())),
    "weights of rows": replace(PLAIN, correction=RolloutCorrection("sequence", 0.5, 2.0, False, ())),
}
for form in ("forward_kl", "reverse_kl", "jsd"):
    term = replace(EXACT_TEACHER, divergence=Divergence(form, 0.5), parameters={"most": 10.0})
    LOSSES[f"teachers, {form}"] = replace(
        PLAIN, terms=loss_terms(None, 0.1, "full", 0.1, term), teachers=("teacher.one", "teacher.two")
    )
SAMPLED = replace(SAMPLED_TEACHER, parameters={"form": "k3", "most": None})
LOSSES["a teacher, k3"] = replace(PLAIN, terms=loss_terms("vanilla", teaching=SAMPLED))


@pytest.fixture(autouse=True)
def scripts(monkeypatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    had_group = dist.is_initialized()
    yield
    if dist.is_initialized() and not had_group:  # by a script
        dist.destroy_process_group()


def batch() -> Batch:
    """Four rows of 64 tokens with every field that a loss reads."""
    from count_update import update_rows

    rows = begin_alike(update_rows(4, 64), (1, 0, 20), (2, 1, 50))
    fields = dict.fromkeys((*POLICY_READS, "values", "returns"), torch.zeros(len(rows.response_ids)))
    fields["chosen"] = torch.ones(len(rows.response_ids), dtype=torch.bool)
    rows.carried["teacher_log_probs"] = torch.zeros(len(rows.response_ids))
    rows = replace(rows, **fields, episode=torch.tensor([0, 0, 1, 2]))
    return rows.with_episode_tokens(["chosen"]).only(*PLAIN.reads, *fields, "teacher_log_probs")


@pytest.fixture
def learner(monkeypatch) -> Learner:
    from count_update import language_model, learner_of

    from hybridrl.core.training import token_outputs

    monkeypatch.setitem(token_outputs.CHUNK_BYTES, "cuda", 1)
    monkeypatch.setattr(token_outputs, "FEWEST_TOKENS", 64)  # several chunks, so that there is an early gradient
    return learner_of(language_model("tiny"))


def reference(learner: Learner) -> Callable[..., ReferenceOutputs]:
    model = learner.model
    assert isinstance(model, LanguageModel)

    @torch.no_grad()
    def hidden_of(_: str, inputs: ModelInputs) -> ReferenceOutputs:
        return ReferenceOutputs(model.hidden_states(inputs), model.head)

    return hidden_of


@pytest.mark.parametrize("name", LOSSES)
def test_in_an_update_the_host_waits_only_at_its_end_and_copies_only_before_its_first_forward_pass(name, learner):
    from count_update import END, LAYOUT, count

    loss = LOSSES[name]
    learner.against = {loss.against: learner} if loss.against else {}
    learner.teachers = dict.fromkeys(loss.teachers, learner)
    objective = policy_objective(learner, loss, reference(learner), [])
    launches = count(learner, objective, batch(), PARTS, loss.masks)
    assert [part for part, _ in launches.waits.elements()] == [END], launches.waits
    assert [part for part, _ in launches.copies.elements()] == [LAYOUT], launches.copies


def test_routes_are_copied_with_each_micro_batch(learner):
    """Of all micro-batches together they would take too much memory."""
    from count_update import LAYOUT, count

    rows, learner.reads = batch(), ("routes",)
    rows.carried["routes"] = torch.zeros(int(rows.lengths.sum()), 2, 1, dtype=torch.int16)
    launches = count(learner, policy_objective(learner, PLAIN, reference(learner), []), rows, PARTS)
    assert sum(launches.copies.values()) == len(PARTS) and sum(launches.waits.values()) == 1
    assert [part for part, _ in launches.copies.elements()].count(LAYOUT) == 1


def test_a_critic_waits_no_more_often(monkeypatch):
    from count_update import END, count, learner_of, value_model

    section = SimpleNamespace(cliprange_value=0.5, loss_agg_mode="seq-mean-token-mean", loss_scale_factor=None)
    learner = learner_of(value_model("tiny"))
    launches = count(learner, critic_objective(learner, section), batch(), PARTS)
    assert [part for part, _ in launches.waits.elements()] == [END], launches.waits
    assert sum(launches.copies.values()) == 1


def test_a_rejection_before_an_update_waits_for_log_probs_entropies_and_counts(learner):
    from count_update import END, count

    correction = RolloutCorrection(None, None, 2.0, False, (Rejection("seq_mean_k2", None, 1.0),))
    reject, loss = prepare_rejection(learner, replace(PLAIN, correction=correction, log_entropy=True))
    launches = count(learner, policy_objective(learner, loss, reference(learner), []), batch(), PARTS, prepare=reject)
    assert [part for part, _ in launches.waits.elements()].count(END) == 1
    assert sum(launches.waits.values()) == 4, launches.waits


@pytest.mark.parametrize("family", FAMILIES)
def test_with_pictures_their_pixels_are_copied_with_each_micro_batch_and_the_host_waits_no_more_often(family, tmp_path):
    """Nor does anything on the device meet what is on the host. Autograd waits once more in the backward pass of a
    masked copy, which is not an operation that can be counted here."""
    from count_update import END, LAYERS, LAYOUT, count, learner_of

    reader = reader_that_sees(tmp_path, family)
    settings = settings_that_see(family, reader.placeholder)
    with torch.device("meta"):
        seeing = LanguageModel(
            AutoModelForImageTextToText.from_config(
                settings, attn_implementation=implementation(settings), dtype=torch.bfloat16
            )
        )
    blank, *sample = (reader.pixels(noise_picture(64 * wide, 64)) for wide in (1, 2, 3))
    seeing.vision = Vision(VisionConfig(reader.rule, blank, sample), seeing.model)
    learner = learner_of(seeing)
    learner.reads, learner.vision = READS, seeing.vision
    rows = seeing.vision.sample_rows(range(10, 18), range(20, 24))
    filled = dict.fromkeys(("rollout_log_probs", "advantages"), torch.zeros(len(rows.response_ids)))
    rows = replace(rows, **filled, response_mask=torch.ones(len(rows.response_ids), dtype=torch.bool))
    launches = count(learner, policy_objective(learner, UPDATE, reference(learner), []), rows, [[0, 2], [1], []])
    assert [part for part, _ in launches.waits.elements()] == [END], launches.waits
    copies = [part for part, _ in launches.copies.elements()]
    assert copies.count(LAYOUT) == 1 and len(copies) == 3 + 2, launches.copies  # means and deviations once
    assert copies.count(LAYERS) == 2


def test_an_update_of_a_model_of_24_layers_launches_at_most_3300_kernels(monkeypatch):
    """Of 16,384 tokens, whose logits are computed in ten chunks; nothing is compiled."""
    from count_update import HEAD, count, language_model, learner_of, parts_of, policy_loss_config, update_rows

    learner, rows = learner_of(language_model("0.5b")), update_rows(32, 512)
    objective = policy_objective(learner, policy_loss_config("token-mean"), reference(learner), [])
    launches = count(learner, objective, rows, parts_of(len(rows), 1))
    assert launches.kernels[HEAD] <= 350
    assert launches.kernels.total() <= 3300


def test_the_waits_of_an_operation_are_counted():
    """Of those that the update does without: a value, a size that depends on values, and a truth."""
    from launches import DEVICE, counted

    with counted() as launches:
        values = torch.ones(4, device=DEVICE)
        float(values.sum())
        values.nonzero()
        bool(values.isnan().any())
        values.tolist()
        values[values.argmax()]
    assert sum(launches.waits.values()) == 5
