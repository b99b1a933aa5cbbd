"""The agent quickstart's results: a game before and after, reward against the best possible, time figures."""

import sys

from make_games import GUESSES, HIGH, LOW
from show import one_line
from show_episodes import show_episodes

from hybridrl.agents.environments.built_in.games import best_guessing
from hybridrl.tracking.records import SampleRecord

WHAT_CHANGED = f"""\
The demonstrations often try the lowest number that is left, and the model imitates them. From a reward for finding
the number in {GUESSES} guesses, less a little for each wrong one, it learned to bisect. All that it knows of the number
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

  A custom game, once my_game.py has it ({docs}/environments.md shows how to write one):
    hybridrl quickstart --agent actor_rollout_ref.rollout.multi_turn.environment=my_game.py:MyGame

  A tool: the same model learns that calling a calculator pays:
    hybridrl quickstart --tool

With a GPU, a tool on a real task: {recipes}/gsm8k/README.md."""


def game_line(game: SampleRecord) -> str:
    """Return a game in one line: each guess with what the environment said of it."""
    said = [message["content"] for message in game.episode["messages"][1:]]
    hints = [*said[1::2], "right" if (game.score or 0) > 0 else "lost"]
    return one_line(", ".join(f"{guess} {hint}" for guess, hint in zip(said[::2], hints, strict=False)))


def main() -> int:
    best = best_guessing(LOW, HIGH, max_turns=GUESSES)
    figures = {"share of numbers found": ("environment/won", 1.0)}

    def title(game: SampleRecord) -> str:
        return f"The number is {game.truth}, of {LOW} to {HIGH}"

    return show_episodes("agent", best, figures, title, game_line, WHAT_CHANGED, NEXT)


if __name__ == "__main__":
    sys.exit(main())
