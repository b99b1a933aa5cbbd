"""A real engine of a small random model that sees, against transformers' own forward pass of the same weights."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from hybridrl.config import load_ppo_config
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.pictures import PictureStore, Pixels, expanded
from hybridrl.core.rollout import Completion, Request, Sampling
from hybridrl.core.rollout.engine import RejectedRequest, continuation
from hybridrl.core.rollout.vllm.engine import VllmEngine
from hybridrl.core.rollout.vllm.settings import vllm_environment
from hybridrl.required import required
from hybridrl.runtime.environment import worker_environment
from tests.integration.test_unfinished_updates import Sender
from tests.vision_models import noise_picture, tokens, write_model_that_sees

pytestmark = pytest.mark.slow

SIZES = {"no picture": (), "a picture": ((75, 41),), "two pictures": ((64, 64), (33, 120))}
SAMPLING = Sampling(max_tokens=24, stop_ids=())
Prompt = tuple[Request, dict[int, Pixels]]


class Prompts:
    """Prompts for a model that sees, and what transformers computes for them."""

    def __init__(self, path: Path, family: str) -> None:
        processor = AutoProcessor.from_pretrained(path)
        self.start, self.placeholder, self.end, video = processor.tokenizer.convert_tokens_to_ids([*tokens(family)])
        self.masked, self.images, self.store = [self.placeholder, video], processor.image_processor, PictureStore()

    def pixels(self, width: int, height: int, seed: int) -> Pixels:
        return self.pixels_of(noise_picture(width, height, seed))

    def pixels_of(self, picture: Image.Image) -> Pixels:
        options = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
        return {**self.images(images=[picture], **options)}

    def prompt(self, *pictures: Pixels) -> Prompt:
        added = [self.store.add(pixels, int(pixels["image_grid_thw"].prod()) // 4) for pixels in pictures]
        ids = [20, 30, 40]
        for number, _ in enumerate(added):
            ids += [self.start, self.placeholder, self.end, 50 + number, 60]
        prompt = expanded(ids, self.placeholder, added)
        request = Request(0, 0, prompt.ids, 7, SAMPLING, carried=prompt.carried)
        return request, dict(self.store.handles(picture.digest for picture in added))

    def log_probs(self, path: Path, prompt: Prompt, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probs of a response with the placeholders masked, and the probability of a placeholder in
        place of each of its tokens without the mask."""
        request, pixels = prompt
        ids = torch.tensor([[*request.prompt_ids, *token_ids.tolist()]])
        options: dict[str, Any] = {}
        if pixels:
            pictures = [pixels[digest] for digest, _ in request.pictures]
            patches, grids = (
                torch.cat([torch.tensor(one[name]) for one in pictures]) for name in ("pixel_values", "image_grid_thw")
            )
            mean, std = (
                torch.tensor(values).repeat_interleave(patches.shape[1] // 3)
                for values in (self.images.image_mean, self.images.image_std)
            )
            options = {"pixel_values": (patches / 255 - mean) / std, "image_grid_thw": grids}
            options["mm_token_type_ids"] = (ids == self.placeholder).int()
        model = AutoModelForImageTextToText.from_pretrained(path)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **options).logits[0, :-1]
        logits = logits[len(request.prompt_ids) - 1 :]
        placeholders = logits.softmax(-1)[:, self.masked].sum(-1)
        logits[:, self.masked] = -torch.inf
        chosen = torch.tensor(token_ids)[:, None]
        return logits.log_softmax(-1).gather(-1, chosen)[:, 0].numpy(), placeholders.numpy()


