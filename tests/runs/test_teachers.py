"""Teachers behind an endpoint: what is requested, what reaches the batch, and what a failed request costs."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hybridrl.config import ConfigError
from hybridrl.config.teachers import DistillationConfig
from hybridrl.core.carried import TEACHER
from hybridrl.core.experience.batching import to_batch
from hybridrl.core.experience.collector import NothingToLearnFrom, SynchronousExperience
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.trajectory import EpisodeRequest, Trajectory, Turn
from hybridrl.data.prompts import Prompt, PromptDataset
from hybridrl.required import required
from hybridrl.rewards.score import FaultGuard
from hybridrl.runs.teachers import TaughtSource, check_endpoints
from tests.core.experience.test_collector import SAMPLING, Client, Scorers, build
from tests.core.experience.test_responses import Dying, Killed, spool
from tests.rewards.judge_server import Reply, serving
from tests.runs.test_contexts import contexts
from tests.sections import section_of, teacher_of

TABLE = [[0, 1, 1], [1, 0, 1]]
Body = dict[str, Any]


def log_prob(token: int, position: int) -> float:
    """The entry of a token in a reply, whose log-prob float32 holds exactly."""
    return -token / 8 - position / 64


def entries(ids: list[int]) -> list[Body | None]:
    tokens = enumerate(ids[1:], start=1)
    return [None, *({str(token): {"logprob": log_prob(token, at), "rank": 2}} for at, token in tokens)]


def answer(body: Body, change: Callable[[list], Any] = lambda table: table) -> Reply:
    """The reply to a request, of which the table was changed."""
    return Reply(body=json.dumps({"choices": [{"text": "", "prompt_logprobs": change(entries(body["prompt"]))}]}))


def section(url: str, **keys: Any) -> DistillationConfig:
    """A teacher behind this address."""
    one = {"key": None, "model_path": None, "base_url": url, "served_name": None, "api_key_env": None, **keys}
    return section_of(DistillationConfig, "distillation", enabled=True, teacher_models={"far": teacher_of(**one)})


def taught(url: str, table=TABLE, timeout: float = 5, retries: int = 0, **keys: Any) -> SynchronousExperience:
    """An experience whose responses are taught; `build` says what they are."""
    experience = build(table)
    experience.runner.taught = partial(TaughtSource, section(url, **keys), timeout=timeout, retries=retries)
    return experience


def test_the_batch_has_the_log_probs_of_each_rows_response(monkeypatch):
    monkeypatch.setenv("FAR_KEY", "secret-of-the-teacher")
    with serving(lambda _, body: answer(body)) as server:
        batch = taught(f"{server.url}/", served_name="big", api_key_env="FAR_KEY").collect(1).batch
    assert len(server.requests) == 6 and {each["path"] for each in server.requests} == {"/v1/completions"}
    one = server.requests[0]
    assert (one["model"], one["max_tokens"], one["prompt_logprobs"]) == ("big", 1, 0) and len(one["prompt"]) == 6
    assert server.headers[0]["Authorization"] == "Bearer secret-of-the-teacher"
    rows = batch.response_ids.view(6, 3).tolist()
    expected = [[log_prob(token, at) for at, token in enumerate(row, start=3)] for row in rows]
    assert torch.equal(required(batch.value("teacher_log_probs")), torch.tensor(expected).flatten())


def test_a_teacher_with_a_context_gets_it_in_place_of_the_prompt():
    """The rows of the first prompt have the column, those of the second have none, and no teacher."""
    keys = {"context": ["column:answer"], "template": "{{context}}"}
    with serving(lambda _, body: answer(body)) as server:
        experience = taught(server.url, **keys)
        experience.contexts = read = contexts(teacher_of(base_url=server.url, **keys))
        experience.runner.taught = partial(TaughtSource, section(server.url, **keys), contexts=read)
        with_answers = [replace(each, columns={"answer": "41"} if each.row == 0 else {}) for each in experience.prompts]
        experience.prompts = cast(PromptDataset, with_answers)
        batch = experience.collect(1).batch
    assert [request["prompt"][:2] for request in server.requests] == [[ord("4"), ord("1")]] * 3
    assert {len(request["prompt"]) for request in server.requests} == {2 + 3}
    first = required(batch.value("teacher_log_probs")).view(6, 3)
    assert first[0].tolist() == [
        log_prob(token, at) for at, token in enumerate(batch.response_ids[:3].tolist(), start=2)
    ]
    assert batch.carried["taught"].tolist() == [True] * 3 + [False] * 3


def test_requests_go_out_while_other_responses_are_sampled():
    with serving(lambda _, body: answer(body)) as server:
        seen = []

        class Slow(Client):
            def response(self, request):
                seen.append(len(server.requests))
                return super().response(request)

        experience = taught(server.url)
        experience.runner.client = client = Slow()
        experience.collect(1)
    assert len(client.calls[0][0]) == 6 and len(server.requests) == 6 and seen[0] == 0


def with_likeliest(table: list) -> list:
    """A table with the two most probable tokens, of which the token itself may be one."""
    return [
        None,
        *(each | {"41": {"logprob": -0.25, "rank": 1}, "42": {"logprob": -0.5, "rank": 2}} for each in table[1:]),
    ]


def test_the_most_probable_tokens_are_those_of_each_place_without_the_sampled_one_unless_it_is_one_of_them():
    config = section("")
    config.distillation_loss.loss_mode, config.distillation_loss.topk = "forward_kl_topk", 2
    with serving(lambda _, body: answer(body, with_likeliest)) as server:
        config.teacher_models["far"].base_url = server.url
        experience = build([[1, 0]], step=1)
        experience.runner.taught = partial(TaughtSource, config)
        top = required(experience.collect(1).batch.value("teacher_top"))
    assert {each["prompt_logprobs"] for each in server.requests} == {2} and top.dtype == torch.int32
    likeliest, own = [[41, -0.25], [42, -0.5]], log_prob(0, 3)  # the token 0 comes first in the row 0
    ids, log_probs = top[..., 0], top[..., 1].contiguous().view(torch.float32)
    rows = torch.stack([ids.float(), log_probs], -1).tolist()
    first = sorted([*likeliest, [0, own]], key=lambda pair: -pair[1])[:2]
    assert rows[0] == first != likeliest and rows[2] == likeliest


def test_fewer_most_probable_tokens_than_requested_are_no_answer():
    config = section("")
    config.distillation_loss.loss_mode, config.distillation_loss.topk = "forward_kl_topk", 2
    with serving(lambda _, body: answer(body)) as server, pytest.raises(NothingToLearnFrom, match="teacher:reply"):
        config.teacher_models["far"].base_url = server.url
        experience = build([[1, 0]], step=1)
        experience.runner.taught = partial(TaughtSource, config)
        experience.collect(1)


FAILURES = {
    "429": Reply(status=429, body="later"),
    "500": Reply(status=500, body="<html>"),
    "401": Reply(status=401, body="no"),
    "connection": Reply(fails="reset"),
    "timeout": Reply(fails="stall"),
}
TABLES: dict[str, tuple[str, Callable[[list], Any], str]] = {
    "another token": ("other-tokens", lambda t: [*t[:4], {"77": {"logprob": -1.0}}, *t[5:]],
                      "at position 4 the row has the token 1, and the reply 77"),
    "a short table": ("other-tokens", lambda t: t[:-1], "at position 5 the row has the token 5, and the reply none"),
    "a long table": ("other-tokens", lambda t: [*t, t[-1]], "at position 6 the row has the token none, and the"),
    "the table one token late": ("reply", lambda t: [None, None, *t[1:-1]], ""),
    "no table": ("reply", lambda t: None, "something other than the log-probs of a prompt"),
    "no number": ("reply", lambda t: [*t[:5], {"5": {"logprob": None}}], ""),
    "not finite": ("reply", lambda t: [*t[:5], {"5": {"logprob": float("nan")}}], ""),
    "an object": ("reply", lambda t: {"0": t}, ""),
}  # fmt: skip


def fails(body: Body) -> bool:
    """Whether the request is of the second response to the first prompt."""
    return body["prompt"][:5] == [0, 1, 1, 0, 1]


def assert_only_one_row_is_left_out(experience: SynchronousExperience, fault: str, detail: str = "") -> None:
    collected = experience.collect(1)
    pairs = [*zip(collected.batch.position.tolist(), collected.batch.sample.tolist(), strict=True)]
    assert pairs == [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert (required(collected.batch.value("teacher_log_probs")) < 0).all()
    assert collected.metrics["reward/faults"] == 1 == collected.metrics[f"reward/faults/teacher:{fault}"]
    lost = collected.samples[1]
    assert lost.score.fault == f"teacher:{fault}" and detail in lost.score.detail


@pytest.mark.parametrize("fault", FAILURES)
def test_a_response_without_an_answer_is_left_out_and_counted_and_others_are_not_touched(fault):
    with serving(lambda _, body: FAILURES[fault] if fails(body) else answer(body)) as server:
        assert_only_one_row_is_left_out(taught(server.url, timeout=0.5), fault)


@pytest.mark.parametrize("case", TABLES)
def test_an_answer_of_other_tokens_is_none(case):
    fault, change, detail = TABLES[case]
    with serving(lambda _, body: answer(body, change) if fails(body) else answer(body)) as server:
        assert_only_one_row_is_left_out(taught(server.url), fault, detail)


def test_a_fault_is_left_out_even_where_those_of_the_reward_count_as_0():
    with serving(lambda _, body: FAILURES["401"] if fails(body) else answer(body)) as server:
        experience = taught(server.url)
        experience.guard = FaultGuard("zero", 1.0, 99)
        assert_only_one_row_is_left_out(experience, "401")


def test_what_may_pass_is_requested_again_and_what_may_not_once():
    with serving(lambda number, body: FAILURES["500"] if number < 6 else answer(body)) as server:
        assert len(taught(server.url, retries=1).collect(1).batch) == 6
    assert len(server.requests) == 12
    with serving(FAILURES["401"]) as server, pytest.raises(NothingToLearnFrom, match="teacher:401"):
        taught(server.url, retries=3).collect(1)
    assert len(server.requests) == 6


class Killing(Dying):
    """Ends the process once `count` responses are taught, scored and stored in a directory."""

    def __init__(self, count: int, directory: Path) -> None:
        super().__init__(count)
        self.directory, self.stored = directory, count

    def is_stored(self) -> bool:
        files = [path for path in self.directory.rglob("*") if path.is_file()]
        return sum(path.read_bytes().count(b'"key"') for path in files) == self.stored

    async def _respond(self) -> None:
        asked, self.asked = self.asked, []
        for request, future in asked:
            if isinstance(response := self.response(request), BaseException):
                while not self.is_stored():
                    await asyncio.sleep(0.01)
                return future.set_exception(response)
            future.set_result(response)


def test_a_resumed_step_requests_nothing_twice(tmp_path: Path):
    with serving(lambda _, body: answer(body)) as server:
        expected = taught(server.url).collect(1).batch
        server.requests.clear()
        first, second = taught(server.url), taught(server.url)
        first.store, first.runner.client = spool(tmp_path), Killing(4, tmp_path)
        with contextlib.suppress(Killed):
            first.collect(1)
        assert len(server.requests) == 4
        second.store = spool(tmp_path)
        batch = second.collect(1).batch
    prompts = [each["prompt"] for each in server.requests]
    assert len(prompts) == 6 == len({*map(tuple, prompts)})
    assert torch.equal(required(batch.value("teacher_log_probs")), required(expected.value("teacher_log_probs")))


def test_rows_of_an_episode_are_requested_each_and_have_values_for_all_their_tokens():
    turns = [
        Turn([1, 2], np.array([7, 8]), np.zeros(2, np.float32), 0, "stop"),
        Turn([3, 4], np.array([9]), np.zeros(1, np.float32), 0, "stop"),
        Turn([5, 6], np.array([10]), np.zeros(1, np.float32), 0, "stop", fresh=True),
    ]
    with serving(lambda _, body: answer(body)) as server:
        (episode,) = finished(
            server.url, Prompt(0, [1, 2], "?", "maths", "4", {}), Trajectory(turns, text="x", reward=1.0)
        )
    assert sorted(each["prompt"] for each in server.requests) == [[1, 2, 7, 8, 3, 4, 9], [5, 6, 10]]
    expected = [log_prob(token, at) for at, token in enumerate([7, 8, 3, 4, 9], start=2)] + [log_prob(10, 2)]
    assert required(to_batch([[episode]]).value("teacher_log_probs")).tolist() == expected


class Ended:
    """Episodes that have ended."""

    def __init__(self, *trajectories: Trajectory) -> None:
        self.trajectories = trajectories

    async def finished(self):
        yield [(index, trajectory, None) for index, trajectory in enumerate(self.trajectories)]

    def scoring_started(self, *_: object):
        return lambda index, score: None

    def source(self, *_: object, **__: object) -> "Ended":
        return self


def finished(url: str, prompt: Prompt, trajectory: Trajectory, stream: str = "", **keys: Any) -> list:
    config = section(url, **keys)
    runner = EpisodeRunner(
        None, Scorers(TABLE), 1, conversations=Ended(trajectory), taught=partial(TaughtSource, config)
    )
    return runner.run_requests([EpisodeRequest(prompt, 0, 0, 0, "key", SAMPLING, stream)])[0]


@pytest.mark.parametrize(("number", "stream"), [(-1, ""), (1, ""), (0, "validation")])
def test_rows_of_no_teacher_or_of_another_and_those_of_a_validation_are_not_requested(number, stream):
    turn = Turn([1, 2], np.array([7, 8]), np.zeros(2, np.float32), 0, "stop")
    prompt = Prompt(0, [1, 2], "?", "maths", "4", {}, carried={TEACHER: np.array([number])})
    with serving(lambda _, body: answer(body)) as server:
        (episode,) = finished(server.url, prompt, Trajectory([turn], text="x", reward=1.0), stream)
    assert server.requests == [] and episode.trajectory.turns[0].carried == {}


class Letters:
    """A tokenizer of letters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + token) for token in ids)


