"""What hybridrl adds to vLLM's own calls, with stand-ins for the engine and the model."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from vllm.lora.layers import BaseLayerWithLoRA

from hybridrl.config import load_ppo_config
from hybridrl.core.rollout.engine import Request, Sampling
from hybridrl.core.rollout.vllm.collector import Collector, EngineLoop, EngineResponse, Observer
from hybridrl.core.rollout.vllm.engine import PARTS, VllmEngine, unlink_segments, vllm_arguments
from hybridrl.core.rollout.vllm.pictures import PicturePrompts
from hybridrl.core.rollout.vllm.settings import vllm_environment
from hybridrl.core.rollout.vllm.worker import unwrap_adapted_layers, wrap_adapted_layers
from hybridrl.required import required
from tests.vision_models import write_model_that_sees


class OldEngine:
    """Sleeps as vLLM 0.26 does: only if it is fully awake."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()

    def has_unfinished_requests(self) -> bool:
        return False

    def sleep(self, level: int) -> None:
        if not self.asleep:
            self.asleep = set(PARTS)

    def wake_up(self, tags: list[str]) -> None:
        self.asleep -= set(tags)


def test_an_engine_that_has_only_its_weights_goes_to_sleep_fully():
    engine, old = VllmEngine.__new__(VllmEngine), OldEngine()
    engine.device = "cpu"
    engine.loop, engine.sleeps, engine.adapted, engine.asleep = EngineLoop(lambda: old), True, False, frozenset()

    async def sleep_after_each_of(*parts: list[str]) -> None:
        await engine.loop.start()
        for awake in parts:
            for part in awake:
                await engine.wake(part)
            await engine.sleep()
            assert old.asleep == PARTS

    asyncio.run(sleep_after_each_of([], ["weights"], ["weights", "kv_cache"], [], ["weights"]))


class EndingEngine:
    """Ends each request at once, for this reason; `reset` is what it answers to a reset of its cache."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 100, max_model_len=50, hf_config=None)

    def __init__(self, failure: str = "", reset: bool = True) -> None:
        self.failure, self.reset, self.names = failure, reset, []
        self.engine_core = SimpleNamespace(engine_core=self)
        self.batch_queue: list[int] = []  # iterations in flight

    def has_unfinished_requests(self) -> bool:
        return bool(self.names)

    def add_request(self, name: str, *_: object, **__: object) -> None:
        self.names.append(name)

    def step(self) -> list[EngineResponse]:
        names, self.names, self.batch_queue = self.names, [], self.batch_queue[1:]
        return [EngineResponse(name, None, token_ids=[7, 8], failure=self.failure) for name in names]

    def reset_prefix_cache(self) -> bool:
        return self.reset and not self.batch_queue


def around(vllm: EndingEngine) -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine.loop, engine.adapted, engine.observer = EngineLoop(lambda: vllm), False, Observer()
    engine.prompts = PicturePrompts(vllm, 0)
    engine.collector, engine.sync_id, engine.version = Collector(engine.observer), 3, 2
    return engine


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_that_vllm_gives_up_is_no_response(reason):
    async def generate(engine: VllmEngine) -> list[int]:
        await engine.loop.start()
        return (await engine.generate(Request(0, 0, [1, 2], 5, Sampling(9, (0,))))).token_ids.tolist()

    assert asyncio.run(generate(around(EndingEngine()))) == [7, 8]
    with pytest.raises(RuntimeError, match=f"vLLM ended the request after 2 tokens: {reason}"):
        asyncio.run(generate(around(EndingEngine(reason))))


def test_new_weights_are_not_used_with_a_cache_that_vllm_has_not_emptied():
    async def sync(engine: VllmEngine) -> tuple[int, int]:
        await engine.loop.start()
        await engine.finish_sync(4, 3)
        return engine.sync_id, engine.version

    busy = EndingEngine()
    busy.batch_queue = [1, 2]
    for vllm in (EndingEngine(), busy):
        assert asyncio.run(sync(around(vllm))) == (4, 3)
    kept = around(EndingEngine(reset=False))
    with pytest.raises(RuntimeError, match="vLLM has not emptied its prefix cache"):
        asyncio.run(sync(kept))
    assert (kept.sync_id, kept.version) == (3, 2)


class Adapted(BaseLayerWithLoRA):
    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base


def test_weights_of_adapted_layers_are_loaded_under_the_names_of_a_model_without_adapters():
    model = torch.nn.Sequential(Adapted(torch.nn.Linear(1, 1)), torch.nn.ModuleList([Adapted(torch.nn.Linear(1, 1))]))
    adapted = list(model.state_dict())
    assert all(".base_layer." in name for name in adapted)
    places = unwrap_adapted_layers(model)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    wrap_adapted_layers(places)
    assert list(model.state_dict()) == adapted and not places


def test_the_users_own_level_of_vllms_log_stays(monkeypatch):
    rollout = SimpleNamespace(dtype="bfloat16")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert vllm_environment(rollout)["VLLM_LOGGING_LEVEL"] == "WARNING"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert vllm_environment(rollout)["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_float32_products_are_exact_in_triton():
    assert vllm_environment(SimpleNamespace(dtype="float32"))["TRITON_F32_DEFAULT"] == "ieee"
    assert "TRITON_F32_DEFAULT" not in vllm_environment(SimpleNamespace(dtype="bfloat16"))


def test_segments_are_unlinked_although_another_child_has_ended():
    ended = subprocess.Popen(["true"])
    while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    code = "from multiprocessing import shared_memory\nsegment = shared_memory.SharedMemory(create=True, size=1)\n"
    code += "print(segment.name, flush=True)\ninput()"
    maps = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    segment = Path("/dev/shm", required(maps.stdout).readline().strip())
    assert segment.exists()
    unlink_segments()
    assert not segment.exists()
    maps.communicate("\n")
    ended.wait()


@pytest.mark.parametrize("limit", [None, 2])
def test_vllm_reserves_room_for_the_pictures_of_a_prompt_and_none_without_any(tmp_path, limit):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    path = write_model_that_sees(tmp_path / "model")
    keys = [f"data.train_files={tmp_path}/rows.jsonl", f"actor_rollout_ref.model.path={path}"]
    section = load_ppo_config(keys).actor_rollout_ref
    section.rollout.limit_images = limit
    arguments = vllm_arguments("cpu", section.model, section.rollout, 1)
    assert arguments["limit_mm_per_prompt"] == {"image": limit or 0, "video": 0}
