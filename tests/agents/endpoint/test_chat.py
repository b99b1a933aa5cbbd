"""The command that talks to a model, with an engine of scripted texts."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from transformers import AutoTokenizer, Qwen2Tokenizer

from hybridrl import chat
from hybridrl.agents.endpoint import local
from hybridrl.agents.environments.episode_loop import EpisodeTools
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.pictures import NO_PIXELS, Pixels, digest_of
from hybridrl.core.rollout import Completion, Request
from hybridrl.required import required
from hybridrl.tracking.console import console
from tests.agents.endpoint.conftest import completion_of
from tests.vision_models import noise_picture, write_model_that_sees

CTRL_C = "^C"  # ends a line that is typed, or a response that is sampled


@dataclass
class ScriptedEngine:
    """An engine, with what RolloutEngine has and a conversation needs, that responds with the texts in turn, a token
    at a time. `prompts` and `requests` are what it was sent, `shown` what was printed before each response ended."""

    tokenizer: Qwen2Tokenizer
    texts: list[str]
    prompts: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    pixels: list[list[int]] = field(default_factory=list)  # the digests of those that it was sent
    shown: list[str] = field(default_factory=list)
    interruptions: int = 0
    dead: str = ""
    noise: str = ""

    async def connect(self) -> None:
        if self.noise:  # of a library, and of a process that it starts
            print(f"{self.noise} to sys.stderr", file=sys.stderr)
            os.write(1, f"{self.noise} to 1\n".encode())
            os.write(2, f"{self.noise} to 2\n".encode())
            console.print("a message of hybridrl")
        if self.dead:
            raise RuntimeError(self.dead)

    async def check(self) -> int:
        if not self.texts:
            raise RuntimeError("the engine is dead: no texts")
        return 0

    async def interrupt(self) -> None:
        self.interruptions += 1

    async def generate(self, request: Request, pixels: Mapping[int, Pixels] = NO_PIXELS) -> Completion:
        self.pixels.append([*map(digest_of, pixels.values())])
        self.prompts.append(self.tokenizer.decode(request.prompt_ids))
        self.requests.append(request)
        text = self.texts.pop(0)
        completion = completion_of(self.tokenizer, text.removesuffix(CTRL_C), request.sampling.max_tokens)
        output = cast("StringIO", sys.stdout)
        before = len(output.getvalue())
        for token in completion.token_ids.tolist():
            required(request.hear)([token])
            await asyncio.sleep(0)
        self.shown.append(output.getvalue()[before:])
        if text.endswith(CTRL_C):
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        return completion


class Input(StringIO):
    """Lines from a terminal or a pipe; one is Ctrl-C."""

    terminal = False

    def isatty(self) -> bool:
        return self.terminal

    def readline(self, *size: int) -> str:
        line = super().readline(*size)
        if line.strip() == CTRL_C:
            raise KeyboardInterrupt
        return line


@dataclass
class Result:
    status: int
    output: str
    errors: str
    engine: ScriptedEngine


@pytest.fixture
def talk(tiny, monkeypatch, capsys) -> Callable[..., Result]:
    """Run the command on a model with scripted responses."""

    def run(
        *arguments: str,
        texts: tuple[str, ...] = (),
        lines: str = "",
        terminal: bool = False,
        sees: bool = False,
        **engine: str,
    ) -> Result:
        words = arguments if arguments and not arguments[0].startswith("-") else (str(tiny), *arguments)
        place = words[0] if sees else tiny
        scripted = ScriptedEngine(AutoTokenizer.from_pretrained(place), [*texts], **engine)
        entry = SimpleNamespace(build=lambda *_: scripted)
        monkeypatch.setattr(chat, "prepare", lambda *_: (entry, "cpu"))
        monkeypatch.setattr(Input, "terminal", terminal)
        monkeypatch.setattr(sys, "stdin", Input(lines))
        monkeypatch.setattr(sys, "stdout", output := StringIO())
        status = chat.main([*words])
        return Result(status, output.getvalue(), capsys.readouterr().err, scripted)

    return run


def test_a_prompt_gets_one_response_which_is_all_of_the_output(talk):
    result = talk("--prompt", "What is 1+2?", "--max-tokens=9", "--temperature=0.25", texts=("#### 3",))
    assert (result.status, result.output) == (0, "#### 3\n")
    sampling = result.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature) == (9, 0.25)


def test_each_line_of_a_pipe_gets_a_response_and_the_conversation_is_kept_until_it_is_reset(talk):
    texts = ("#### 3", "#### 7", "#### 9", "#### 1")
    result = talk("--system", "Add.", texts=texts, lines="1+2\n\n3+4\n/reset\n4+5\n0+1")
    assert (result.status, result.output) == (0, "#### 3\n#### 7\n#### 9\n#### 1\n")
    first, second, third, fourth = result.engine.prompts
    assert "Add." in first and first.count("user") == 1
    assert second.startswith(f"{first}#### 3") and "3+4" in second
    assert third == first.replace("1+2", "4+5")
    assert fourth.startswith(f"{third}#### 9")


def test_a_response_is_shown_as_it_is_sampled_with_its_reasoning(talk, with_template, tiny):
    template = AutoTokenizer.from_pretrained(tiny).chat_template
    model = with_template(f"{template}{{# </think> #}}")
    result = talk(str(model), texts=("1+2=3</think>3", "5"), lines="1+2\n2+3\n")
    assert result.output == "1+2=3</think>3\n5\n"
    assert result.engine.shown == ["1+2=3</think>3", "5"]
    assert "1+2=3</think>3" in result.engine.prompts[1]


def test_a_response_that_is_cut_off_says_so_apart_from_the_output(talk):
    result = talk("--max-tokens", "2", "--prompt", "1+2", texts=("12345",))
    assert result.output == "12\n" and "[cut off: --max-tokens allows more]" in result.errors


def test_ctrl_c_ends_a_response_which_stays_as_far_as_it_was_shown_and_then_the_command(talk):
    texts = (f"#### 3{CTRL_C}", "#### 7")
    result = talk(texts=texts, lines=f"1+2\n3+4\n{CTRL_C}\nmore\n", terminal=True)
    assert (result.status, result.engine.interruptions) == (130, 1)
    assert result.output == "#### 3#### 7\n"
    assert "#### 3" in result.engine.prompts[1] and "3+4" in result.engine.prompts[1]


@pytest.mark.parametrize("arguments", [("--prompt", "1+2"), ()])
def test_ctrl_c_ends_a_command_without_a_terminal(talk, arguments):
    result = talk(*arguments, texts=(f"#### 3{CTRL_C}", "#### 7"), lines="1+2\n3+4\n")
    assert (result.status, result.engine.interruptions, len(result.engine.prompts)) == (130, 1, 1)
    assert talk(lines=f"{CTRL_C}\n").status == 130


def test_a_model_without_a_chat_template_continues_each_text_by_itself(talk, with_template):
    model = str(with_template(None))
    result = talk(model, texts=("3", "7"), lines="1+2=\n3+4=\n")
    assert (result.output, result.engine.prompts) == ("3\n7\n", ["1+2=", "3+4="])
    result = talk(model, "--system", "Add.", texts=("3",), lines="1+2=\n")
    assert result.status == 2 and not result.engine.prompts
    assert "--system: the model has no chat template, and continues texts; leave it out" in result.errors


def test_what_is_rejected_at_a_terminal_ends_nothing(talk):
    result = talk(texts=("#### 3",), lines=f"{'1+2' * 400}\n1+2\n", terminal=True)
    assert (result.status, len(result.engine.prompts)) == (0, 1) and "#### 3" in result.output
    assert "the maximum context length is 512 tokens" in result.errors and "/reset" in result.errors
    assert talk(texts=("#### 3",), lines=f"{'1+2' * 400}\n1+2\n").status == 2


@pytest.mark.parametrize("dead", ["no memory", ""])
def test_an_engine_that_fails_ends_the_command_with_one_sentence(talk, dead):
    result = talk(dead=dead, texts=(), lines="1+2\n", terminal=True)
    assert result.status == 1 and "Traceback" not in result.errors
    assert f"error: the engine failed: RuntimeError: {dead or 'the engine is dead: no texts'}" in result.errors


@pytest.mark.parametrize("dead", ["", "no memory"])
def test_what_libraries_print_is_shown_only_with_the_failure_that_it_explains(talk, tmp_path, monkeypatch, dead):
    log = (tmp_path / "log").open("w+", buffering=1)
    monkeypatch.setattr(chat, "new_log", lambda: log)
    result = talk("--prompt", "1+2", texts=("#### 3",), noise="Warning: old", dead=dead)
    log.seek(0)
    printed = log.read()
    assert printed == "".join(f"Warning: old to {stream}\n" for stream in ("sys.stderr", "1", "2"))
    assert result.errors.count("a message of hybridrl") == 1 and result.output == ("" if dead else "#### 3\n")
    assert result.errors.endswith(f"{printed}error: the engine failed: RuntimeError: no memory\n") == bool(dead)
    assert ("Warning" in result.errors) == bool(dead)


def test_what_libraries_print_is_shown_if_their_level_is_set(talk, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert "old to sys.stderr" in talk("--prompt", "1+2", texts=("#### 3",), noise="Warning: old").errors


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, and a picture of two tokens in its folder."""
    model = write_model_that_sees(tmp_path_factory.mktemp("seeing"))
    noise_picture(64, 32).save(model / "a.png")
    return model


