"""An evaluation from rows to table, with stand-ins for engines and for an endpoint; stored responses as in verl."""

import ast
import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest

from hybridrl import main_eval
from hybridrl.config import ConfigError
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.rollout import Completion, Request
from hybridrl.evaluation.command import earlier
from hybridrl.evaluation.config import load_eval_config
from hybridrl.evaluation.model import ModelEvaluation
from hybridrl.evaluation.results import write_results
from hybridrl.evaluation.samples import GREEDY, read_samples
from hybridrl.evaluation.targets import Target
from hybridrl.required import required
from hybridrl.rewards.actors import DecodingScorer
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.process import CallerScorer
from hybridrl.tracking.faults import FAULT_KINDS
from tests.scripts import run_script
from tests.vision_models import noise_picture

NULL = {"style": "model", "ground_truth": None}
MAKE_DATA = Path(__file__).parents[2] / "recipes" / "quickstart" / "make_data.py"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "fails":
        raise ValueError("no score")
    right = float(solution_str == ground_truth)
    return {"score": right, "pred": solution_str}
"""


def row(truth: str, prompt: object, **columns: object) -> dict[str, object]:
    return {"data_source": "digits", "prompt": prompt, "reward_model": {"ground_truth": truth}} | columns


def write_rows(file: Path, *rows: dict[str, object]) -> None:
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, and four questions whose truths are 0 to 3."""
    directory = tmp_path_factory.mktemp("evaluate")
    assert not run_script(MAKE_DATA, "--out", directory)
    write_rows(
        directory / "digits.jsonl", *(row(f"{index}", [{"role": "user", "content": f"{index}"}]) for index in range(4))
    )
    (directory / "reward.py").write_text(REWARD)
    return directory


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Engine:
    """Stands in for the rollout client: responds with a digit of the prompt's text, wrong in every second sample."""

    def __init__(self, evaluation: "Faked") -> None:
        self.evaluation, self.fixed, self.count = evaluation, False, 0

    def generate(self, request, begun=None):
        self.count += 1
        return asyncio.ensure_future(self._generate(request, self.count))

    async def _generate(self, request: Request, count: int) -> Completion:
        for _ in range(5 * count):  # one after another
            await asyncio.sleep(0)
        if self.evaluation.breaks_after == count - 1:
            raise RuntimeError("the engine is gone")
        self.evaluation.asked.append((request.prompt, request.sample, request.sampling.temperature))
        digit = request.prompt if request.sample % 2 == 0 or request.sampling.temperature == 0 else 9
        ids = required(self.evaluation.tokenizer)(str(digit), add_special_tokens=False)["input_ids"]
        return Completion(np.array(ids), np.zeros(len(ids), np.float32), False, 0)


class Faked(ModelEvaluation):
    """An evaluation with that engine, and scorers of this process."""

    breaks_after: int | None = None

    @contextmanager
    def runner(self, sessions, merge, directory) -> Iterator[EpisodeRunner]:
        self.asked: list[tuple[int, int, float]] = []
        caller = CallerScorer(self.config.reward, self.sources)
        with ScorerPool(
            self.config.reward, scorers=[DecodingScorer(caller, required(self.subject.decoder))]
        ) as scorers:
            yield EpisodeRunner(Engine(self), scorers, self.config.eval.seed)


def evaluation(place: Path, *overrides: str) -> Faked:
    values = {
        "eval.files": place / "digits.jsonl",
        "eval.models": place / "model",
        "eval.temperature": 1.0,
        "eval.n": 4,
        "eval.max_tokens": 64,
        "data.max_prompt_length": 32,
        "eval.output_dir": "out",
        "reward.custom_reward_function.path": place / "reward.py",
        "reward.num_workers": 0,
    }
    config = load_eval_config([*(f"{key}={value}" for key, value in values.items()), *overrides])
    return Faked(config, Target("model", str(place / "model")))


def run(one: Faked):
    one.asked = []
    return one.run(None, None, one.directory)


