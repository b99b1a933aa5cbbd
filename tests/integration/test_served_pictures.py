"""A served model that sees: what a client gets for a picture, against transformers' own forward pass."""

import base64
import os
import subprocess
import sys
from io import BytesIO

import numpy as np
import openai
import pytest

from hybridrl.core.pictures import expanded
from hybridrl.core.rollout import Request
from tests.agents.endpoint.test_serve import ROOT, wait_for
from tests.integration.test_engine_pictures import SAMPLING, Prompts
from tests.vision_models import noise_picture, write_model_that_sees

pytestmark = pytest.mark.slow

TWO = (noise_picture(75, 41, 1), noise_picture(64, 64, 2))


def urls() -> list[str]:
    files = [BytesIO() for _ in TWO]
    for file, picture in zip(files, TWO, strict=True):
        picture.save(file, "PNG")
    return [f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}" for file in files]


def test_a_served_model_samples_from_what_transformers_computes_for_the_pictures_of_a_request(tmp_path):
    path = write_model_that_sees(tmp_path / "model")
    prompts, log = Prompts(path, "qwen3_vl"), tmp_path / "log"
    arguments = [f"model.path={path}", "port=0", "device=cpu", "rollout.max_num_seqs=2", "rollout.max_model_len=512"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with log.open("w") as file:
        command = [sys.executable, "-m", "hybridrl.serve", *arguments]
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=ROOT, start_new_session=True)
    try:
        client = openai.OpenAI(base_url=wait_for(log, r"http://\S+/v1", server), api_key="none", max_retries=0)
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls()]
        content = [parts[0], {"type": "text", "text": "and"}, parts[1], {"type": "text", "text": "?"}]
        options = {"model": "policy", "max_tokens": 24, "logprobs": True, "extra_body": {"return_token_ids": True}}
        answers = [
            client.chat.completions.create(messages=[{"role": "user", "content": shown}], **options)
            for shown in (content, [parts[1], *content[1:]], "and?")
        ]
        with pytest.raises(openai.BadRequestError, match="at most 16 pictures"):
            client.chat.completions.create(messages=[{"role": "user", "content": parts * 9}], **options)
    finally:
        server.kill()
    for answer, shown in zip(answers, (TWO, [TWO[1], TWO[1]], []), strict=True):
        pixels = [prompts.pixels_of(picture) for picture in shown]
        added = [prompts.store.add(each, int(each["image_grid_thw"].prod()) // 4) for each in pixels]
        choice, whole = answer.choices[0], answer.model_extra["prompt_token_ids"]
        single = [token for at, token in enumerate(whole) if token != prompts.placeholder or whole[at - 1] != token]
        prompt = expanded(single, prompts.placeholder, added)
        assert prompt.ids == whole
        request = Request(0, 0, whole, 7, SAMPLING, carried=prompt.carried)
        sampled = np.array([entry.logprob for entry in choice.logprobs.content])
        token_ids = np.array(choice.model_extra["token_ids"])
        handles = dict(prompts.store.handles(picture.digest for picture in added))
        expected, _ = prompts.log_probs(path, (request, handles), token_ids)
        assert np.abs(sampled - expected).max() < 1e-4