def test_images_are_in_the_first_message_of_each_conversation(talk, seeing):
    picture, other = str(seeing / "a.png"), str(seeing / "b.png")
    noise_picture(32, 32, 1).save(other)
    images = ("--image", picture, "--image", other)
    result = talk(str(seeing), *images, texts=("3", "7", "9"), lines="1+2\n3+4\n/reset\n4+5\n", sees=True)
    assert (result.status, result.output) == (0, "3\n7\n9\n"), result.errors
    pad = "<|image_pad|>"
    shown = f"<|vision_start|>{pad * 2}<|vision_end|><|vision_start|>{pad}<|vision_end|>"
    first, second, third = result.engine.prompts
    assert f"user\n{shown}1+2<|im_end|>" in first and second.startswith(f"{first}3") and second.count(pad) == 3
    assert third == first.replace("1+2", "4+5")
    digests = [digest for digest, _ in result.engine.requests[0].pictures]
    assert len({*digests}) == 2 and result.engine.pixels == [digests] * 3


def test_a_prompt_has_its_image_and_without_one_the_engine_has_no_tower(talk, seeing, monkeypatch):
    started, make = [], local.make_kit

    def make_kit(model: ModelConfig, rollout: RolloutConfig) -> EpisodeTools:
        started.append((rollout.limit_images, rollout.engine_kwargs.vllm))
        return make(model, rollout)

    monkeypatch.setattr(local, "make_kit", make_kit)
    asked = talk(str(seeing), "--image", str(seeing / "a.png"), "--prompt", "What?", texts=("3",), sees=True)
    assert (asked.output, len(asked.engine.pixels[0])) == ("3\n", 1)
    assert talk(str(seeing), "--prompt", "What?", texts=("3",), sees=True).engine.pixels == [[]]
    # vLLM's processor of pictures needs a tokenizer, which takes seconds otherwise.
    assert [(limit, arguments["skip_tokenizer_init"]) for limit, arguments in started] == [(None, False), (0, True)]