def test_every_question_is_sampled_scored_and_counted(place):
    one = evaluation(place, "eval.greedy=true")
    result = run(one)
    numbers = result.results["datasets"]["digits"]
    assert len(one.asked) == 4 * 5 and numbers["avg"]["value"] == 0.5 and numbers["greedy_acc"]["value"] == 1.0
    assert numbers["pass@k"]["2"]["value"] == pytest.approx(5 / 6) and numbers["maj@k"]["4"]["value"] == 0.5
    first = result.samples[0]
    assert (first.dataset, first.id, first.sample, first.response, first.truth) == ("digits", "0", GREEDY, "0", "0")
    assert (first.tokens, first.finish, first.score, first.pred, first.prompt) == (1, "completed", 1.0, "0", "user: 0")
    assert {path.name for path in Path("out/model").iterdir()} >= {"config.yaml", "samples.jsonl", "results.json"}


def test_what_is_stored_is_not_sampled_again(place):
    results = run(evaluation(place)).results
    again = evaluation(place)
    assert run(again).results["datasets"] == results["datasets"] and again.asked == []
    more = evaluation(place, "eval.n=6")
    run(more)
    assert sorted((prompt, sample) for prompt, sample, _ in more.asked) == [(q, s) for q in range(4) for s in (4, 5)]


def test_after_a_failure_only_what_is_missing_is_sampled(place):
    one = evaluation(place)
    one.breaks_after = 7
    with pytest.raises(RuntimeError, match="the engine is gone"):
        run(one)
    kept = read_samples(Path("out/model/samples.jsonl"))
    again = evaluation(place)
    run(again)
    asked = {(prompt, sample) for prompt, sample, _ in again.asked}
    assert 0 < len(kept) <= 7 and len(asked) == 16 - len(kept)
    assert not asked & {(int(one.id), one.sample) for one in kept}


def test_a_changed_reward_scores_again_without_sampling(place, tmp_path):
    run(evaluation(place))
    other = tmp_path / "other.py"
    other.write_text("def compute_score(solution_str, ground_truth): return float(solution_str == '9')\n")
    again = evaluation(place, f"reward.custom_reward_function.path={other}")
    numbers = run(again).results["datasets"]["digits"]
    assert again.asked == [] and numbers["avg"]["value"] == 0.5 and numbers["pass@k"]["4"]["value"] == 1.0
    assert [one.score for one in read_samples(Path("out/model/samples.jsonl"))] == [0.0, 1.0] * 8


def test_other_sampling_and_without_resume_everything_is_sampled(place):
    run(evaluation(place))
    for overrides in (["eval.temperature=0.5"], ["eval.seed=2"], ["eval.resume=false"]):
        again = evaluation(place, *overrides)
        run(again)
        assert len(again.asked) == 16


def test_at_temperature_0_the_greedy_numbers_are_those_of_the_samples(place):
    numbers = run(evaluation(place, "eval.temperature=0", "eval.n=1", "eval.greedy=true")).datasets["digits"]
    assert numbers["greedy_acc"]["value"] == numbers["avg"]["value"] == 1.0 and numbers["greedy_length"] == 1.0


def test_an_added_file_keeps_the_samples_of_the_others(place, tmp_path):
    run(evaluation(place))
    write_rows(tmp_path / "more.jsonl", row("7", "7"))
    both = evaluation(place, f"eval.files=[{place / 'digits.jsonl'},{tmp_path / 'more.jsonl'}]")
    results = run(both)
    assert [prompt for prompt, _, _ in both.asked] == [4] * 4 and set(results.datasets) == {"digits", "more"}


def test_an_earlier_evaluation_is_compared_without_what_else_is_in_its_file(place):
    baseline = run(evaluation(place))
    run(evaluation(place, "eval.temperature=0.5", "eval.n=2"))  # in the same file
    write_results(Path("out/model"), baseline.samples, baseline.results, [])
    config = evaluation(place, "eval.compare=out/model").config
    assert [one.key for one in required(earlier(config.eval)).samples] == [one.key for one in baseline.samples]


def test_the_responses_of_an_evaluation_are_read_as_stored_ones(place, capsys):
    run(evaluation(place))
    command = ["data.path=out/model/responses.parquet", f"reward.custom_reward_function.path={place / 'reward.py'}"]
    assert main_eval.main([*command, "eval.output_dir=again", "reward.num_workers=1"]) == 0
    assert "{'test_score/digits': 0.5}" in capsys.readouterr().out


def test_the_directory_of_several_evaluations_is_rejected_with_their_names(place):
    run(evaluation(place))
    with pytest.raises(ConfigError, match="has evaluations below it; choose out/model"):
        earlier(evaluation(place, "eval.compare=out").config.eval)