def test_before_the_start_a_row_of_the_greatest_length_is_requested():
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(max_model_len=8)))
    with serving(lambda _, body: answer(body)) as server:
        config.distillation = section(server.url)
        check_endpoints(config, Letters(), [1, 2, 3])
    assert [each["prompt"] for each in server.requests] == [[1, 2, 3, 1, 2, 3, 1, 2]]
    with serving(Reply(status=400, body="at most 4 tokens")) as server, pytest.raises(ConfigError) as error:
        config.distillation = section(server.url)
        check_endpoints(config, Letters(), [1, 2, 3])
    assert "teacher_models.far.base_url=" in str(error.value) and "at most 4 tokens" in str(error.value)
    assert "prompt_logprobs for 8 tokens" in str(error.value)


def test_a_teacher_with_another_text_for_a_token_is_rejected():
    def named(table: list, text: str) -> list:
        return [
            None,
            *({token: about | {"decoded_token": text} for token, about in each.items()} for each in table[1:]),
        ]

    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(max_model_len=8)))
    with (
        serving(lambda _, body: answer(body, lambda table: named(table, "x"))) as server,
        pytest.raises(ConfigError) as error,
    ):
        config.distillation = section(server.url)
        check_endpoints(config, Letters(), [1, 2, 3])
    assert "the token 2 is 'x', and the policy's 'c'; choose a teacher with the policy's tokens" in str(error.value)
    with serving(lambda _, body: answer(body, lambda table: named(table, "\ufffd"))) as server:
        config.distillation = section(server.url)
        check_endpoints(config, Letters(), [1, 2, 3])
