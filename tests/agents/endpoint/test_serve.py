"""The command that serves a model: its keys, its messages, and one real server."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import psutil
import pytest
from transformers import AutoTokenizer

from hybridrl.agents.endpoint import bound, local, serve
from hybridrl.agents.endpoint.app import create_app
from hybridrl.agents.endpoint.sessions import AgentSessions
from hybridrl.config import ConfigError
from hybridrl.core.rollout import Completion, Request
from tests.agents.endpoint.conftest import Script
from tests.vision_models import noise_picture, write_model_that_sees

ROOT = Path(__file__).parents[3]
READY_SECONDS = 180


def test_keys_are_the_commands_own_and_those_of_a_run(tiny):
    own, section = serve.read_arguments([f"model.path={tiny}", "port=9", "rollout.max_num_seqs=3"])
    assert own == {"port": "9", "host": "127.0.0.1", "served_model_name": "policy", "device": "auto"}
    assert (section.model.path, section.rollout.max_num_seqs, section.rollout.top_p) == (str(tiny), 3, 1.0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model.path=/not/there"], "actor_rollout_ref.model.path=/not/there"),
        (["rollout.max_num_seqs=0"], "rollout.max_num_seqs=0"),
        (["rollout.max_seqs=3"], "unknown key rollout.max_seqs; nearest: actor_rollout_ref.rollout.max_num_seqs"),
        (["prot=3"], "unknown key prot; did you mean port?"),
        (["serve_model_name=a"], "unknown key serve_model_name; did you mean served_model_name?"),
        (["port=web"], "port=web must be a number from 0 to 65535; set port=8000"),
        (["port=99999"], "port=99999 must be a number from 0 to 65535; set port=8000"),
        (["port=-1"], "port=-1 must be a number from 0 to 65535"),
        (["device=gpu"], "device=gpu: choose auto | cpu | cuda"),
        (["host="], "host= is empty; set host=127.0.0.1"),
        (["rollout.temperature=inf"], "rollout.temperature=inf: must be finite"),
        (["port=8000"], "model.path"),
    ],
)
def test_what_cannot_be_served_is_rejected_by_key_and_value(tiny, arguments, expected):
    model = [] if "model" in expected else [f"model.path={tiny}"]
    with pytest.raises(ConfigError, match=re.escape(expected)):
        serve.read_arguments([*model, *arguments])


def test_an_adapter_is_checked_by_its_base_model_and_merged_from_its_own_path(tiny, tmp_path):
    adapter = tmp_path / "an adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny), "r": 4}))
    (adapter / "adapter_model.safetensors").touch()
    _, section = serve.read_arguments([f"model.path='{adapter}'", "rollout.max_num_seqs=3"])
    assert (section.model.path, section.rollout.max_num_seqs) == (str(adapter), 3)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"{tmp_path}/gone"}))
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}/gone"):
        serve.read_arguments([f"model.path='{adapter}'"])
    (adapter / "adapter_config.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"model.path=.*an adapter: adapter_config.json cannot be read"):
        serve.read_arguments([f"model.path='{adapter}'"])


def test_a_key_of_verl_without_effect_is_a_warning(tiny, capsys):
    serve.read_arguments([f"model.path={tiny}", "rollout.expert_parallel_size=2"])
    expected = "warning: actor_rollout_ref.rollout.expert_parallel_size has no effect: there is one engine"
    assert capsys.readouterr().err.startswith(expected)


def test_without_arguments_the_usage_is_printed(capsys):
    assert serve.main([]) == serve.EXIT_REJECTED and serve.main(["--help"]) == 0
    assert "served_model_name=policy" in capsys.readouterr().out


class DyingEngine:
    """An engine, with what RolloutEngine has and serving needs, that is dead once it was asked for a response."""

    dead = False

    async def connect(self) -> None:
        return None

    async def generate(self, request: Request) -> Completion:
        self.dead = True
        raise RuntimeError("the engine is dead: no memory")

    async def check(self) -> int:
        if self.dead:
            raise RuntimeError("the engine is dead: no memory")
        return 0


async def test_serving_ends_with_a_sentence_and_a_status_once_the_engine_is_dead(tiny, monkeypatch, capfd):
    listening = bound("127.0.0.1", 0)
    port = listening.getsockname()[1]
    _, section = serve.read_arguments([f"model.path={tiny}"])
    entry = SimpleNamespace(build=lambda *_: DyingEngine())

    options = {"host": "127.0.0.1", "listening": listening, "name": "policy", "source": "tiny"}
    serving = asyncio.create_task(local.serve(entry, section.model, section.rollout, "cpu", **options))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        while True:
            try:
                assert (await http.get("/health")).status_code == 200
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.1)
        headers = {"Authorization": "Bearer anything"}
        assert (await http.post("/rl/start_session", json={"task_id": "1"}, headers=headers)).status_code == 401
        await asyncio.sleep(3 * local.CHECK_SECONDS)  # without a request it goes on
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 500
        assert (await http.get("/health")).status_code == 503
    cause = await asyncio.wait_for(serving, 30)
    monkeypatch.setattr(serve, "run", lambda *_: cause)
    assert serve.main([f"model.path={tiny}"]) == serve.EXIT_FAILED
    printed = capfd.readouterr()
    assert "error: serving ended: the engine is dead: no memory" in printed.err
    assert "admin" not in printed.out  # nobody wanted sessions


@pytest.mark.parametrize(("route", "field"), [("chat/completions", "messages"), ("responses", "input")])
async def test_a_model_without_a_chat_template_continues_texts_and_answers_a_chat_with_one_sentence(
    with_template, route, field
):
    model = with_template(None)
    tokenizer = AutoTokenizer.from_pretrained(model)
    _, section = serve.read_arguments([f"model.path={model}"])
    script = Script(tokenizer, ["7"])
    app = create_app(script, AgentSessions(local.make_kit(section.model, section.rollout)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        reply = await http.post("/v1/completions", json={"prompt": "1+6="})
        assert reply.json()["choices"][0]["text"] == "7", reply.text
        reply = await http.post(f"/v1/{route}", json={field: [{"role": "user", "content": "a"}]})
    expected = (
        "the chat template rejects these messages: the model has none, which is needed for all but /v1/completions; "
    )
    key = "actor_rollout_ref.model.custom_chat_template"
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, f"{expected}set {key}")
    assert serve.read_arguments([f"model.path={model}", f"{key}=chatml"])[1].model.custom_chat_template == "chatml"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "port={port}: 127.0.0.1:{port} cannot be used (Address already in use); set another port"),
        ({"host": "no.such.host.invalid"}, "host=no.such.host.invalid is not an address of this machine"),
        ({"host": "192.0.2.1"}, "host=192.0.2.1 is not an address of this machine"),
    ],
)
def test_an_address_that_cannot_be_used_is_rejected_before_the_model_is_read(tiny, monkeypatch, capsys, keys, message):
    def read(*_: object) -> str:
        raise AssertionError("the model was read")

    monkeypatch.setattr(serve, "whole_model", read)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        keys = [f"{key}={value}" for key, value in ({"port": port} | keys).items()]
        assert serve.main([f"model.path={tiny}", *keys]) == serve.EXIT_REJECTED
    assert f"error: {message.format(port=port)}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_served_model_responds_repeatably_and_ctrl_c_leaves_nothing(tiny, tmp_path):
    arguments = [f"model.path={tiny}", "port=0", "device=cpu", "rollout.max_num_seqs=4"]
    log, environment = tmp_path / "log", os.environ | {"TMPDIR": str(tmp_path)}
    with log.open("w") as file:
        command = [sys.executable, "-m", "hybridrl.serve", *arguments]
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=ROOT, start_new_session=True)
    try:
        address = wait_for(log, r"http://\S+/v1", server)
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        ask = {"model": "policy", "messages": [{"role": "user", "content": "What is 1+2?"}], "max_tokens": 12}
        greedy = [client.chat.completions.create(**ask, temperature=0).choices[0] for _ in range(2)]
        seeds = (1, 1, 2)
        sampled = [client.chat.completions.create(**ask, seed=seed).choices[0].message.content for seed in seeds]
        shape = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        format = {"type": "json_schema", "json_schema": {"name": "shape", "schema": shape}}
        shaped = client.chat.completions.create(**ask | {"max_tokens": 60}, response_format=format, temperature=0)
        started = psutil.Process(server.pid).children(recursive=True)
        body = {"prompt": [5, 6, 7], "max_tokens": 400, "min_tokens": 400}
        with ThreadPoolExecutor(16) as pool:  # more than the engine computes in this time
            waiting = [pool.submit(httpx.post, f"{address}/completions", json=body, timeout=60) for _ in range(16)]
            time.sleep(0.5)
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0, log.read_text()
    finally:
        server.kill()
    assert 503 in [one.result().status_code for one in waiting if not one.exception()]
    assert "Traceback" not in log.read_text()
    assert greedy[0].message.content == greedy[1].message.content and greedy[0].finish_reason == "length"
    assert sampled[0] == sampled[1] != sampled[2]
    assert json.loads(shaped.choices[0].message.content)["a"] in (1, 2)
    left = psutil.wait_procs(started, timeout=5)[1]
    assert started and not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]


def wait_for(log: Path, pattern: str, process: subprocess.Popen) -> str:
    for _ in range(READY_SECONDS * 2):
        if found := re.search(pattern, log.read_text()):
            return found[0].rstrip(",")
        assert process.poll() is None, log.read_text()
        time.sleep(0.5)
    raise AssertionError(log.read_text())


def kit_of_served(model: Path, *keys: str):
    _, section = serve.read_arguments([f"model.path={model}", *keys])
    return local.make_kit(section.model, section.rollout), section.rollout


def test_a_model_that_sees_is_served_with_pictures_as_its_engine_makes_them(tmp_path):
    model = write_model_that_sees(tmp_path)
    picture = BytesIO()
    noise_picture(128, 96).save(picture, "PNG")

    def tokens(*keys: str) -> tuple[int | None, int | None, int]:
        kit, rollout = kit_of_served(model, *keys)
        shown = kit.reader and kit.reader.shown(picture.getvalue()).tokens
        return shown, rollout.limit_images, kit.limits.pictures

    assert tokens() == (12, 16, 16)  # of 32 x 32 pixels each
    assert tokens("rollout.limit_images=3") == (12, 3, 3)
    assert tokens("rollout.limit_images=0") == (None, 0, 0)
    assert tokens("rollout.engine_kwargs.vllm.mm_processor_kwargs={max_pixels: 4096}")[0] == 2
    with pytest.raises(ConfigError, match=r"vllm.mm_processor_kwargs.max_pixel: .* did you mean max_pixels"):
        tokens("rollout.engine_kwargs.vllm.mm_processor_kwargs={max_pixel: 4096}")
    (model / "preprocessor_config.json").unlink()
    assert tokens() == (None, 0, 0)  # it is served for text
    with pytest.raises(ConfigError, match=r"limit_images=2: .*the model's processor of pictures cannot be loaded"):
        tokens("rollout.limit_images=2")


def test_a_model_of_text_is_served_without_pictures(tiny):
    kit, rollout = kit_of_served(tiny)
    assert (kit.reader, kit.limits.pictures, rollout.limit_images) == (None, 0, 0)
    with pytest.raises(ConfigError, match="limit_images=2: models of type qwen2 get text only"):
        kit_of_served(tiny, "rollout.limit_images=2")