def test_by_default_results_are_below_the_runs_directory_by_model_and_sampling(place):
    names = [
        evaluation(place, "eval.output_dir=null", "trainer.default_local_dir=run", *more).directory
        for more in ([], [], ["eval.temperature=0.5"])
    ]
    assert names[0] == names[1] != names[2]
    assert names[0].parent == Path("run/eval") and names[0].name.startswith("model-")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.files=no_truth.jsonl"], "no ground truth"),
        (["eval.files=no_json.jsonl"], "not JSON"),
        (["eval.files=null.jsonl", "reward.custom_reward_function.path=null"], "line 1: the ground truth is null"),
        (["reward.custom_reward_function.path=null"], "no reward is built in for data_source digits"),
        (["eval.n=null", "eval.k=[1,64]"], r"eval\.k=64: there are 32 responses per question; set eval.n=64"),
    ],
)
def test_what_cannot_be_scored_is_rejected(place, overrides, message):
    write_rows(Path("no_truth.jsonl"), {"prompt": "1+1="})
    write_rows(Path("null.jsonl"), row("1", "1", reward_model=NULL))
    Path("no_json.jsonl").write_text('{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}\n' * 2 + "{\n")
    with pytest.raises(ConfigError, match=message):
        evaluation(place, *overrides)


# -- an endpoint -------------------------------------------------------------------------------------------------------


class Server(BaseHTTPRequestHandler):
    """A model that says the question's text again; its requests are kept."""

    requests: ClassVar[list[dict]] = []
    replies: ClassVar[dict[str, object]] = {}  # by prompt: instead of its usual ones

    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": "parrot", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        asked = body["messages"][-1]["content"]
        asked = asked if isinstance(asked, str) else asked[-1]["text"]
        if (text := self.replies.get(asked)) is not None:
            return self.answer(text)
        if asked == "3":
            return self.answer({"error": {"message": "too hot"}}, 400)
        message = {"role": "assistant", "content": asked, "reasoning_content": "hm"}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        self.answer(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "parrot"}
            | {"choices": [choice], "usage": usage}
        )

    def answer(self, body: object, status: int = 200) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    Server.requests.clear()
    Server.replies.clear()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def ask(place: Path, address: str, *more: str, files: Path | None = None) -> int:
    """Evaluate the model at an address; returns the exit status."""
    command = [f"eval.files={files or place / 'digits.jsonl'}", f"eval.models={address}", "eval.output_dir=out"]
    command += [f"reward.custom_reward_function.path={place / 'reward.py'}", "reward.num_workers=1"]
    return main_eval.main([*command, *more])


def of_samples(name: str) -> dict[tuple[str, int], object]:
    file = next(Path("out").glob("*/samples.jsonl"))
    return {(one.id, one.sample): getattr(one, name) for one in read_samples(file)}


def test_an_address_is_asked_with_messages_and_its_responses_are_scored_here(place, address):
    command = ["eval.n=2", "eval.temperature=0.7", "eval.top_k=20"]
    assert ask(place, address, *command) == 0
    asked = Server.requests[0]
    assert (asked["model"], asked["temperature"], asked["top_k"]) == ("parrot", 0.7, 20) and "seed" in asked
    numbers = json.loads(next(Path("out").glob("*/results.json")).read_text())["datasets"]["digits"]
    assert numbers["avg"]["value"] == 1.0 and (numbers["faults"], numbers["truncated"]) == (2, 6)
    assert (of_samples("tokens")["1", 0], of_samples("conversation")["1", 0]) == (5, {"reasoning": "hm"})
    assert of_samples("fault")["3", 0] == "raised:BadRequestError" and "too hot" in of_samples("detail")["3", 0]

    Server.requests.clear()
    assert ask(place, address, *command) == 0
    assert [one["messages"][-1]["content"] for one in Server.requests] == ["3", "3"]  # what failed, and only that


