"""Environments, agent loops and an agent for tests, some with real engines; loaded by path in processes of episodes.

Echo, EchoLoop and echo are one loop in three forms: the policy reads what it said, and responds again.
"""

from hybridrl.compat.verl.loops import AgentLoopBase, AgentLoopOutput
from hybridrl.environments import Environment, Step

TURNS, REWARD = 3, 0.5  # unless the row has its own


class OneResponse(Environment):
    """Ends after one response and gives no reward."""

    def step(self, response):
        return Step(done=True)


class Echo(Environment):
    def step(self, response):
        if response.turn + 1 == self.row.get("turns", TURNS):
            return Step(done=True, reward=self.row.get("reward", REWARD))
        return Step([{"role": "user", "content": f"You said {response.text}"}])


class EchoLoop(AgentLoopBase):
    async def run(self, sampling_params, **row):
        messages, mask, log_probs = list(row["raw_prompt"]), [], []
        prompt = ids = await self.ct_build_initial_tokens(messages)
        turns = row.get("turns", TURNS)
        for turn in range(turns):
            output = await self.server_manager.generate("1", prompt_ids=ids, sampling_params=sampling_params)
            sampled = output.token_ids, output.log_probs
            merged, mask, log_probs = await self.ct_merge_assistant_token(ids, sampled[0], mask, log_probs, sampled[1])
            ids, text = merged.token_ids, self.tokenizer.decode(output.token_ids[:-1], skip_special_tokens=True)
            before = messages = [*messages, {"role": "assistant", "content": text}]
            if turn + 1 < turns:
                messages = [*messages, {"role": "user", "content": f"You said {text}"}]
                merged, mask, log_probs = await self.ct_merge_non_assistant_msg(before, messages, ids, mask, log_probs)
                ids = merged.token_ids
        fields = {"prompt_ids": prompt, "response_ids": ids[len(prompt) :], "response_mask": mask}
        reward = row.get("reward", REWARD)
        return AgentLoopOutput(**fields, response_logprobs=log_probs, reward_score=reward, num_turns=2, metrics={})


async def echo(data, *, base_url, api_key, http_client):
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    messages = list(data["messages"])
    for _ in range(data.get("turns", TURNS)):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"You said {text}"}]
    return data.get("reward", REWARD)


class Counter(AgentLoopBase):
    """Continues its context by itself: so many turns of so many tokens, with two observed tokens in between."""

    def __init__(self, *args, turns, tokens, **kwargs):
        super().__init__(*args, **kwargs)
        self.turns, self.tokens = turns, tokens

    async def run(self, sampling_params, **row):
        prompt, context, mask = [5, 6, 7], [5, 6, 7], []
        for number in range(self.turns_of(row)):
            if number:
                context, mask = [*context, 10 + number, 20 + number], [*mask, 0, 0]
            short = {**sampling_params, "max_tokens": self.tokens}
            turn = await self.server_manager.generate(request_id="a", prompt_ids=context, sampling_params=short)
            context, mask = context + turn.token_ids, mask + [1] * len(turn.token_ids)
        ids = context[len(prompt) :]
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=mask, reward_score=1.0, metrics={})

    def turns_of(self, row):
        return self.turns


class Uneven(Counter):
    """From one to so many turns, by the row's place in the data."""

    def turns_of(self, row):
        return 1 + row["index"] % self.turns
