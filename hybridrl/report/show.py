"""Samples of a run in the terminal: `hybridrl show RUN [--step N] [--max-reward 0] [--group] [--tokens]`

Reads the files of tracking/records.py, and those that verl writes to its rollout_data_dir.
"""

import argparse
import contextlib
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.rule import Rule
from rich.text import Text

from hybridrl.config import ConfigError
from hybridrl.runs.directory import RunDirectory
from hybridrl.runtime import EXIT_REJECTED
from hybridrl.runtime.guard import ended_by_closed_pipe
from hybridrl.tracking.console import Terminal, print_text, printable, printable_json
from hybridrl.tracking.faults import fault_kind
from hybridrl.tracking.records import SampleRecord, by_group, read_records, record_files

UNLIKELY = ((0.01, "bold white on red"), (0.1, "red"), (0.5, "yellow"))  # a token's probability is below -> its style
ORDERS = {
    "file": lambda record: 0,
    "reward": lambda record: -math.inf if record.score is None else record.score,
    "advantage": lambda record: abs(record.episode.get("advantage") or 0.0),
    "length": lambda record: record.episode.get("sampled_tokens", len(record.response)),
}


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output has the samples only
            records = chosen_samples(options)
        shown, note = select(records, options)
    except ConfigError as error:
        print_text(f"error: {error}", error=True)
        return EXIT_REJECTED
    with ended_by_closed_pipe():
        if options.json:
            print(printable_json("".join(record.line() + "\n" for record in shown)), end="")
        else:
            print_samples(shown, records, tokens=options.tokens)
            print_text(note)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybridrl show",
        description="Show samples of a run, or of a directory that verl wrote.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run's directory, a directory of <step>.jsonl files, or one of these")
    add("--step", default="last", metavar="N", help="a step, last (the default) or all")
    add("--validation", action="store_true", help="validation samples instead of training samples")
    add("--min-reward", type=float, metavar="X", help="with at least this reward")
    add("--max-reward", type=float, metavar="X", help="with at most this reward")
    add("--row", type=int, metavar="N", help="of one row of the data; with --step all: how its responses change")
    add("--search", metavar="TEXT", help="whose prompt or response contains this text")
    add("--fault", action="store_true", help="that could not be scored")
    add("--sort", choices=ORDERS, default="file", help="largest first")
    add("--limit", type=_count, default=10, metavar="N", help="how many, with --group groups; 10 by default; 0: all")
    add("--group", action="store_true", help="all responses to the prompts of those, with how they compare")
    add("--tokens", action="store_true", help="color each token by its probability, where tokens were written")
    add("--json", action="store_true", help="the samples as they are in the file")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of samples")
    return int(text)


def chosen_samples(options: argparse.Namespace) -> list[SampleRecord]:
    """Return the samples of the chosen steps. Raises ConfigError if there are none."""
    run: Path = options.run
    if not run.exists():
        raise ConfigError(f"{run} does not exist", fix="name the directory of a run")
    name, key = ("samples", "validation") if options.validation else ("rollouts", "rollout")
    files = {0: run} if run.is_file() else RunDirectory(run).samples(name)
    if not files:
        others = record_files(run / "samples") and not options.validation
        fix = "add --validation" if others else f"trainer.{key}_data_dir keeps them, and is set by default"
        raise ConfigError(f"{run} has no {'validation ' * options.validation}samples", fix=fix)
    if run.is_file() and options.step != "last":
        raise ConfigError(f"--step={options.step}: {run} is the file of one step", fix="name its directory")
    if options.step == "last" or run.is_file():
        chosen = [max(files)]
    elif options.step == "all":
        chosen = list(files)
    elif not options.step.isdecimal() or int(options.step) not in files:
        there = f"{min(files)} to {max(files)}" if len(files) > 1 else str(min(files))
        raise ConfigError(
            f"--step={options.step}: there are no samples of that step", fix=f"those of steps {there} are there"
        )
    else:
        chosen = [int(options.step)]
    records = [record for step in chosen for record in read_records(files[step])]
    if not records:
        raise ConfigError(f"{', '.join(str(files[step]) for step in chosen)}: there is no sample in it")
    return records


def select(records: Sequence[SampleRecord], options: argparse.Namespace) -> tuple[list[SampleRecord], str]:
    """Return the samples that match the options, sorted (with `--group` their whole groups), and a note of how many are
    shown."""
    least, most, text = options.min_reward, options.max_reward, options.search

    def wanted(record: SampleRecord) -> bool:
        score = record.score
        return (
            (least is None or (score is not None and score >= least))
            and (most is None or (score is not None and score <= most))
            and (options.row is None or record.episode.get("row") == options.row)
            and (text is None or text in record.prompt or text in record.response)
            and (not options.fault or score is None)
            and (not options.tokens or options.group or "tokens" in record.episode)
        )

    chosen = sorted(filter(wanted, records), key=ORDERS[options.sort], reverse=options.sort != "file")
    if options.group:
        keys = list(dict.fromkeys(record.group for record in chosen))
        shown = keys[: options.limit or None]
        members = {key: [record for record in records if record.group == key] for key in shown}
        return [record for key in shown for record in members[key]], _note(len(shown), len(keys), "groups")
    shown = chosen[: options.limit or None]
    if not shown and options.tokens and not any("tokens" in record.episode for record in records):
        return (
            [],
            "no sample has tokens: trainer.rollout_tokens says of how many training samples per step they are kept",
        )
    return shown, _note(len(shown), len(chosen), "samples that match")