def test_an_address_gets_the_arguments_of_the_chat_template_and_the_tools_of_its_rows(place, tmp_path, address):
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [row("1", "0"), row("1", "1", enable_thinking=True), row("1", "2", tools=tools)]
    write_rows(tmp_path / "rows.jsonl", *rows)

    def asked(*more: str) -> dict[str, tuple]:
        Server.requests.clear()
        assert ask(place, address, "eval.n=1", *more, files=tmp_path / "rows.jsonl") == 0
        names = ("chat_template_kwargs", "tools", "tool_choice")
        return {one["messages"][0]["content"]: tuple(map(one.get, names)) for one in Server.requests}

    with_tools = {"2": (None, tools, "none")}
    assert asked() == {"0": (None, None, None), "1": ({"enable_thinking": True}, None, None), **with_tools}
    assert asked() == {}  # they are stored
    quiet = {"enable_thinking": False}
    write_rows(tmp_path / "rows.jsonl", *rows[:2])
    more = asked("data.apply_chat_template_kwargs={enable_thinking: false}")  # another policy: nothing is stored
    assert more == {"0": (quiet, None, None), "1": ({"enable_thinking": True}, None, None)}


def test_an_address_gets_the_pictures_of_rows_as_data_urls_and_each_is_asked_once(place, tmp_path, address, capsys):
    for seed in range(2):
        noise_picture(20, 10, seed).save(tmp_path / f"{seed}.png")
    rows = [row("1", [{"role": "user", "content": "<image>1"}], images=[f"{seed}.png"]) for seed in (0, 1, 0)]
    write_rows(file := tmp_path / "rows.jsonl", *rows, row("2", [{"role": "user", "content": "<image>2"}]))
    assert ask(place, address, "eval.n=1", files=file) == 0
    urls = [
        f"data:image/png;base64,{base64.b64encode((tmp_path / f'{seed}.png').read_bytes()).decode()}" for seed in (0, 1)
    ]
    shown = [[{"type": "image_url", "image_url": {"url": one}}, {"type": "text", "text": "1"}] for one in urls]
    asked = [one["messages"] for one in Server.requests]
    expected = [*([{"role": "user", "content": parts}] for parts in (*shown, shown[0]))]
    assert sorted(asked, key=str) == sorted([*expected, [{"role": "user", "content": "<image>2"}]], key=str)
    assert len({one["seed"] for one in Server.requests}) == 4
    Server.requests.clear()
    write_rows(file, rows[1], rows[0])  # other numbers of rows, and the same pictures
    assert ask(place, address, "eval.n=1", files=file) == 0 and not Server.requests
    noise_picture(20, 10, 7).save(tmp_path / "1.png")
    assert ask(place, address, "eval.n=1", files=file) == 0 and len(Server.requests) == 1
    write_rows(file, *rows[:1], row("1", [{"role": "user", "content": "<image>1"}], images=["rows.jsonl"]))
    assert ask(place, address, "eval.n=1", files=file) == 2
    assert "images[0]: not a picture of PNG, JPEG, WebP, GIF or BMP" in capsys.readouterr().err


def test_rows_of_several_turns_at_an_address_are_rejected(place, tmp_path, address, capsys):
    write_rows(tmp_path / "turns.jsonl", row("1", "1", env_class="guess_number"))
    assert ask(place, address, files=tmp_path / "turns.jsonl") == 2
    assert "rows with environments or tools need a model of files" in capsys.readouterr().err


GROUP = """
def compute_score(solution_strs, extra_infos):
    size, texts = len(solution_strs), len(set(solution_strs))
    return [{"score": texts + number / 10, "size": size} for number in range(size)]
"""


@pytest.fixture
def together(tmp_path: Path) -> list[str]:
    """A reward that scores all responses to a prompt in one call."""
    (tmp_path / "together.py").write_text(GROUP)
    return ["reward.custom_reward_function.path=together.py", "reward.reward_manager.name=group"]


def sizes(file: Path) -> dict[str, list[object]]:
    """The sizes of the groups in which the responses to each question were scored."""
    by_question: dict[str, list[object]] = {}
    for sample in read_samples(file):
        by_question.setdefault(sample.id, []).append(sample.extras.get("size"))
    return by_question


def test_a_group_at_an_address_is_scored_in_one_call_without_the_responses_that_failed(place, address, together):
    assert ask(place, address, "eval.n=3", "eval.temperature=1", "eval.concurrency=2", *together) == 0
    (file,) = Path("out").glob("*/samples.jsonl")
    assert sizes(file) == {"0": [3] * 3, "1": [3] * 3, "2": [3] * 3, "3": [None] * 3}