def computed(
    model: ModelConfig,
    rollout: RolloutConfig,
    weights: list[str],
    prompts: dict[str, Prompt],
    wrong: Sequence[Prompt],
    black: Prompt | None = None,
) -> dict[str, Any]:
    """Return the responses to these prompts with each of the weights, by number and name, why the wrong ones are
    rejected, and what the last weights make of two pictures otherwise."""

    async def run() -> dict[str, Any]:
        engine, results = VllmEngine("cpu", model, rollout, 1), dict[str, Any]()
        await engine.connect()
        for number, path in enumerate(weights):
            sender = Sender(path)
            await sender.send(engine, 1.0, len(sender.buckets))
            await engine.finish_weights()
            await engine.finish_sync(number, number)
            for name, prompt in prompts.items():
                results[f"{number} {name}"] = await engine.generate(*prompt)
        results["rejected"] = [await rejection(engine, prompt) for prompt in wrong]
        return results | (await otherwise(engine, results["1 two pictures"]) if black else {})

    async def rejection(engine: VllmEngine, prompt: Prompt) -> str:
        with pytest.raises(RejectedRequest) as error:
            await engine.generate(*prompt)
        return str(error.value)

    async def otherwise(engine: VllmEngine, response: Completion) -> dict[str, Any]:
        """Return four samples at once, the response's log-probs with its and with black pictures, and a response that
        was interrupted."""
        request, pixels = prompts["two pictures"]
        samples = await asyncio.gather(*(engine.generate(replace(request, sample=n), pixels) for n in range(4)))
        whole, seen = [*request.prompt_ids, *response.token_ids.tolist()], required(black)
        scored = [await engine.score(whole, one.carried, shown) for one, shown in (prompts["two pictures"], seen)]
        longer = replace(request, sampling=replace(SAMPLING, max_tokens=200))
        begun, sampled = asyncio.ensure_future(engine.generate(longer, pixels)), await engine.check()
        while await engine.check() < sampled + 20:
            await asyncio.sleep(0.01)
        await engine.interrupt()
        part = await begun
        assert part.interrupted and 0 < len(part.token_ids) < 200
        continued = part.then(await engine.generate(continuation(longer, part), pixels))
        return {"at once": samples, "scored": np.array(scored), "continued": continued}

    return asyncio.run(asyncio.wait_for(run(), 240))


@pytest.fixture
def in_engine(overrides, tmp_path, monkeypatch) -> Callable[..., Any]:
    """Calls a function in a process of its own with the configuration of an engine; an engine lives as long as that."""
    lengths = {"data.max_prompt_length": 200, "data.max_response_length": 200}
    section = load_ppo_config(overrides(tmp_path, lengths)).actor_rollout_ref
    for name, value in (worker_environment("cpu", slots=1) | vllm_environment(section.rollout)).items():
        monkeypatch.setenv(name, value)

    def call(function: Callable[..., Any], path: Path, limit: int | None, *arguments: Any, **more: Any) -> Any:
        section.model.path, section.rollout.limit_images = str(path), limit
        section.rollout.engine_kwargs.vllm = more
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(function, section.model, section.rollout, *arguments).result()

    return call


def biased(directory: Path, prompts: Prompts, family: str) -> Path:
    """Write a model of other weights that samples the placeholder nearly every second time."""
    path = write_model_that_sees(directory, family, seed=1)
    model = AutoModelForImageTextToText.from_pretrained(path)
    with torch.no_grad():
        model.get_output_embeddings().weight[prompts.placeholder].normal_(std=50)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(("family", "on_device"), [("qwen3_vl", True), ("qwen2_5_vl", False)])
