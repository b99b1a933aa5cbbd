"""Environments and an agent loop for tests with real engines; loaded by path in the processes of episodes."""

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from hybridrl.environments import Environment, Step


class OneResponse(Environment):
    """Ends after one response and gives no reward."""

    def step(self, response):
        return Step(done=True)


class Counter(AgentLoopBase):
    """Continues its context by itself: so many turns of so many tokens, with two observed tokens in between."""

    def __init__(self, *args, turns, tokens, **kwargs):
        super().__init__(*args, **kwargs)
        self.turns, self.tokens = turns, tokens

    async def run(self, sampling_params, **_):
        prompt, context, mask = [5, 6, 7], [5, 6, 7], []
        for number in range(self.turns):
            if number:
                context, mask = [*context, 10 + number, 20 + number], [*mask, 0, 0]
            short = {**sampling_params, "max_tokens": self.tokens}
            turn = await self.server_manager.generate(request_id="a", prompt_ids=context, sampling_params=short)
            context, mask = context + turn.token_ids, mask + [1] * len(turn.token_ids)
        ids = context[len(prompt) :]
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=mask, reward_score=1.0, metrics={})