def test_a_group_of_which_responses_are_missing_is_scored_again_as_a_whole(place, together):
    keys = [*together, "reward.num_workers=1"]
    run(evaluation(place, "eval.n=2", *keys))
    (file,) = Path("out").glob("*/samples.jsonl")
    assert sizes(file) == {f"{index}": [2, 2] for index in range(4)}
    run(evaluation(place, "eval.n=4", *keys))
    assert sizes(file) == {f"{index}": [4] * 4 for index in range(4)}
    assert sorted(sample.score for sample in read_samples(file) if sample.id == "0") == [2.0, 2.1, 2.2, 2.3]


def test_a_group_of_stored_responses_is_scored_in_one_call(place, together):
    write_stored(responses=["1", "2", "1"])
    assert stored(place, *together) == 0
    assert [sample.score for sample in read_samples(Path("out/samples.jsonl"))] == [2.0, 2.1, 2.2]


def test_more_faults_than_are_allowed_give_status_3_and_are_explained(place, address, capsys):
    assert ask(place, address, "reward.max_fault_rate=0.2") == 3
    printed = capsys.readouterr().out
    cause = f"1 of 4 responses have no score: raised:BadRequestError ({FAULT_KINDS['raised']}), first digits/3: "
    assert cause in printed
    assert "too hot" in printed and "reward.log" in printed
    assert "exit status 3: 25.0% of the responses have no score, more than reward.max_fault_rate=0.2" in printed


@pytest.mark.parametrize(
    ("override", "message"),
    [("eval.models=http://127.0.0.1:9/v1", "nothing responds there"), ("eval.served_model=another", "choose parrot")],
)
def test_an_address_without_the_model_is_rejected_before_the_start(place, address, override, message, capsys):
    assert ask(place, address, override) == 2
    assert message in capsys.readouterr().err


def test_a_reply_without_a_message_is_a_fault(place, address):
    null = {"id": "1", "object": "chat.completion", "created": 0, "model": "parrot"}
    Server.replies.update({"0": "<html>busy</html>", "1": null | {"choices": None}, "2": null | {"choices": [{}]}})
    assert ask(place, address, "eval.n=1") == 3
    assert [of_samples("fault")[f"{index}", 0] for index in range(4)] == ["reply"] * 3 + ["raised:BadRequestError"]


def test_an_address_is_asked_the_rows_that_a_directory_would_be(place, address):
    options = ["data.val_max_samples=2", "data.validation_shuffle=true", "data.seed=3"]
    config = evaluation(place, *options).config
    asked = ModelEvaluation(config, Target("parrot", address)).questions
    assert [one.text for one in asked] == [one.text for one in evaluation(place, *options).questions]


# -- stored responses --------------------------------------------------------------------------------------------------


def stored(place: Path, *overrides: str) -> int:
    return main_eval.main(
        [
            "data.path=stored.parquet",
            "data.prompt_key=question",
            "data.response_key=responses",
            "data.data_source_key=source",
            "data.reward_model_key=truth",
            f"reward.custom_reward_function.path={place / 'reward.py'}",
            "eval.output_dir=out",
            "reward.num_workers=1",
            *overrides,
        ]
    )


def write_stored(*names: str, **changed: object) -> None:
    """Write one row, or these columns of it."""
    row = {"source": "s", "question": "1", "truth": {"ground_truth": "1"}, "responses": ["1", "2"]} | changed
    pd.DataFrame([{name: row[name] for name in names or row}]).to_parquet("stored.parquet")


def test_stored_responses_give_the_number_of_verls_main_eval(place, capsys):
    draw = np.random.default_rng(0)
    rows = [
        {
            "source": f"source {row % 2}",
            "question": [{"role": "user", "content": f"{row}"}],
            "truth": {"style": "rule", "ground_truth": str(row % 3)},
            "responses": [str(one) for one in draw.integers(3, size=row % 4 + 1)],
        }
        for row in range(20)
    ]
    pd.DataFrame(rows).to_parquet("stored.parquet")
    assert stored(place) == 0
    # What verl computes: for each source the mean over its rows of the mean score of the row's responses.
    expected = {}
    for name in ("source 0", "source 1"):
        some = [row for row in rows if row["source"] == name]
        means = [np.mean([one == row["truth"]["ground_truth"] for one in row["responses"]]) for row in some]
        expected[f"test_score/{name}"] = np.mean(means)
    printed = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert printed == pytest.approx(expected)


