"""All comparisons of docs/benchmarks.md: `python scripts/benchmark/all.py [NAME ...] [--peer PYTHON] [--out DIR]`

Runs one script after another, each in a separate process, on a machine that should be otherwise idle. Writes to DIR the
JSON of each and, for all results so far, benchmarks.md (the tables) and benchmarks.png (every value next to its
target). With --docs the tables in that file, with the rows that have a target, and the picture next to it are replaced.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from matplotlib import pyplot
from side_by_side import Row, table

HERE = Path(__file__).absolute().parent
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
MICRO_BATCHES = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"
# By name: the title of its tables, and its command.
SCRIPTS = {
    "planning": ("Planning, advantages, attention", ["planning.py"]),
    "trees": ("Rows that begin alike", ["trees.py"]),
    "log_probs": ("Head and log-probs", ["log_probs.py"]),
    "data_plane": ("Rows between driver and ranks", ["data_plane.py"]),
    "start_up": ("Start-up", ["start_up.py"]),
    "export": ("Export", ["export.py"]),
    "weight_sync": ("Weight sync, 0.5 B", ["weight_sync.py"]),
    "threads": ("Threads that wait", ["threads.py"]),
    "evaluation": ("Evaluation against vLLM alone", ["evaluation.py"]),
    "step": ("A step of 25 M parameters", ["step.py", "--rounds", "2", MICRO_BATCHES]),
    "quickstart": ("A step of the quickstart", ["step.py", "--case", "quickstart", "--slots", "2", "--rounds", "3"]),
}
WITH_PEER = ("step", "quickstart")  # are compared with TRL as well if --peer is given


def run(name: str, out: Path, peer: str, tiny: bool) -> bool:
    script, *more = SCRIPTS[name][1] + ["--tiny"] * tiny
    if peer and name in WITH_PEER:
        more = ["--peer", peer, *more]
    command = [sys.executable, str(HERE / script), "--json", str(out / f"{name}.json"), *more]
    print("$", " ".join(command), flush=True)
    return subprocess.run(command).returncode == 0


def load_results(out: Path) -> dict[str, dict]:
    return {name: json.loads(file.read_text()) for name in SCRIPTS if (file := out / f"{name}.json").is_file()}


def rows_of(result: dict) -> list[Row]:
    return [Row(**row) for row in result["rows"]]


def tables(results: dict[str, dict], targets_only: bool = False) -> str:
    text = []
    for name, result in results.items():
        rows = [row for row in rows_of(result) if row.target or not targets_only]
        if not rows:
            continue
        ran = re.sub(r"--peer \S+", "--peer PYTHON", result["command"])
        command = f"`python scripts/benchmark/{ran}` on {result['machine']}"
        text += [f"### {SCRIPTS[name][0]}", "", command, "", table(rows), ""]
    return "\n".join(text)


def picture(results: dict[str, dict], file: Path) -> None:
    """Draw each value relative to its target on a logarithmic axis; the target is met from 1 on."""
    rows = [row for result in results.values() for row in rows_of(result) if row.within is not None]
    figure, axes = pyplot.subplots(figsize=(10, 0.32 * len(rows) + 1))
    colours = ["#4477aa" if row.within >= 1 else "#cc6677" for row in rows]
    axes.barh(range(len(rows)), [row.within - 1 for row in rows], left=1, color=colours)
    axes.set_yticks(range(len(rows)), [row.what[:70] for row in rows], fontsize=7)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times better than its target")
    axes.invert_yaxis()
    figure.savefig(file, dpi=100, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*SCRIPTS, "all"], default="all", help="scripts to run")
    parser.add_argument("--peer", default="", help="the Python of an environment with TRL (trl_peer.py)")
    parser.add_argument("--tiny", action="store_true", help="each with --tiny")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark"))
    parser.add_argument("--docs", type=Path, help="file with the markers between which the tables are written")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = list(SCRIPTS) if "all" in options.names else options.names
    failed = [name for name in names if not run(name, options.out, options.peer, options.tiny)]
    results = load_results(options.out)
    (options.out / "benchmarks.md").write_text(tables(results))
    picture(results, options.out / "benchmarks.png")
    if options.docs:
        before, _, rest = options.docs.read_text().partition(BEGIN)
        options.docs.write_text(
            f"{before}{BEGIN}\n\n{tables(results, targets_only=True)}\n{END}{rest.partition(END)[2]}"
        )
        picture(results, options.docs.with_suffix(".png"))
    if failed:
        sys.exit(f"failed, so their results are old or missing: {', '.join(failed)}")


if __name__ == "__main__":
    main()
