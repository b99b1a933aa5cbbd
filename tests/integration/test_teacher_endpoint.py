"""A teacher behind `hybridrl serve` against the same one in the training ranks, in whole runs."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hybridrl.core.experience.trajectory import Row, Turn
from hybridrl.runs.teachers import Teacher
from tests.agents.endpoint.test_serve import wait_for
from tests.integration.test_resume import victim
from tests.integration.test_run import finish, metrics, start
from tests.rewards.judge_server import Reply, serving
from tests.sections import teacher_of

pytestmark = pytest.mark.slow

ROWS, ANSWERED = 32, 8  # rows of a step, and how many of the second step are taught before the run is killed
LOSS, MODELS = "distillation.distillation_loss", "+distillation.teacher_models.one"


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory) -> Path:
    """A model with the policy's tokens and other weights."""
    path = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny / "model")).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def address(teacher, tmp_path_factory) -> Iterator[str]:
    """The address of the server."""
    directory = tmp_path_factory.mktemp("serve")
    log, environment = directory / "log", os.environ | {"TMPDIR": str(directory)}
    with log.open("w") as file:
        command = [sys.executable, "-m", "hybridrl.serve", f"model.path={teacher}", "port=0", "device=cpu"]
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        yield wait_for(log, r"http://\S+/v1", server)
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0, log.read_text()
    finally:
        server.kill()


@pytest.fixture
def arguments(overrides) -> Callable[..., list[str]]:
    def build(directory: Path, **more: object) -> list[str]:
        short = {"trainer.n_gpus_per_node": 1, "trainer.save_freq": 1, "distillation.enabled": True}
        contents = {"actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra]"}
        return overrides(directory, short | contents | more)

    return build


def test_a_served_model_gives_its_log_probs_of_a_row_and_its_most_probable_tokens(address, teacher):
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    ids = torch.randint(3, model.config.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    log_q = model(ids[None]).logits[0, 9:-1].log_softmax(-1).detach()  # of the tokens after ten
    prompt = ids[:10].tolist()
    row = Row(prompt, [Turn(prompt, ids[10:].numpy(), np.zeros(30), 0, "stop")])
    config = teacher_of(base_url=address, served_name="policy")
    own = torch.from_numpy(asyncio.run(Teacher("one", config, 0).values(row)))
    top = torch.from_numpy(asyncio.run(Teacher("one", config, 32).values(row)))
    expected, likeliest = log_q.gather(-1, ids[10:, None]).squeeze(-1), log_q.topk(32)
    torch.testing.assert_close(own.double(), expected, atol=1e-4, rtol=0)
    values = top[..., 1].contiguous().view(torch.float32).double()
    torch.testing.assert_close(values, likeliest.values, atol=1e-4, rtol=0)
    torch.testing.assert_close(log_q.gather(-1, top[..., 0].long()), values, atol=1e-4, rtol=0)  # as ids may be tied


@pytest.mark.drill
def test_a_run_that_is_killed_and_resumed_learns_what_the_teacher_in_the_ranks_teaches(
    address, teacher, arguments, tmp_path
):
    stalled, killed = False, False

    def forward(number: int, body: dict) -> Reply:
        nonlocal stalled
        if not killed and number > ROWS + ANSWERED:  # the first request is that of the check before the start
            stalled = True
            return Reply(fails="stall")
        reply = httpx.post(f"{address}/completions", json=body, timeout=60, trust_env=False)
        return Reply(status=reply.status_code, body=reply.text)

    near, far = tmp_path / "near", tmp_path / "far"
    in_ranks = {f"{MODELS}.model_path": teacher, f"{LOSS}.loss_mode": "k1", f"{LOSS}.use_policy_gradient": True}
    finish(start("main_ppo", arguments(near, **in_ranks)))
    with serving(forward) as server:
        process = start("main_ppo", arguments(far, **{f"{MODELS}.base_url": server.url}))
        while not stalled:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        time.sleep(1)
        before = len(server.requests)
        victim(process, "driver").kill()
        process.communicate(timeout=60)
        killed = True
        finish(start("main_ppo", arguments(far, **{f"{MODELS}.base_url": server.url})))
    assert len(server.requests) - before == 1 + ROWS - ANSWERED
    expected, actual = metrics(near), metrics(far)
    for step in (1, 2):
        for name in ("actor/distillation_loss", "distillation/kl", "actor/grad_norm", "response_length/mean"):
            assert actual[step][name] == pytest.approx(expected[step][name], rel=1e-4, abs=1e-4), (step, name)
    assert actual[1]["distillation/kl"] > 0.01