def _note(shown: int, there: int, what: str) -> str:
    if not there:
        return "no sample matches"
    return f"\n{shown} of {there} {what} are shown; --limit 0 shows all" if shown < there else ""


def print_samples(shown: Sequence[SampleRecord], records: Sequence[SampleRecord], *, tokens: bool) -> None:
    """Print samples grouped by prompt and step, in the order of the first of each group. Each group has its prompt and
    a comparison of all its rewards in `records` above it."""
    console = Terminal(highlight=False, soft_wrap=True)
    groups, whole, above = by_group(shown), by_group(records), ""
    prompts = list(dict.fromkeys(record.prompt for record in shown))
    for key, members in sorted(groups.items(), key=lambda item: prompts.index(item[1][0].prompt)):
        console.print(Rule(escape(f"step {members[0].step}, {_place(members[0])}"), align="left", style="dim"))
        if members[0].prompt != above:  # once for several groups
            console.print(_conversation(members[0]))
        above = members[0].prompt
        if len(whole[key]) > 1:
            console.print(Text(comparison(whole[key], len(members)), "dim"))
        for record in members:
            console.print(Text(facts(record), "bold cyan"))
            console.print(_tokens(record) if tokens and "tokens" in record.episode else Text(record.response))
    if shown and tokens:
        legend = (Text(f" below {bound:g} ", style) for bound, style in UNLIKELY)
        console.print(Text.assemble("\nprobability of a token ", *legend, (" not sampled ", "dim italic")))


def _place(record: SampleRecord) -> str:
    row, source = record.episode.get("row"), record.episode.get("data_source", "")
    return f"{source} row {row}" if row is not None else "prompt"


def _conversation(record: SampleRecord) -> Text:
    images = [f"\n{_picture(image, record.folder)}" for image in record.episode.get("images", ())]
    truth = ("\nground truth: ", "dim"), (str(record.truth), "dim")
    return Text.assemble((record.prompt, "green"), ("".join(images), "cyan"), *truth)


def _picture(image: dict[str, Any], folder: Path) -> str:
    if image.get("file") is None:
        return f"picture {image.get('digest')}"
    return f"{folder / image['file']}: {image['width']} x {image['height']} pixels"


def facts(record: SampleRecord) -> str:
    """Return a line with reward, advantage, length, stop reason, and reward components of a sample."""
    episode = record.episode
    advantage, length, stop = episode.get("advantage"), episode.get("sampled_tokens"), episode.get("stop")
    parts = [f"sample {episode['sample']}"] if "sample" in episode else []
    fault = str(episode.get("fault", "fault"))
    parts += [f"reward {record.score:g}" if record.score is not None else f"no score: {fault} ({fault_kind(fault)})"]
    parts += [f"advantage {advantage:+.3g}"] if advantage is not None else []
    parts += ["not trained on"] if episode.get("trained") is False else []
    parts += [f"{length} tokens"] if length is not None else []
    parts += [str(stop)] if stop not in (None, "completed") else []
    parts += [f"{len(episode['turns'])} turns"] if episode.get("turns") else []
    parts += [f"{name} {_short(value)}" for name, value in record.components.items()]
    return printable(", ".join(parts))


def comparison(members: Sequence[SampleRecord], shown: int) -> str:
    """Return mean and spread of the rewards of a whole group; `shown` of its responses are shown."""
    scores = [record.score for record in members if record.score is not None]
    part = f", of which {shown} {'is' if shown == 1 else 'are'} shown" if shown < len(members) else ""
    if not scores:
        return f"{len(members)} responses{part}, none with a score"
    spread = f", standard deviation {statistics.stdev(scores):.3g}" if len(scores) > 1 else ""
    flat = _lesson(members) if len(set(scores)) == 1 < len(scores) else ""
    return f"{len(members)} responses{part}, mean reward {statistics.fmean(scores):.3g}{spread}{flat}"


def _lesson(members: Sequence[SampleRecord]) -> str:
    """Describe what training learns from a group of equal rewards, by its advantages if the files have them."""
    if any(record.episode and "trained" not in record.episode for record in members):  # validation
        return "; all equal"
    advantages = [value for record in members if (value := record.episode.get("advantage")) is not None]
    if not advantages:
        return "; all equal, from which a group estimator such as GRPO learns nothing"
    return "; all equal" if any(advantages) else "; all equal, so that nothing is learned from them"


def _tokens(record: SampleRecord) -> Text:
    """Return the response, tokens styled by probability, and the largest difference of engine and trainer."""
    tokens = record.episode["tokens"]
    text = Text()
    for piece, log_prob, sampled in zip(tokens["texts"], tokens["log_probs"], tokens["sampled"], strict=False):
        style = next((style for bound, style in UNLIKELY if math.exp(log_prob) < bound), "")
        text.append(piece, style if sampled else "dim italic")
    if "train_log_probs" in tokens:
        gaps = [abs(a - b) for a, b in zip(tokens["log_probs"], tokens["train_log_probs"], strict=False)]
        text.append(f"\nlargest difference of log-probs, engine and trainer: {max(gaps, default=0.0):.2g}", "dim")
    return text


def _short(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


if __name__ == "__main__":
    sys.exit(main())
