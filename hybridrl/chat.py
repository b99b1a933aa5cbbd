"""A conversation with a model, at a terminal or in a pipe: `python -m hybridrl.chat RUN_OR_MODEL`"""

import argparse
import asyncio
import readline
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from hybridrl.agents.endpoint.serve import prepare, read_arguments
from hybridrl.config import ConfigError
from hybridrl.config.files import model_path
from hybridrl.evaluation.targets import Target, find_targets
from hybridrl.runtime import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REJECTED
from hybridrl.runtime.guard import ended_by_closed_pipe, guarded
from hybridrl.tracking.console import print_text, printable, stage

NAME, RESET = "RUN_OR_MODEL", "/reset"


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_intermixed_args(argv)
    try:
        return run(options)
    except ConfigError as error:
        print_text(f"error: {error}", error=True)
        return EXIT_REJECTED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # whatever an engine raises
        print_text(f"error: the engine failed: {type(error).__name__}: {error}", error=True)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybridrl chat",
        description=f"Talk to a model. Ctrl-C stops a response, {RESET} forgets the conversation, Ctrl-D ends. A model "
        "without a chat template continues each text. Of a piped input each line gets a response.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar=NAME, help="RUN, RUN:best, RUN:STEP, a checkpoint, a Hugging Face directory or a hub name")
    add(
        "keys",
        nargs="*",
        default=[],
        metavar="key=value",
        help="keys of hybridrl serve, such as rollout.max_model_len=4096",
    )
    add("--prompt", metavar="TEXT", help="print one response to this, and end")
    add("--max-tokens", type=int, default=512, metavar="N", help="the longest response (512)")
    add("--temperature", metavar="T", help="0: the likeliest tokens (rollout.temperature, 1.0)")
    add("--system", metavar="TEXT", help="the system message")
    return parser


def find_model(name: str) -> Target:
    """Return the one model that a name leads to. Raises ConfigError if there is none, with what is there."""
    target, *others = find_targets([name], key=NAME)
    if others or target.is_address:
        cause = f"{NAME}={name} is {'an address' if target.is_address else f'{len(others) + 1} models'}"
        raise ConfigError(cause, fix="name one model that is in files, such as RUN:last")
    if fault := model_path(target.whole_path):
        directory = Path(target.path)
        files = sorted(file.name for file in directory.iterdir())[:8] if directory.is_dir() else []
        there = f" (there are {', '.join(files)})" if files else ""
        raise ConfigError(f"{NAME}={target.path}: {fault.cause}{there}", fix=fault.fix or "name a run or a model")
    return target


def run(options: argparse.Namespace) -> int:
    """Start the engine, then respond to the prompt, or to what is typed or piped; return the exit status."""
    target, set_here = find_model(options.model), ["rollout.max_num_seqs=1"]
    if options.max_tokens < 1:
        raise ConfigError(f"--max-tokens={options.max_tokens} must be at least 1")
    if options.temperature is not None:
        set_here.append(f"rollout.temperature={options.temperature}")
    own, section = read_arguments([f"model.path={target.whole_path}", *set_here, *options.keys])
    section.model.path = target.path
    with asyncio.Runner() as runner:
        with redirect_stdout(sys.stderr), stage(f"starting an engine with {target.name}"):  # stdout has responses only
            entry, device = prepare(section, own["device"])
            from hybridrl.agents.endpoint.local import Conversation, SamplingOptions, make_kit, start

            kit = make_kit(section.model, section.rollout)
            conversation = Conversation(kit, SamplingOptions(max_tokens=options.max_tokens), options.system)
            if options.prompt is not None:
                conversation.with_text(options.prompt)
            policy = runner.run(start(entry, section.model, section.rollout, device, kit, schemas=False))

        def respond(text: str) -> None:
            text = text.encode(errors="replace").decode()  # input that is not UTF-8
            if not runner.run(conversation.respond(policy, text, _show)) and not conversation.continues:
                print(f"\n[cut off; --max-tokens={options.max_tokens}]", end="", file=sys.stderr, flush=True)
            _show("\n")

        if options.prompt is not None:
            respond(options.prompt)
            return 0
        if sys.stdin.isatty():
            kind = "it continues what you type" if conversation.continues else f"{RESET} forgets the conversation"
            print_text(f"{kind}; Ctrl-C stops a response, Ctrl-D ends (contexts of {kit.limits.context} tokens)")
        return converse(respond, conversation.reset)


def _show(text: str) -> None:
    with ended_by_closed_pipe():
        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def converse(respond: Callable[[str], None], reset: Callable[[], None]) -> int:
    """Respond to each line of the standard input until it ends, or until Ctrl-C at an empty prompt."""
    interactive = sys.stdin.isatty()
    while True:
        try:
            text = input("> " if interactive and sys.stdout.isatty() else "")
        except (EOFError, KeyboardInterrupt) as end:
            if not interactive and isinstance(end, KeyboardInterrupt):
                raise
            if interactive:
                print_text("", error=True)
            if isinstance(end, KeyboardInterrupt) and readline.get_line_buffer():
                continue
            return 0
        try:
            if text.strip() == RESET:
                reset()
            elif text.strip():
                respond(text)
        except (ConfigError, KeyboardInterrupt) as error:
            if not interactive:
                raise
            print_text(f"error: {error}" if isinstance(error, ConfigError) else "", error=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # what reads the terminal is not in the job that the shell would stop
    sys.exit(guarded(main))
