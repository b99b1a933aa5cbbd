# PYTHON_ARGCOMPLETE_OK
"""`hybridrl COMMAND ...`: all commands under one name; each is also `python -m` with its module."""

import difflib
import os
import pkgutil
import runpy
import sys

from hybridrl.runtime import EXIT_REJECTED

# Imports nothing but the module of the command, so that --help and completion are quick.
COMMANDS = {
    "quickstart": ("hybridrl.quickstart", "see a small model learn, in minutes:  hybridrl quickstart"),
    "train": ("hybridrl.main_ppo", "train by reinforcement learning:  hybridrl train key=value ..."),
    "sft": ("hybridrl.main_sft", "fine-tune on demonstrations:  hybridrl sft key=value ..."),
    "sweep": ("hybridrl.main_ppo", "train with each of several values:  hybridrl sweep key=a,b"),
    "eval": ("hybridrl.main_eval", "evaluate models on questions:  hybridrl eval eval.models=[RUN] eval.files=FILE"),
    "show": ("hybridrl.report.show", "read samples of a run:  hybridrl show RUN --max-reward 0 --group"),
    "chat": ("hybridrl.chat", "talk to a run's model, or another one:  hybridrl chat RUN"),
    "serve": ("hybridrl.serve", "serve a model with OpenAI's API:  hybridrl serve model.path=DIR"),
    "doctor": ("hybridrl.doctor", "check a command, explain a key, say why a run ended:  hybridrl doctor why RUN"),
    "report": ("hybridrl.report", "write the page of a run, or compare several:  hybridrl report RUN [RUN2 ...]"),
    "merge": (
        "hybridrl.model_merger",
        "write a checkpoint as a Hugging Face directory:  hybridrl merge --local_dir DIR",
    ),
}
USAGE = "usage: hybridrl COMMAND ...\n\n" + "".join(f"  {name:11}{what}\n" for name, (_, what) in COMMANDS.items())
USAGE += "{further}\nhybridrl COMMAND --help says more; hybridrl --version prints the version."


def main() -> int:
    """Run the command that the first argument names, with the other arguments."""
    further = pkgutil.resolve_name("hybridrl.plugins:additions")("command", COMMANDS)
    if "_ARGCOMPLETE" in os.environ:
        uses = pkgutil.resolve_name("hybridrl.doctor.__main__:uses")()
        pkgutil.resolve_name("hybridrl.runtime.completion:answer_shell")([*COMMANDS, *further], uses)
    arguments = sys.argv[1:]
    first = arguments.pop(0) if arguments else ""
    usage = USAGE.format(further="".join(f"  {name:11}{module}\n" for name, module in further.items()))
    if first in ("-V", "--version"):
        print("hybridrl", pkgutil.resolve_name("hybridrl:__version__"))
        return 0
    if first in ("-h", "--help", "help"):
        with pkgutil.resolve_name("hybridrl.runtime.guard:ended_by_closed_pipe")():
            print(usage)
        return 0
    if first not in (*COMMANDS, *further):
        near = "".join(f"; {name}?" for name in difflib.get_close_matches(first, [*COMMANDS, *further], n=1))
        if first in pkgutil.resolve_name("hybridrl.doctor.__main__:uses")():
            near = f"; hybridrl doctor {first}?"
        print(f"error: there is no command {first}{near} (hybridrl --help lists them)" if first else usage)
        return EXIT_REJECTED
    module = COMMANDS[first][0] if first in COMMANDS else further[first]
    if first == "sweep":
        arguments = ["--multirun", *arguments]
    if first == "merge" and arguments[:1] not in (["merge"], ["test"]):
        arguments = ["merge", *arguments]
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
