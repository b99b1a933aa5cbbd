"""A conversation with a model, at a terminal or in a pipe: `hybridrl chat RUN_OR_MODEL`"""

import argparse
import asyncio
import readline
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

from hybridrl.agents.endpoint.serve import prepare, read_arguments
from hybridrl.config import ConfigError
from hybridrl.config.compose import as_override
from hybridrl.evaluation.targets import find_targets
from hybridrl.runtime import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REJECTED
from hybridrl.runtime.guard import ended_by_closed_pipe, guarded
from hybridrl.tracking.console import print_text, printable, stage

NAME, RESET = "RUN_OR_MODEL", "/reset"
PURPOSE = f"""Talk to a model. Ctrl-C stops a response, {RESET} forgets the conversation, Ctrl-D ends. A model without
a chat template continues texts. Each line of a piped input gets a response."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hybridrl chat", description=PURPOSE, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar=NAME, help="RUN, RUN:best, RUN:STEP, a checkpoint, a Hugging Face directory or a hub name")
    add("keys", nargs="*", default=[], metavar="key=value", help="keys of hybridrl serve, such as device=cpu")
    add("--prompt", metavar="TEXT", help="print one response to this text, and end")
    add("--max-tokens", metavar="N", help="the longest response (512)")
    add("--temperature", metavar="T", help="0 for the likeliest tokens (1.0)")
    add("--system", metavar="TEXT", help="the system message")
    try:
        return run(parser.parse_intermixed_args(argv))
    except ConfigError as error:
        print_text(f"error: {error}", error=True)
        return EXIT_REJECTED
    except KeyboardInterrupt:
        print_text("", error=True)
        return EXIT_INTERRUPTED
    except Exception as error:  # whatever an engine raises
        print_text(f"error: the engine failed: {type(error).__name__}: {error}", error=True)
        return EXIT_FAILED


def run(options: argparse.Namespace) -> int:
    """Start the engine, then respond to the prompt, or to each line of the input; return the exit status."""
    target = find_targets([options.model], key=NAME)[-1]
    values = {"model.path": target.path, "rollout.max_num_seqs": 1, "rollout.temperature": options.temperature}
    values["rollout.response_length"] = options.max_tokens
    keys = [f"{key}={as_override(value)}" for key, value in values.items() if value is not None]
    own, section = read_arguments([*keys, *options.keys])
    with asyncio.Runner() as runner:
        with redirect_stdout(sys.stderr), stage(f"starting an engine with {target.name}"):
            entry, device = prepare(section, own["device"])
            from hybridrl.agents.endpoint.local import TerminalChat, make_kit, start

            kit = make_kit(section.model, section.rollout)
            chat = TerminalChat(kit, section.rollout.response_length, options.system)
            chat.messages_with(options.prompt or "a")  # rejects a prompt that is too long
            policy = runner.run(start(entry, section.model, section.rollout, device, kit, schemas=False))

        def respond(text: str) -> None:
            if runner.run(chat.respond(policy, text.encode(errors="replace").decode(), _show)):
                print("\n[cut off: --max-tokens allows more]", end="", file=sys.stderr, flush=True)
            _show("\n")

        if options.prompt is None:
            return converse(respond, chat.reset)
        respond(options.prompt)
        return 0


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
    sys.exit(guarded(main))