@pytest.mark.parametrize(
    ("image", "more", "cause"),
    [
        ("none.png", (), "--image {here}/none.png: there is no file"),
        ("config.json", (), "config.json: not a picture of PNG, JPEG, WebP, GIF or BMP; name a file of"),
        ("a.png", ("rollout.limit_images=0",), "--image: 1 pictures, and the model with its engine reads 0"),
        ("tiny", (), "--image: 1 pictures, and the model with its engine reads 0; name a model that sees"),
        ("large.png", (), "--image: 512 x 1 pixels"),
    ],
)
def test_an_image_that_cannot_be_shown_is_rejected_before_the_engine_starts(talk, tiny, seeing, image, more, cause):
    noise_picture(512, 1).save(seeing / "large.png")
    model, file = (tiny, seeing / "a.png") if image == "tiny" else (seeing, seeing / image)
    result = talk(str(model), "--image", str(file), *more, dead="it was started", texts=("3",), lines="1+2\n")
    assert (result.status, result.output) == (2, "")
    assert cause.format(here=seeing) in result.errors


def made_run(directory: Path, *folders: str) -> Path:
    for folder in folders:
        (directory / folder).mkdir(parents=True)
    (directory / "config.yaml").write_text("trainer: {}\n")
    return directory


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/not/there"], "model.path=/not/there: there is no such directory (/not does not exist)"),
        (["{here}"], "the directory has no config.json, so it is not a Hugging Face model (it has notes.txt)"),
        (["{here}/none"], "none has no checkpoints; name a directory that has global_step_N; a run with trainer.save"),
        (["{here}/run:3"], "run:3: there is no checkpoint of step 3; choose 5"),
        (["{here}/run:first"], "first is not a choice; choose best | last | all | STEP"),
        (["{here}/run"], "global_step_5/actor: the directory has no config.json"),
        (["http://127.0.0.1:8000/v1"], "model.path=http://127.0.0.1:8000/v1: there is no such directory"),
        (["{tiny}", "--max-tokens=0"], "rollout.response_length=0: must be at least 1"),
        (["{tiny}", "--temperature=-1"], "rollout.temperature=-1"),
        (["{tiny}", "rollout.max_num_seq=2"], "unknown key rollout.max_num_seq"),
        (["{tiny}", "rollout.max_model_len=20", "--prompt=1+2"], "the maximum context length is 20 tokens"),
    ],
)
def test_what_cannot_work_is_rejected_before_the_engine_starts(talk, tiny, tmp_path, arguments, expected):
    if arguments == ["{here}"]:
        (tmp_path / "notes.txt").touch()
    else:
        made_run(tmp_path / "run", "global_step_5/actor")
        made_run(tmp_path / "none", "logs")
    words = [word.format(here=tmp_path, tiny=tiny) for word in arguments]
    result = talk(*words, dead="it was started", texts=("3",), lines="1+2\n")
    assert (result.status, result.output) == (2, "") and expected in result.errors


def test_a_run_is_its_newest_checkpoint_also_with_weights_in_the_hugging_face_format(talk, tiny, tmp_path):
    actor = tmp_path / "run" / "global_step_5" / "actor"
    actor.mkdir(parents=True)
    (actor / "huggingface").symlink_to(tiny)
    state = {"healthy": True, "recovery": False, "published": 5, "metrics": {}}
    (actor.parent / "state.json").write_text(json.dumps(state))
    for name in ("run", "run:5", "run/global_step_5"):
        assert talk(str(tmp_path / name), "--prompt=1+2", texts=("3",)).output == "3\n"
