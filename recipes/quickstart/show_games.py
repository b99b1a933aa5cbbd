"""The agent quickstart's results: a game before and after, reward against the best possible, time figures.

Exits with status 1 if the run did not reach 90% of the best possible reward.
"""

import json
import sys
from pathlib import Path
from typing import Any

from make_games import GUESSES, HIGH, LOW
from show import next_page, read_arguments, seconds_page

from hybridrl.environments.built_in.games import best_guessing
from hybridrl.tracking import read_metrics
from hybridrl.tracking.change import change_of

REWARD, WON, LEAST = "critic/score/mean", "environment/won", 0.9
WHAT_CHANGED = """\
The demonstrations often try the lowest number that is left, and the model imitates them. From a reward for finding
the number in {guesses} guesses, less a little for each wrong one, it learned to bisect. All that it knows of the number
it reads from its environment, turn by turn: "low" or "high"."""
NEXT = """\
To try next on this machine, after

    source .venv/bin/activate

  Read its games: those that it lost, with the others for the same numbers:
    hybridrl show {run} --max-reward 0 --group --limit 2

  The run's page, with all games within reach:
    hybridrl report {run} --serve

  Play with the model, and stop it with Ctrl-C; in a second terminal, a first guess:
    hybridrl serve model.path={model} device=cpu
    curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{{"messages": [{{"role": "user", "content": "?"}}], "temperature": 0}}'

  A custom game, once my_game.py has it (docs/environments.md shows how to write one):
    bash scripts/quickstart.sh --agent actor_rollout_ref.rollout.multi_turn.environment=my_game.py:MyGame

With a GPU, a tool on a real task: recipes/gsm8k/README.md."""


def games(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def game_page(name: str, game: dict[str, Any]) -> str:
    """Return a game in one line: each guess with what the environment said of it."""
    said = [message["content"] for message in game["episode"]["messages"][1:]]
    guesses = said[::2]
    hints = [*said[1::2], "right" if game["score"] > 0 else "lost"]
    shown = ", ".join(f"{guess} {hint}" for guess, hint in zip(guesses, hints, strict=False))
    return f"    {name:<8}{''.join(c if c.isprintable() else '?' for c in shown)}"


def example_page(directory: Path, first: int, last: int) -> str:
    """Return the validation game of a number that was not found before and is found after, else of any."""
    pairs = list(zip(games(directory / f"{first}.jsonl"), games(directory / f"{last}.jsonl"), strict=True))
    before, after = next((pair for pair in pairs if pair[0]["score"] < 0 < pair[1]["score"]), pairs[0])
    lines = [f"  The number is {before['gts']}, of {LOW} to {HIGH}", game_page("before", before)]
    return "\n".join([*lines, game_page("after", after)])


def main() -> int:
    arguments = read_arguments("Show what a run of the agent quickstart has learned.")
    run_dir: Path = arguments.run_dir
    metrics = read_metrics(run_dir)
    trained = [values for values in metrics.values() if REWARD in values]
    validated = [step for step, values in metrics.items() if "timing_s/testing" in values]
    if not trained or len(validated) < 2:
        sys.exit(f"{run_dir}/metrics.jsonl: no step between two validations, so there is nothing to compare")
    best = best_guessing(LOW, HIGH, max_turns=GUESSES)
    reward, won = (change_of(key, [step[key] for step in trained]) for key in (REWARD, WON))
    reached = reward.after >= LEAST * best
    figures = [
        f"  sampled games (step 1; last {reward.count} steps)   before    after     best",
        f"    mean reward                       {reward.before:8.3f} {reward.after:8.3f} {best:8.3f}",
        f"    share of numbers found            {won.before:8.3f} {won.after:8.3f} {1:8.3f}",
    ]
    pages = [example_page(run_dir / "samples", validated[0], validated[-1]), "\n".join(figures)]
    pages.append(WHAT_CHANGED.format(guesses=GUESSES))
    if arguments.seconds:
        pages.append(seconds_page(run_dir, arguments.seconds, arguments.warm_start_seconds))
    pages += [f"Everything about the run, with its curves and games: {run_dir}/report.html", next_page(NEXT, run_dir)]
    if not reached:
        pages.append(f"This run did not reach the expected result: {LEAST:.0%} of the best possible mean reward.")
    print("\n\n".join(pages))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
