"""Sends generated requests to the endpoint, valid ones with hostile values in some fields, in all four forms:

python scripts/benchmark/fuzz_endpoint.py [serve] [run] [http://HOST:PORT] [--count N] [--seed N] [--out DIR]

`serve` and `run` start the quickstart's untrained model behind hybridrl.serve, and as a run with agents outside of it,
whose episodes the requests take; an address is an endpoint that is already there. Prints the statuses of each form.
Exits with status 1 if a request was answered with 500 or above, or not at all, if the policy is dead afterwards, or if
the run does not end well.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from side_by_side import Arguments
from warm_start import TOP, make_data

from hybridrl.required import required

ADMIN_KEY, PORT = "fuzz", 8431
READY_SECONDS, EPISODE_REQUESTS, AT_A_TIME = 600, 20, 8
STEP_EPISODES, EPISODES_AT_A_TIME = 8, 4  # of a run
JSON = {"Content-Type": "application/json"}
USER, CALL = {"role": "user", "content": "What is 1+2?"}, {"name": "look", "arguments": '{"word": "a"}'}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]}
LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a", "cache_control": {}}]}
MESSAGES = [USER, CALLED, {"role": "tool", "tool_call_id": "1", "content": "3"}, {"role": "system", "content": "Add."}]
MESSAGES += [NAMED]

texts = st.text(max_size=20) | st.sampled_from(
    ["", "\ud83d", "\0", "<|im_end|>", "[" * 2000, "a" * 3000, "NaN", "1e999"]
)
numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 2**31, 2**63, 2**70, 10**400, 1e308])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
# Values of which most are valid, by field.
SHARED = {
    "model": texts,
    "n": st.integers(0, 2),
    "stop": st.lists(texts, max_size=3) | texts,
    "stop_token_ids": st.lists(st.integers(-1, 600), max_size=3),
    "temperature": st.floats(0, 2.1),
    "top_p": st.floats(0, 1.1),
    "top_k": st.integers(-2, 600),
    "min_p": st.floats(0, 1.1),
    "seed": st.integers(-(2**64), 2**64),
    "presence_penalty": st.floats(-2.1, 2.1),
    "frequency_penalty": st.floats(-2.1, 2.1),
    "repetition_penalty": st.floats(0, 3),
    "max_tokens": st.integers(0, 30),
    "min_tokens": st.integers(0, 30),
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "return_token_ids": st.booleans(),
    "user": texts,
    "metadata": st.dictionaries(texts, texts, max_size=2) | st.fixed_dictionaries({"session_id": values}),
    "logprobs": st.booleans() | st.integers(-1, 2),
    "store": st.booleans(),
    "logit_bias": st.just({"5": 100}),
}
messages = st.lists(st.sampled_from(MESSAGES) | values, min_size=1, max_size=4)
FORMATS = st.sampled_from([{"type": "json_object"}, {"type": "json_schema", "schema": SCHEMA}, {"type": "text"}])
CHAT_FORMATS = FORMATS | st.just({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}})
TOOLS = st.lists(
    st.sampled_from([LOOK, {"type": "function"} | LOOK, {"type": "function", "function": LOOK | {"strict": True}}]),
    max_size=2,
)
CHOICES = st.sampled_from(["auto", "none", "required", {"type": "any"}, {"type": "function", "name": "look"}])
ITEMS = [USER, {"type": "function_call", "call_id": "1", **CALL}, {"type": "reasoning"}]
ITEMS += [{"type": "function_call_output", "call_id": "1", "output": "3"}]
BLOCKS = [{"type": "tool_use", "id": "1", "name": "look", "input": {}}, {"type": "text", "text": "a"}]
FAILED = [{"type": "tool_result", "tool_use_id": "1", "content": "no file", "is_error": True}]
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        {"messages": [USER]},
        {
            "messages": messages,
            "tools": TOOLS,
            "tool_choice": CHOICES,
            "response_format": CHAT_FORMATS,
            "max_completion_tokens": st.integers(0, 30),
            "chat_template_kwargs": st.dictionaries(texts | st.just("tools"), values, max_size=2),
        },
    ),
    "/v1/completions": (
        {"prompt": "What is 1+2?"},
        {"prompt": st.lists(st.integers(-1, 10**4), max_size=5) | st.lists(texts, max_size=2), "echo": st.booleans()},
    ),
    "/v1/responses": (
        {"input": [USER]},
        {
            "input": st.lists(st.sampled_from(ITEMS) | values, max_size=4) | texts,
            "instructions": texts,
            "tools": TOOLS,
            "tool_choice": CHOICES,
            "text": st.fixed_dictionaries({"format": FORMATS | values}),
            "max_output_tokens": st.integers(0, 30),
        },
    ),
    "/v1/messages": (
        {"messages": [USER], "max_tokens": 8},
        {
            "messages": messages
            | st.just([{"role": "assistant", "content": BLOCKS}, {"role": "user", "content": FAILED}]),
            "system": texts | st.just([{"type": "text", "text": "Add."}]),
            "tools": st.lists(st.just({"name": "look", "input_schema": {"type": "object"}}), max_size=2),
            "tool_choice": CHOICES,
            "stop_sequences": st.lists(texts, max_size=3),
            "output_config": st.fixed_dictionaries({"format": FORMATS | values}),
        },
    ),
}


@st.composite
def contents(draw: st.DrawFn, path: str) -> bytes:
    """Draw the body of a request: a valid one with up to five fields changed, at times cut off or with a byte more."""
    valid, own = FORMS[path]
    fields, body = SHARED | own, valid | {"max_tokens": 8}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True)):
        body[name] = draw(fields[name] if draw(st.integers(0, 3)) else values)
    if not draw(st.integers(0, 9)):
        body[draw(texts)] = draw(values)
    content = json.dumps(body).encode()
    if not draw(st.integers(0, 19)):
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.binary(max_size=2)) + content[at + draw(st.integers(0, 3)) :]
    return content


class Episodes:
    """The keys of a run's episodes, one after another: each serves for some requests, gets a reward and is ended."""

    def __init__(self, http: httpx.Client) -> None:
        self.http, self.key, self.requests, self.lock = http, "", 0, Lock()

    def headers(self) -> dict[str, str] | None:
        """Return the headers of a request, None if no episode waits: others have to end, or the policy is trained."""
        with self.lock:
            if self.requests % EPISODE_REQUESTS == 0:
                self.end()
                self.key = self.taken()
            self.requests += bool(self.key)
            return JSON | {"Authorization": f"Bearer {self.key}"} if self.key else None

    def taken(self) -> str:
        reply = self.http.post("/rl/start_session", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        return "" if reply.status_code == 429 else reply.raise_for_status().json()["api_key"]

    def end(self) -> None:
        own = {"Authorization": f"Bearer {self.key}"}
        if self.key:
            self.http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 4}, headers=own)
            self.http.post("/rl/set_reward", json={"reward": 1}, headers=own)
            self.http.post("/rl/end_session", headers=own)
            self.key = ""