def test_an_engine_computes_what_transformers_does_and_never_samples_a_placeholder(
    in_engine, tmp_path, family, on_device
):
    """`on_device`: vLLM normalises the pixels next to the model, as it does by itself."""
    first = write_model_that_sees(tmp_path / "first", family)
    prompts = Prompts(first, family)
    second = biased(tmp_path / "second", prompts, family)
    shown = {
        name: prompts.prompt(*(prompts.pixels(*size, seed) for seed, size in enumerate(sizes)))
        for name, sizes in SIZES.items()
    }
    request, pixels = shown["two pictures"]
    assert {one["pixel_values"].dtype.name for one in pixels.values()} == {"uint8"}
    pictures = [pixels[digest] for digest, _ in request.pictures]
    black = prompts.prompt(*({**one, "pixel_values": 0 * one["pixel_values"]} for one in pictures))
    wrong = dict(wrong_prompts(*shown["a picture"], prompts))
    if not on_device:
        del wrong["the pixels are normalised, and this engine does so itself"]
    arguments = {} if on_device else {"mm_device_do_normalize": False}
    weights = [str(first), str(second)]
    results = in_engine(computed, first, 2, weights, shown, list(wrong.values()), black, **arguments)

    def placeholders_wanted(completion: Completion, path: Path, name: str) -> int:
        """Compare a response with transformers; return how many of its tokens would be placeholders without a mask."""
        expected, placeholders = prompts.log_probs(path, shown[name], completion.token_ids)
        assert np.abs(completion.log_probs - expected).max() < 1e-4
        assert not np.isin(completion.token_ids, prompts.masked).any()
        return int((placeholders > 0.999).sum())

    for name in shown:
        placeholders_wanted(results[f"0 {name}"], first, name)
        # The same pictures with other weights; without the mask at least three of 24 tokens would be placeholders.
        assert placeholders_wanted(results[f"1 {name}"], second, name) >= 3
    for completion in (*results["at once"], results["continued"]):
        placeholders_wanted(completion, second, "two pictures")
    size, sampled = len(request.prompt_ids), results["1 two pictures"].log_probs
    scored, seen_black = results["scored"]
    assert np.abs(scored[size - 1 :] - sampled).max() < 1e-4
    assert np.abs(seen_black[size - 1 :] - sampled).max() > 0.1
    assert (np.isinf(scored[: size - 1]) == (np.array(request.prompt_ids[1:]) == prompts.placeholder)).all()
    assert results["rejected"] == list(wrong)


def wrong_prompts(request: Request, pixels: dict[int, Pixels], prompts: Prompts) -> Iterator[tuple[str, Prompt]]:
    """Yield prompts, made of a prompt with a picture, and why they are rejected."""
    ((digest, start),), ids = request.pictures, request.prompt_ids
    end = max(place for place, token in enumerate(ids) if token == prompts.placeholder)
    yield (
        "the prompt has 3 pictures; one may have 2 (rollout.limit_images)",
        prompts.prompt(*[pixels[digest]] * 3),
    )
    yield (
        f"token {end} of the prompt is no placeholder in the places of its 1 pictures",
        (replace(request, prompt_ids=[*ids[:start], *ids[start + 1 :]]), pixels),
    )
    yield (
        f"token {start} of the prompt is no placeholder in the places of its 1 pictures",
        (replace(request, prompt_ids=[20, *ids]), pixels),
    )
    yield (
        f"token {start} of the prompt is a placeholder outside the places of its 0 pictures",
        (replace(request, carried={}), {}),
    )
    normalised = {**pixels[digest], "pixel_values": pixels[digest]["pixel_values"] / np.float32(255)}
    yield "the pixels are normalised, and this engine does so itself", (request, {digest: normalised})


def test_without_pictures_an_engine_has_no_tower_and_takes_all_weights_of_its_trainer(in_engine, tmp_path):
    path = write_model_that_sees(tmp_path)
    prompts = Prompts(path, "qwen3_vl")
    text, seeing = prompts.prompt(), prompts.prompt(prompts.pixels(32, 32, 0))
    results = in_engine(computed, path, None, [str(path)] * 2, {"text": text}, [seeing])
    expected, _ = prompts.log_probs(path, text, results["1 text"].token_ids)
    assert np.abs(results["1 text"].log_probs - expected).max() < 1e-4
    assert results["rejected"] == [
        "the prompt has 1 pictures, and the engine was started without pictures (rollout.limit_images=0)"
    ]
