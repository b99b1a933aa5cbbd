"""Environments for tests with real engines; loaded by path in the processes of episodes."""

from dataclasses import replace

from hybridrl.environments import Environment, Step
from hybridrl.environments.episode import Trajectory, Turn

TURNS, TOKENS = 8, 3


class OneResponse(Environment):
    """Ends after one response and gives no reward."""

    def step(self, response):
        return Step(done=True)


class Counter(Environment):
    """An agent that continues its context by itself: eight turns of a few tokens, with what it observes in between."""

    async def run(self, policy, messages):
        observed, context, turns = [5, 6, 7], [], []
        for number in range(TURNS):
            context += observed
            completion = await policy.generate(context, max_tokens=TOKENS)
            context += completion.token_ids.tolist()
            turns.append(replace(Turn.of(observed, completion), reward=float(number)))
            observed = [10 + number, 20 + number]
        return Trajectory(turns, "completed", text="", reward=1.0)
