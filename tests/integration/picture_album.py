"""An environment, and an agent, that show another picture after each response."""

import base64
from io import BytesIO

import numpy as np
from PIL import Image

from hybridrl.environments import Environment, Response, Step


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


class Album(Environment):
    """Three turns; every second row sees the same picture again instead of another one."""

    def step(self, response: Response) -> Step:
        if response.turn == 2:
            return Step(reward=float(len(response.text) % 3), done=True)
        seed = 7 * self.row["index"] + (response.turn if self.row["index"] % 2 else 0)
        parts = [{"type": "image", "image": noise(40 + 5 * response.turn, 60, seed)}, {"type": "text", "text": "Now?"}]
        return Step([{"role": "user", "content": parts}])


async def album(data, *, base_url, api_key, http_client):
    """Send the row's pictures as they are, and then others."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    messages, text = list(data["messages"]), ""
    for turn in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text, file = answer.choices[0].message.content, BytesIO()
        noise(40 + 5 * turn, 60, 7 * data["index"] + (turn if data["index"] % 2 else 0)).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Now?"}]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": parts}]
    return float(len(text) % 3)