def fuzz(address: str, count: int, seed: int, *, episodes: bool = False) -> list[str]:
    """Send requests of each form; returns what went wrong."""
    wrong: list[str] = []
    with httpx.Client(base_url=address, timeout=300, trust_env=False) as http:
        open_ones = [Episodes(http) for _ in range(EPISODES_AT_A_TIME)] if episodes else []
        free: Queue[Episodes] = Queue()
        for one in open_ones * (AT_A_TIME // EPISODES_AT_A_TIME):
            free.put(one)
        for path in FORMS:
            wrong += fuzz_form(http, path, count, seed, free if episodes else None)
        for one in open_ones:
            one.end()
        if (health := http.get("/health")).status_code != 200:
            wrong.append(f"/health: {health.text}")
    return wrong


def fuzz_form(http: httpx.Client, path: str, count: int, seed: int, free: "Queue[Episodes] | None") -> list[str]:
    """Send requests of one form, some at a time."""
    bodies: list[bytes] = []

    @seeded(seed)
    @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(contents(path))
    def draw(content: bytes) -> None:
        bodies.append(content)

    def send(content: bytes) -> tuple[int, str]:
        while True:
            episodes = free.get() if free else None
            try:
                headers = episodes.headers() if episodes else JSON
                if headers:
                    reply = http.post(path, content=content, headers=headers)
                    return reply.status_code, reply.text
            except httpx.HTTPError as error:
                return 0, repr(error)
            finally:
                if episodes:
                    required(free).put(episodes)

    draw()
    began = time.monotonic()
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        replies = list(threads.map(send, bodies))
    statuses = Counter(status for status, _ in replies)
    seconds = time.monotonic() - began
    print(f"{path}: {len(replies)} requests, {dict(sorted(statuses.items()))}, {seconds:.0f} s", flush=True)
    wrong = [(body, *reply) for body, reply in zip(bodies, replies, strict=True) if not 0 < reply[0] < 500]
    return [f"{path} {body[:400]!r}: {status} {text[:400]}" for body, status, text in wrong]


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """Start a part of hybridrl, and wait until its endpoint responds."""
    with log.open("w") as file:
        environment = os.environ | {"HYBRIDRL_ADMIN_KEY": ADMIN_KEY}
        process = subprocess.Popen([sys.executable, "-m", *command], cwd=TOP, stdout=file, stderr=file, env=environment)
    try:
        for _ in range(READY_SECONDS):
            try:
                httpx.get(f"http://127.0.0.1:{PORT}/health", trust_env=False)
                break
            except httpx.HTTPError:
                if process.poll() is not None:
                    sys.exit(f"it ended before it served:\n{log.read_text()[-3000:]}")
                time.sleep(1)
        yield process
    finally:
        process.terminate()
        process.wait(60)


def fuzz_serve(model: Path, arguments: argparse.Namespace) -> list[str]:
    command = ["hybridrl.serve", f"model.path={model}/model", f"port={PORT}", "device=cpu"]
    with started(command, arguments.out / "serve.log") as process:
        wrong = fuzz(f"http://127.0.0.1:{PORT}", arguments.count, arguments.seed)
        return wrong + ([f"it ended with status {process.returncode}"] if process.poll() is not None else [])


def fuzz_run(model: Path, arguments: argparse.Namespace) -> list[str]:
    """Fuzz a run which ends once all its episodes have."""
    episodes = len(FORMS) * arguments.count // EPISODE_REQUESTS + EPISODES_AT_A_TIME
    values = {
        "data.train_files": f"{model}/train.jsonl",
        "data.val_files": "null",
        "data.train_batch_size": STEP_EPISODES // 2,
        "data.max_response_length": 400,
        "actor_rollout_ref.model.path": f"{model}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.max_num_seqs": 8,
        "actor_rollout_ref.rollout.agent.mode": "online",
        "actor_rollout_ref.rollout.agent.port": PORT,
        "trainer.device": "cpu",
        "trainer.logger": "[console]",
        "trainer.total_training_steps": -(-episodes // STEP_EPISODES),
        "trainer.default_local_dir": arguments.out / "run",
    }
    quickstart = ["hybridrl.main_ppo", "--config-path", "recipes/quickstart", "--config-name", "train"]
    with started(
        [*quickstart, *(f"{key}={value}" for key, value in values.items())], arguments.out / "run.log"
    ) as process:
        wrong = fuzz(f"http://127.0.0.1:{PORT}", arguments.count, arguments.seed, episodes=True)
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=300, trust_env=False) as http:
            rest = Episodes(http)
            while process.poll() is None:
                try:
                    rest.key = rest.taken()
                    rest.end()
                except httpx.HTTPError:  # the run has ended
                    time.sleep(1)
        return wrong + ([f"the run ended with status {process.returncode}"] if process.returncode else [])


def main() -> int:
    parser = Arguments(__doc__, count=8)
    parser.add_argument("targets", nargs="*", default=["serve", "run"], help="serve, run, or an address")
    parser.add_argument("--count", type=int, default=2000, help="requests of each form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=TOP / "outputs" / "fuzz")
    arguments = parser.parse_args()
    arguments.out = arguments.out.absolute()
    model, wrong = arguments.out / "data", []
    if {"serve", "run"} & {*arguments.targets} and not model.is_dir() and not make_data(0, arguments.out):
        sys.exit("the model could not be made")
    for target in arguments.targets:
        print(target, flush=True)
        start = {"serve": fuzz_serve, "run": fuzz_run}.get(target)
        wrong += start(model, arguments) if start else fuzz(target, arguments.count, arguments.seed)
    print(*wrong[:20], f"{len(wrong)} faults", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
