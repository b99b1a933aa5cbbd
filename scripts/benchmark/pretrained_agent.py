"""An agent of two turns for pretrained.py: it asks for a capital, and once more after a wrong answer."""

from typing import Any

import httpx
from openai import AsyncOpenAI


async def run(data: dict[str, Any], *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float:
    """Return 1 for the right name in the first answer, half for one in the second."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    messages = list(data["messages"])
    for reward in (1.0, 0.5):
        response = await client.chat.completions.create(model="policy", messages=messages)
        text = response.choices[0].message.content or ""
        if text.strip().startswith(data["reward_model"]["ground_truth"].split("/")[0]):
            return reward
        again = {"role": "user", "content": f"No. Only the name: {data['messages'][-1]['content']}"}
        messages += [{"role": "assistant", "content": text}, again]
    return 0.0
