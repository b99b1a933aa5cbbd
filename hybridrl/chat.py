"""A conversation with a model, at a terminal or in a pipe: `hybridrl chat RUN_OR_MODEL`"""

import argparse
import asyncio
import os
import readline
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import IO

from hybridrl.agents.endpoint.serve import prepare, read_arguments
from hybridrl.config import ConfigError
from hybridrl.config.compose import as_override
from hybridrl.data.pictures import PictureFault, content, decoded
from hybridrl.evaluation.targets import find_targets
from hybridrl.runtime import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REJECTED
from hybridrl.runtime.guard import FORWARDED, ended_by_closed_pipe, guarded
from hybridrl.tracking.console import console, print_text, printable, stage
from hybridrl.tracking.secrets import mask_text

NAME, RESET = "RUN_OR_MODEL", "/reset"
LEVEL = "VLLM_LOGGING_LEVEL"  # if the user sets it, what libraries print is shown
LINES = 40  # the end of a log that is shown after a failure
PURPOSE = f"""Talk to a model. Ctrl-C stops a response, {RESET} forgets the conversation, Ctrl-D ends. A model without
a chat template continues texts. Each line of a piped input gets a response."""


def main(argv: list[str] | None = None, log: IO[str] | None = None) -> int:
    """Return the exit status: 0, 1 (the engine failed), 2 (invalid input), 130 (Ctrl-C). `log`: a file for what
    libraries print."""
    parser = argparse.ArgumentParser(prog="hybridrl chat", description=PURPOSE, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar=NAME, help="RUN, RUN:best, RUN:STEP, a checkpoint, a Hugging Face directory or a hub name")
    add("keys", nargs="*", default=[], metavar="key=value", help="keys of hybridrl serve, such as device=cpu")
    add("--prompt", metavar="TEXT", help="print one response to this text, and end")
    add("--max-tokens", metavar="N", help="the longest response (512)")
    add("--temperature", metavar="T", help="0 for the likeliest tokens (1.0)")
    add("--system", metavar="TEXT", help="the system message")
    add("--image", metavar="FILE", action="append", default=[], help="a picture of the first message; may be repeated")
    options = parser.parse_intermixed_args(argv)
    log = log or new_log()
    try:
        return run(options, log)
    except ConfigError as error:
        show_end(log)  # such as why a checkpoint cannot be merged
        print_text(f"error: {error}", error=True)
        return EXIT_REJECTED
    except KeyboardInterrupt:
        print_text("", error=True)
        return EXIT_INTERRUPTED
    except Exception as error:  # whatever an engine raises
        show_end(log)
        print_text(f"error: the engine failed: {type(error).__name__}: {error}", error=True)
        return EXIT_FAILED


def new_log() -> IO[str]:
    return tempfile.TemporaryFile("w+", buffering=1, errors="replace")


def show_end(log: IO[str]) -> None:
    """Print the last lines of a log, which may have the cause of a failure."""
    log.seek(0)
    if lines := log.read().splitlines()[-LINES:]:
        print_text(mask_text("\n".join(lines)), error=True)


@contextmanager
def quiet_stage(name: str, log: IO[str]) -> Iterator[None]:
    """Show a stage on standard error, with messages of the console, while the output of libraries, and of their
    processes, goes to the log."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = {number: os.dup(number) for number in (1, 2)}
    # A Python stream in place of standard error writes elsewhere.
    console.file = os.fdopen(os.dup(2), "w") if sys.stderr is sys.__stderr__ else sys.stderr
    try:
        for number in before:
            os.dup2(log.fileno(), number)
        with stage(name), redirect_stdout(log), redirect_stderr(log):  # a stage shows what Python prints before
            yield
    finally:
        for number, copy in before.items():
            os.dup2(copy, number)
            os.close(copy)
        console.file = None  # standard output again


def run(options: argparse.Namespace, log: IO[str]) -> int:
    """Start the engine, then respond to the prompt, or to each line of the input; return the exit status."""
    target, images = find_targets([options.model], key=NAME)[-1], [*map(read_image, options.image)]
    values = {"model.path": target.path, "rollout.max_num_seqs": 1, "rollout.temperature": options.temperature}
    values |= {"rollout.response_length": options.max_tokens, "rollout.limit_images": None if images else 0}
    keys = [f"{key}={as_override(value)}" for key, value in values.items() if value is not None]
    own, section = read_arguments([*keys, *options.keys])
    with asyncio.Runner() as runner:
        with ExitStack() as stack:
            name = f"starting an engine with {target.name}"
            if LEVEL in os.environ:
                stack.enter_context(redirect_stdout(sys.stderr))
            stack.enter_context(stage(name) if LEVEL in os.environ else quiet_stage(name, log))
            entry, device = prepare(section, own["device"])
            from hybridrl.agents.endpoint.local import TerminalChat, make_kit, start

            kit = make_kit(section.model, section.rollout)
            chat = TerminalChat(kit, section.rollout.response_length, options.system, images)
            chat.messages_with(options.prompt or "a")  # rejects a prompt that is too long
            policy = runner.run(start(entry, section.model, section.rollout, device, kit, schemas=False))

        def respond(text: str) -> None:
            cut_off = runner.run(chat.respond(policy, text.encode(errors="replace").decode(), _show))
            _show("\n")
            if cut_off:
                print("[cut off: --max-tokens allows more]", file=sys.stderr, flush=True)

        if options.prompt is None:
            return converse(respond, chat.reset)
        respond(options.prompt)
        return 0


def read_image(file: str) -> bytes:
    """Return the bytes of a picture's file. Raises ConfigError."""
    try:
        decoded(data := content(Path(file).expanduser()))
    except PictureFault as fault:
        raise ConfigError(f"--image {file}: {fault}", fix="name a file of PNG, JPEG, WebP, GIF or BMP") from fault
    return data


def _show(text: str) -> None:
    with ended_by_closed_pipe():
        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def converse(respond: Callable[[str], None], reset: Callable[[], None]) -> int:
    """Respond to each line of the input until it ends, or until Ctrl-C at an empty prompt; return the exit status."""
    terminal = sys.stdin.isatty()
    if terminal:
        print_text(f"Ctrl-C stops a response, {RESET} forgets the conversation, Ctrl-D ends", error=True)
    while True:
        text = ""
        try:
            text = input("> " if terminal and sys.stdout.isatty() else "")
            if text.strip() == RESET:
                reset()
            elif text.strip():
                respond(text)
        except EOFError:
            _show("\n" * terminal)
            return 0
        except (ConfigError, KeyboardInterrupt) as error:
            if not (terminal and (text or readline.get_line_buffer())):
                raise
            print_text(f"error: {error}" if isinstance(error, ConfigError) else "", error=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # the shell would stop the guard, not its child at the terminal
    guard, of_libraries = os.getpid(), new_log()
    status = guarded(partial(main, log=of_libraries))
    if os.getpid() == guard and status > 128 and status - 128 not in FORWARDED:  # nothing else has printed it
        show_end(of_libraries)
    sys.exit(status)
