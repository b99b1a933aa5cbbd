"""Environments of scripts/benchmark/episodes.py, whose steps only wait: in a coroutine, and in a plain function."""

import asyncio
import time

from hybridrl.environments import Environment, Step


class Talk(Environment):
    async def step(self, response):
        await asyncio.sleep(self.config["seconds"])
        if response.turn + 1 == self.config["turns"]:
            return Step(done=True, reward=1.0)
        return Step([{"role": "user", "content": "more"}])


class Sleep(Environment):
    def step(self, response):
        time.sleep(self.config["seconds"])
        return Step([{"role": "user", "content": "more"}], done=response.turn + 1 == self.config["turns"])
