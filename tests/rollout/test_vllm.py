"""What hybridrl adds to vLLM's own calls, with stand-ins for the engine and the model."""

import asyncio

import torch
from vllm.lora.layers import BaseLayerWithLoRA

from hybridrl.rollout.vllm.adapter import put_back, put_base_layers
from hybridrl.rollout.vllm.engine import PARTS, VllmEngine


class OldEngine:
    """Sleeps as vLLM 0.26 does: only where it is wholly awake."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()

    async def sleep(self, level: int) -> None:
        if not self.asleep:
            self.asleep = set(PARTS)

    async def wake_up(self, tags: list[str]) -> None:
        self.asleep -= set(tags)


def test_an_engine_that_has_its_weights_alone_goes_to_sleep_wholly():
    engine = VllmEngine.__new__(VllmEngine)
    engine.engine, engine.sleeps, engine.adapted, engine.asleep = OldEngine(), True, False, frozenset()

    async def sleep_after(*parts: str) -> set[str]:
        for part in parts:
            await engine.wake(part)
        await engine.sleep()
        return engine.engine.asleep

    for parts in ([], ["weights"], ["weights", "kv_cache"], [], ["weights"]):
        assert asyncio.run(sleep_after(*parts)) == PARTS


class Adapted(BaseLayerWithLoRA):
    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base


def test_weights_of_adapted_layers_are_loaded_under_the_names_of_a_model_without_adapters():
    model = torch.nn.Sequential(Adapted(torch.nn.Linear(1, 1)), torch.nn.ModuleList([Adapted(torch.nn.Linear(1, 1))]))
    adapted = list(model.state_dict())
    assert all(".base_layer." in name for name in adapted)
    places = put_base_layers(model)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    put_back(places)
    assert list(model.state_dict()) == adapted and not places
