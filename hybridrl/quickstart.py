"""A first training, in the working directory: `hybridrl quickstart [--agent | --tool | --images]`"""

import argparse
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hybridrl import PACKAGE, project_file
from hybridrl.config.findings import ConfigError
from hybridrl.runtime import EXIT_INTERRUPTED, EXIT_REJECTED
from hybridrl.runtime.environment import reject_foreign_builds
from hybridrl.runtime.guard import end_with_parent, ended_by_closed_pipe


class Recipe(NamedTuple):
    """Files below recipes/; without a warm start the model is a pretrained one."""

    name: str
    directory: str
    make: str
    train: str
    show: str
    learning: str
    warmup: str = ""
    demonstrations: str = ""


SAMPLED = "sample 8 responses per problem, reinforce the right ones"
RECIPES = {
    "train": Recipe(
        "quickstart", "quickstart", "make_data.py", "train", "show.py", SAMPLED, "warmup",
        "most of them lazy and some careless",
    ),
    "agent": Recipe(
        "agent", "quickstart", "make_games.py", "agent", "show_games.py",
        "play 8 games per number, reinforce the short ones", "agent_warmup", "games of poor players",
    ),
    "tool": Recipe(
        "tool", "quickstart", "make_products.py", "tool", "show_products.py", SAMPLED, "tool_warmup",
        "most of them guesses without the tool",
    ),
    "images": Recipe(
        "pictures", "quickstart", "make_pictures.py", "pictures", "show_pictures.py",
        "name the colour of 32 pictures, 8 answers to each, reinforce the right ones", "pictures_warmup",
        "of somebody who does not look",
    ),
    "model": Recipe(
        "pretrained", "pretrained", "make_data.py", "train", "show.py",
        "sample 8 answers per question, reinforce the right name",
    ),
}  # fmt: skip
# The warm start of a recipe depends on its own files and on these.
CODE = ("core/trainer.py", "runs/sft.py", "data/*.py", "core/training/*.py")


def parser() -> argparse.ArgumentParser:
    text = "A small language model learns by reinforcement learning to reason before it answers. No GPU is needed."
    parser = argparse.ArgumentParser("hybridrl quickstart", description=text, epilog="All output is in outputs/.")
    task = parser.add_mutually_exclusive_group()
    for name, what in (
        ("agent", "the model learns to act over several turns: to find a number by guessing"),
        ("tool", "it learns to call a calculator"),
        ("images", "it learns to name the colour of pictures"),
    ):
        task.add_argument(f"--{name}", dest="task", action="store_const", const=name, help=what)
    task.add_argument("--model", metavar="MODEL", help="a pretrained model, a directory or hub name, learns to answer")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for hybridrl train")
    return parser


def run_command(command: Sequence[str], *, quiet: bool = False) -> int:
    """Run a command to its end and return its status, 128 + N for signal N; `quiet` shows its output only if it fails.
    Ctrl-C reaches the command as well; SIGTERM is passed on to it."""
    if quiet:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        sys.stderr.buffer.write(done.stdout if done.returncode else b"")
        return done.returncode
    prepared = partial(end_with_parent, os.getpid(), signal.SIGTERM)
    child = subprocess.Popen(command, preexec_fn=prepared)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    status = child.wait()
    return status if status >= 0 else 128 - status


def warm_start_key(recipe: Recipe, here: Path, seed: int) -> str:
    """Return a digest of what the warm start depends on."""
    names = dict.fromkeys(["make_data.py", "warmup.yaml", recipe.make, f"{recipe.warmup}.yaml"])
    code = [file for pattern in CODE for file in sorted(Path(PACKAGE).glob(pattern))]
    files = [*(here / name for name in names), *sorted(Path(project_file("conf")).glob("**/*.yaml")), *code]
    return f"{hashlib.sha256(b''.join(file.read_bytes() for file in files)).hexdigest()} seed {seed}\n"


def check_values(train: Sequence[str], run: Callable[..., int]) -> int:
    """Name rejected values before the warm start, which takes minutes; return the exit status, 0 without any."""
    try:
        rejected = run([sys.executable, "-m", "hybridrl", "doctor", "--config-only", *train], quiet=True)
        return EXIT_REJECTED if rejected else 0
    except KeyboardInterrupt:
        print("stopped (Ctrl-C); no process is left running")
        return EXIT_INTERRUPTED


def main(argv: list[str] | None = None, run: Callable[..., int] = run_command) -> int:
    options = (words := parser()).parse_args(argv)
    for word in options.overrides:
        if "=" not in word:
            words.error(f"unknown argument {word}")
        file = word.partition("=")[2].partition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            words.error(f"{word}: there is no file {file}")
    try:
        reject_foreign_builds()
    except ConfigError as error:
        words.exit(EXIT_REJECTED, f"error: {error}\n")
    recipe = RECIPES["model" if options.model else options.task or "train"]
    here, out = Path(project_file(f"recipes/{recipe.directory}")), Path("outputs", recipe.name)
    place, reward = ["--config-path", str(here), "--config-name"], "reward.custom_reward_function.path"
    train = [*place, recipe.train, f"trainer.seed={options.seed}"]
    if options.model:
        train += [f"actor_rollout_ref.model.path={options.model}"]
    if here != Path("recipes", recipe.directory) and recipe.train in ("train", "pictures"):
        train += [f"{reward}={here / 'reward.py'}"]
    train += options.overrides
    number, began = 0, time.monotonic()

    def stage(title: str, *words: str, hidden: Sequence[str] = ()) -> None:
        """Print and run a command; SystemExit with its status if it fails."""
        nonlocal number
        number += 1
        bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
        command = [sys.executable, "-m", *words] if words[0] == "hybridrl" else [sys.executable, *words]
        shown = shlex.join([*words] if words[0] == "hybridrl" else ["python", *words])
        print(f"\n{bold}{number}/{4 if recipe.warmup else 3}  {title}{plain}\n$ {shown}", flush=True)
        if status := run([*command, *hidden]):
            raise SystemExit(status)

    if options.overrides and (status := check_values(train, run)):
        return status
    make = (str(here / recipe.make), "--out", str(out / "data"))
    if not recipe.warmup:
        stage("Data: questions with their answers, some of them held out", *make)
    else:
        key_file, key = out / "warmup" / "key", warm_start_key(recipe, here, options.seed)
        if key_file.is_file() and key_file.read_text() == key:
            number = 2
            print("\n1/4  Data and 2/4  Warm start: from an earlier call")
            print(f"To create them again: rm -r {key_file.parent}")
        else:
            for directory in (out / "data", out / "warmup"):
                shutil.rmtree(directory, ignore_errors=True)
            title = "Data: a tiny model with its tokenizer, demonstrations for the warm start, problems to solve"
            stage(title, *make, "--seed", str(options.seed))
            title = f"Warm start: supervised fine-tuning on demonstrations, {recipe.demonstrations}"
            stage(title, "hybridrl", "sft", *place, recipe.warmup, f"trainer.seed={options.seed}")
            key_file.write_text(key)
    warm = time.monotonic() - began
    stage(f"Reinforcement learning: {recipe.learning}", "hybridrl", "train", *train)
    seconds = ["--warm-start-seconds", f"{warm:.0f}", "--seconds", f"{time.monotonic() - began:.0f}"]
    stage("Results", str(here / recipe.show), str(out), hidden=seconds if recipe.warmup else ())
    return 0


if __name__ == "__main__":
    with ended_by_closed_pipe():
        sys.exit(main())
