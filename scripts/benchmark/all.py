"""All comparisons of docs/performance.md: `python scripts/benchmark/all.py [NAME ...] [--peer PYTHON] [--out DIR]`

Runs one script after another, each in a process of its own, on a machine that should have nothing else to do. Writes to
DIR each one's JSON and, of all that were measured so far, performance.md (the tables) and performance.png (every value
beside its bar). With --docs the tables in that file are replaced, and the picture beside it.
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
PASSES = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"
# By name: what it is called in the tables, and its command.
SCRIPTS = {
    "planning": ("Planning, advantages, attention", ["planning.py"]),
    "log_probs": ("Head and log-probs", ["log_probs.py"]),
    "data_plane": ("Rows between driver and ranks", ["data_plane.py"]),
    "start_up": ("Start-up", ["start_up.py"]),
    "export": ("Export", ["export.py"]),
    "hand_over": ("Hand-over, 0.5 B", ["hand_over.py"]),
    "threads": ("Threads that wait", ["threads.py"]),
    "step": ("A step of 25 M parameters", ["step.py", "--rounds", "3", PASSES]),
    "step_trl": ("A step of 25 M parameters beside TRL", ["step.py", "--no-bare", "--rounds", "3", PASSES]),
    "quickstart_trl": (
        "A step of the quickstart beside TRL, 2 slots",
        ["step.py", "--no-bare", "--case", "quickstart", "--slots", "2"],
    ),
}
WITH_PEER = ("step_trl", "quickstart_trl")


def run(name: str, out: Path, peer: str) -> bool:
    script, *more = SCRIPTS[name][1]
    if name in WITH_PEER:
        more = ["--peer", peer, *more]
    command = [sys.executable, str(HERE / script), "--json", str(out / f"{name}.json"), *more]
    print("$", " ".join(command), flush=True)
    return subprocess.run(command).returncode == 0


def found(out: Path) -> dict[str, dict]:
    return {name: json.loads(file.read_text()) for name in SCRIPTS if (file := out / f"{name}.json").is_file()}


def rows_of(result: dict) -> list[Row]:
    return [Row(**row) for row in result["rows"]]


def tables(results: dict[str, dict]) -> str:
    text = []
    for name, result in results.items():
        ran = re.sub(r"--peer \S+", "--peer PYTHON", result["command"])
        command = f"`python scripts/benchmark/{ran}` on {result['machine']}"
        text += [f"### {SCRIPTS[name][0]}", "", command, "", table(rows_of(result)), ""]
    return "\n".join(text)


def picture(results: dict[str, dict], file: Path) -> None:
    """How far each value keeps to its bar, on a logarithmic axis: it does where its bar reaches beyond 1."""
    rows = [row for result in results.values() for row in rows_of(result) if row.within is not None]
    figure, axes = pyplot.subplots(figsize=(10, 0.32 * len(rows) + 1))
    colours = ["#4477aa" if row.within >= 1 else "#cc6677" for row in rows]
    axes.barh(range(len(rows)), [row.within - 1 for row in rows], left=1, color=colours)
    axes.set_yticks(range(len(rows)), [row.what[:70] for row in rows], fontsize=7)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times better than its bar")
    axes.invert_yaxis()
    figure.savefig(file, dpi=100, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*SCRIPTS, "all"], default="all", help="which")
    parser.add_argument("--peer", default="", help="the Python of an environment with TRL (trl_peer.py)")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark"))
    parser.add_argument("--docs", type=Path, help="file between whose marks the tables are written")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in SCRIPTS if given.peer or name not in WITH_PEER] if "all" in given.names else given.names
    if not given.peer and set(names) & set(WITH_PEER):
        parser.error(f"{' and '.join(WITH_PEER)} need --peer, the Python of an environment with TRL (trl_peer.py)")
    failed = [name for name in names if not run(name, given.out, given.peer)]
    results = found(given.out)
    (given.out / "performance.md").write_text(tables(results))
    picture(results, given.out / "performance.png")
    if given.docs:
        before, _, rest = given.docs.read_text().partition(BEGIN)
        given.docs.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n{END}{rest.partition(END)[2]}")
        picture(results, given.docs.with_suffix(".png"))
    if failed:
        sys.exit(f"failed, so their figures are old or missing: {', '.join(failed)}")


if __name__ == "__main__":
    main()
