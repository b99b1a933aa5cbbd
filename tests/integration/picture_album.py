"""An environment that shows another picture after each response, and a tool that returns a picture."""

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