def test_stored_responses_are_scored_again_only_by_another_reward(place):
    write_stored(responses="1")
    assert stored(place) == 0
    before = Path("out/samples.jsonl").read_bytes()
    assert stored(place) == 0 and Path("out/samples.jsonl").read_bytes() == before
    Path("other.py").write_text("def compute_score(solution_str): return 0.0\n")
    assert stored(place, "reward.custom_reward_function.path=other.py") == 0
    assert [one.score for one in read_samples(Path("out/samples.jsonl"))] == [0.0]


def test_two_evaluations_are_compared_in_the_table(place, capsys):
    for name, right in {"a": "1", "b": "2"}.items():
        rows = {"source": "s", "question": list("012345"), "truth": [{"ground_truth": "2"}] * 6, "responses": right}
        pd.DataFrame(rows).to_parquet("stored.parquet")
        compare = ["eval.compare=out-a"] if name == "b" else []
        assert stored(place, f"eval.output_dir=out-{name}", *compare) == 0
    comparison = json.loads(Path("out-b/results.json").read_text())["comparison"]["datasets"]["s"]
    assert (comparison["a"], comparison["b"], comparison["up"]) == (0.0, 1.0, 6)  # the new one minus the earlier one
    assert comparison["p"] == comparison["mcnemar"] == 2 / 2**6
    assert "## A = stored, B = stored" in Path("out-b/table.md").read_text()


def test_a_custom_reward_gets_ground_truths_of_null(place):
    Path("reward.py").write_text("def compute_score(ground_truth): return float(ground_truth is None)\n")
    write_rows(Path("null.jsonl"), *[row("1", "1", reward_model=NULL)] * 2)
    custom = "reward.custom_reward_function.path=reward.py"
    sampled = run(evaluation(place, "eval.files=null.jsonl", custom, "eval.output_dir=sampled")).samples
    write_stored(truth=NULL)
    assert stored(place, custom) == 0
    every = [*sampled, *read_samples(Path("out/samples.jsonl"))]
    assert len(every) == 10 and {(one.score, one.truth) for one in every} == {(1.0, None)}


def test_stored_responses_of_a_csv_without_data_source_are_scored_by_a_named_reward(place, capsys):
    Path("stored.csv").write_text("truth,responses\n1,#### 1\n007,#### 7\n")
    keys = ["eval.responses=stored.csv", "data.data_source_key=data_source", "data.ground_truth_key=truth"]
    keys += ["data.response_key=responses", "reward.custom_reward_function.path=null"]
    assert stored(place, *keys) == 2
    assert "set reward.name to one of gsm8k, " in capsys.readouterr().err
    assert stored(place, *keys, "reward.name=gsm8k") == 0
    assert [one.score for one in read_samples(Path("out/samples.jsonl"))] == [1.0, 0.0]


def test_stored_responses_need_no_prompt(place):
    write_stored("source", "truth", "responses")
    assert stored(place) == 0
    assert [one.prompt for one in read_samples(Path("out/samples.jsonl"))] == ["", ""]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.data_source_key=none"], "no data source: data.reward_fn_key=none; the row has source, question, truth"),
        (["eval.k=[1,4]"], "eval.k=4: there are 2 responses per question; leave it out"),
        (["eval.compare=/does/not/exist"], "eval.compare=/does/not/exist is not the directory of an evaluation"),
        (["reward.custom_reward_function.path=broken.py"], "no score at all"),
        (["data.response_key=answers"], "row 0 has no responses there; its columns are source, question, truth, resp"),
    ],
)
def test_stored_responses_that_cannot_be_evaluated_are_rejected(place, overrides, message, capsys):
    write_stored()
    Path("broken.py").write_text("def compute_score(solution_str): raise ValueError('no score at all')\n")
    assert stored(place, *overrides) == 2
    assert message in capsys.readouterr().err and not Path("out/samples.jsonl.writing").exists()


def test_stored_responses_are_compared_only_with_an_evaluation_of_the_same_questions(place, capsys):
    write_stored()
    assert stored(place, "eval.output_dir=earlier") == 0
    write_stored(question="2", responses="1")
    assert stored(place, "eval.compare=earlier") == 2
    assert "no question in common; 1 have the same dataset and id, and other prompts" in capsys.readouterr().err
