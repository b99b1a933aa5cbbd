# PYTHON_ARGCOMPLETE_OK
"""`hybridrl COMMAND ...`: all commands under one name."""

import difflib
import os
import pkgutil
import runpy
import sys
from functools import partial

from hybridrl.runtime import EXIT_REJECTED

# By what one wants to do: the module of each command, whose program it is (none: it is in the doctor's table), and its
# purpose. Only the module of the command is imported, so that --help and completion are quick.
GROUPS = {
    "train": {
        "quickstart": ("hybridrl.quickstart", "watch a small model learn, in minutes"),
        "train": ("hybridrl.main_ppo", "reinforcement learning: hybridrl train key=value ..."),
        "sft": ("hybridrl.main_sft", "supervised fine-tuning on demonstrations"),
        "rm": ("hybridrl.main_rm", "train a reward model on pairs of responses"),
        "sweep": ("hybridrl.main_ppo", "train with several values: hybridrl sweep key=a,b ..."),
        "launch": ("hybridrl.launch", "train on machines of Slurm, ssh, KubeRay or SkyPilot"),
    },
    "watch": {
        "report": ("hybridrl.report", "the page of a run, or of several; --live while it runs"),
        "show": ("hybridrl.report.show", "samples: hybridrl show RUN --max-reward 0 --group"),
        "why": ("", "how a run is or why it ended, and the next command"),
        "checkpoints": ("", "the checkpoints of a run: age, size, health, score"),
    },
    "use": {
        "chat": ("hybridrl.chat", "talk to a model: hybridrl chat RUN_OR_MODEL"),
        "eval": ("hybridrl.main_eval", "evaluate and compare models on questions"),
        "serve": ("hybridrl.serve", "serve a model with OpenAI's API"),
        "merge": ("hybridrl.model_merger", "write a checkpoint as a Hugging Face directory"),
    },
    "check": {
        "doctor": ("hybridrl.doctor", "check a command without starting it; more checks"),
        "explain": ("", "a key, a metric, or all keys with a word: explain lr"),
        "rescore": ("", "score stored responses again, with another reward"),
        "migrate": ("", "translate a launch script of verl, SkyRL or AReaL"),
    },
    "repair": {
        "bundle": ("", "pack what a bug report needs of a run"),
        "clean": ("", "remove what dead runs have left on this machine"),
        "stacks": ("hybridrl.runtime.stacks", "what each thread of a process is doing"),
        "retriever": ("hybridrl.environments.retriever", "serve a corpus to the search tools of agents"),
    },
}
COMMANDS = {name: module for group in GROUPS.values() for name, (module, _) in group.items()}


def main() -> int:
    """Run the command that the first argument names, with the other arguments."""
    further = pkgutil.resolve_name("hybridrl.plugins:additions")("command", COMMANDS)
    if "_ARGCOMPLETE" in os.environ:
        uses = pkgutil.resolve_name("hybridrl.doctor.__main__:uses")()
        pkgutil.resolve_name("hybridrl.runtime.completion:answer_shell")([*COMMANDS, *further], uses)
    arguments = sys.argv[1:]
    first = arguments.pop(0) if arguments else ""
    if first in ("-V", "--version"):
        print("hybridrl", pkgutil.resolve_name("hybridrl:__version__"))
        return 0
    if first == "help" and arguments:
        first, arguments = arguments[0], ["--help"]
    if first in ("-h", "--help", "help"):
        with pkgutil.resolve_name("hybridrl.runtime.guard:ended_by_closed_pipe")():
            print(usage(further))
        return 0
    if first not in (*COMMANDS, *further):
        near = "".join(f"; {name}?" for name in difflib.get_close_matches(first, [*COMMANDS, *further], n=1))
        if first in pkgutil.resolve_name("hybridrl.doctor.__main__:uses")():
            near = f"; hybridrl doctor {first}?"
        text = f"error: there is no command {first}{near} (hybridrl --help lists them)" if first else usage(further)
        print(text, file=sys.stderr)
        return EXIT_REJECTED
    if COMMANDS.get(first) == "":
        guarded = pkgutil.resolve_name("hybridrl.runtime.guard:guarded")
        return guarded(partial(pkgutil.resolve_name("hybridrl.doctor.__main__:command"), first, arguments))
    if first == "sweep":
        arguments = ["--multirun", *arguments]
    if first == "merge" and arguments[:1] not in (["merge"], ["test"]):
        arguments = ["merge", *arguments]
    sys.argv[1:] = arguments
    runpy.run_module({**COMMANDS, **further}[first], run_name="__main__", alter_sys=True)
    return 0


def usage(further: dict[str, str]) -> str:
    """Return a line per command; `further`: the modules of those that other distributions add."""
    lines = ["usage: hybridrl COMMAND ...  (--version; hybridrl COMMAND --help says more)", ""]
    groups = GROUPS | ({"others": {name: (module, module) for name, module in further.items()}} if further else {})
    for group, commands in groups.items():
        for title, (name, (_, purpose)) in zip([group, *[""] * len(commands)], commands.items(), strict=False):
            lines.append(f"  {title:8}{name:13}{purpose}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
