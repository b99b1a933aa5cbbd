"""A step computed again from its batch and the weights before it, by real training ranks."""

import re
import shutil
from contextlib import closing

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hybridrl.checkpoint.store import Store
from hybridrl.config import ConfigError, load_ppo_config
from hybridrl.config.compose import as_yaml, save_config
from hybridrl.core.batch import Batch
from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START, PICTURES
from hybridrl.core.pictures import expanded, placeholder_ids, tokens_of
from hybridrl.doctor.replay import replay, weights_before
from hybridrl.required import required
from hybridrl.runs.sample_log import SampleLog
from tests.integration.test_gradient import ragged_batch
from tests.vision_models import noise_picture, reader_that_sees, tokens, write_model_that_sees


@pytest.fixture
def directory(overrides, tmp_path):
    """The directory of a run whose step 1 was diagnosed."""
    batch, settings = ragged_batch(4), load_ppo_config(overrides(tmp_path, {"trainer.n_gpus_per_node": 1}))
    batch.rewards = torch.tensor([0.0, 1.0, 0.0, 1.0])
    batch.advantages = batch.advantages * 0.01
    batch.advantages[: batch.response_lengths[0]] = 5.0
    save_config(as_yaml(settings), tmp_path / "config.yaml")
    SampleLog(None, training_dir=None, validation_dir=None, replay_dir=tmp_path / "replay", shown=0).keep(1, batch)
    return tmp_path


def test_the_row_that_moved_the_gradient_is_named_first(directory, capsys):
    rows = replay(directory, None)
    # One row has nearly all of the gradient, so that the estimate of the signal is next to 0, on either side of it.
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"(, is nothing but noise|: most of it is noise); set actor_rollout_ref\.rollout\.n or ", said)
    assert (rows[0]["position"], rows[0]["sample"], rows[0]["advantage"]) == (0, 0, pytest.approx(5.0))
    assert rows[0]["share"] > 0.9 and sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert [row["gradient"] for row in rows] == sorted((row["gradient"] for row in rows), reverse=True)
    model = AutoModelForCausalLM.from_pretrained(
        load_ppo_config([], config_name="config", config_dir=directory).actor_rollout_ref.model.path
    )
    batch = ragged_batch(4)
    ids = torch.cat([batch.prompt_ids[: batch.prompt_lengths[0]], batch.response_ids[: batch.response_lengths[0]]])
    log_probs = model(ids[None].long()).logits[0, :-1].float().log_softmax(-1)
    written = log_probs.gather(1, ids[1:, None].long())[-int(batch.response_lengths[0]) :, 0]
    assert rows[0]["least_log_prob"] == pytest.approx(float(written.detach().min()), abs=1e-4)


def test_a_step_with_pictures_is_computed_again_with_their_pixels(overrides, tmp_path):
    """Rows with two pictures, one and none, each with a response of three tokens."""
    model, reader = write_model_that_sees(tmp_path / "model"), reader_that_sees(tmp_path / "processor")
    start, placeholder, end = reader.processor.tokenizer.convert_tokens_to_ids([*tokens("qwen3_vl")[:3]])
    images = [noise_picture(64, 96, 1), noise_picture(70, 40, 2)]
    pixels = [reader.pixels(image) for image in images]
    pictures = [reader.store.add(each, tokens_of(each, 2)) for each in pixels]
    prompts = [
        expanded([9, *[start, placeholder, end] * len(seen), 10], placeholder, seen)
        for seen in (pictures, pictures[1:], [])
    ]
    written = torch.tensor([[20, 30, 40], [50, 60, 70], [80, 90, 100]])
    batch = Batch(
        prompt_lengths=torch.tensor([len(prompt.ids) for prompt in prompts]),
        response_lengths=torch.tensor([3, 3, 3]),
        prompt_ids=torch.tensor([token for prompt in prompts for token in prompt.ids]),
        response_ids=written.flatten(),
        group=torch.arange(3),
        position=torch.arange(3),
        sample=torch.zeros(3, dtype=torch.int64),
        response_mask=torch.ones(9, dtype=torch.bool),
        rewards=torch.ones(3),
        rollout_log_probs=torch.full((9,), -5.0),
        advantages=torch.ones(9),
        carried={
            PICTURES: torch.tensor([2, 1, 0]),
            **{
                name: torch.from_numpy(np.concatenate([each.carried[name] for each in prompts[:2]]))
                for name in (PICTURE_DIGEST, PICTURE_START)
            },
        },
    )
    more = {"actor_rollout_ref.model.path": model, "data.train_batch_size": 3, "trainer.n_gpus_per_node": 1}
    settings = load_ppo_config(overrides(tmp_path, more | {"data.max_prompt_length": 64}))
    save_config(as_yaml(settings), tmp_path / "config.yaml")
    SampleLog(None, training_dir=None, validation_dir=None, replay_dir=tmp_path / "replay", shown=0).keep(
        1, batch, pictures
    )
    rows = {row["position"]: row for row in replay(tmp_path, None)}
    own = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    for number, seen in enumerate((images, images[1:], [])):
        ids = torch.tensor([[*prompts[number].ids, *written[number].tolist()]])
        inputs = reader.processor.image_processor(images=seen, return_tensors="pt") if seen else {}
        types = (ids == placeholder).int()
        logits = own(input_ids=ids, mm_token_type_ids=types, **inputs).logits[0, -4:-1]
        logits[:, placeholder_ids(own.config)] = -torch.inf  # never sampled
        least = logits.log_softmax(-1).gather(1, written[number][:, None]).min().item()
        assert rows[number]["least_log_prob"] == pytest.approx(least, abs=1e-5)
        assert rows[number]["gradient"] > 0
    (model / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"the rows have pictures: .*cannot be loaded"):
        replay(tmp_path, None)


def test_a_step_that_was_not_kept_or_has_no_checkpoint_before_it_is_refused(directory):
    with pytest.raises(ConfigError, match=r"step 2 is not among those of which the batch was kept \(1\)"):
        replay(directory, 2)
    shutil.copy(directory / "replay" / "1.npz", directory / "replay" / "3.npz")
    with pytest.raises(ConfigError, match="no intact checkpoint of a step before 3"):
        replay(directory, 3)


def test_the_weights_are_those_of_the_last_checkpoint_before_the_step_healthy_or_not(tmp_path):
    with closing(Store(tmp_path)) as store:
        for step in (1, 2, 3):
            store.begin(step)
            store.publish(step, {"healthy": step < 2, "recovery": False, "metrics": {}, "reason": "it collapsed"})
    assert required(weights_before(tmp_path, 3)).step == 2 and weights_before(tmp_path, 1) is None
