"""The tool quickstart's results: a response with its calls before and after, share of calls, time figures."""

import sys

from show import one_line
from show_episodes import show_episodes

from hybridrl.tracking.records import SampleRecord

WHAT_CHANGED = """\
Most demonstrations guess, though a calculator is there, and the model, which cannot multiply, imitates them. From a
reward of right or wrong only, it learned that the tool pays: to call it with the expression, and to copy its result."""
NEXT = """\
To try next on this machine, after

    source .venv/bin/activate

  Read its wrong responses, with their calls and the others to the same problems:
    hybridrl show {run} --max-reward 0 --group --limit 2

  The run's page, with all calls and their results within reach:
    hybridrl report {run} --serve

  Talk to the model, and stop it with Ctrl-C; in a second terminal, a problem, to which it responds with a call:
    hybridrl serve model.path={model} device=cpu
    curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{{"messages": [{{"role": "user", "content": "What is 76*48?"}}], "temperature": 0,
             "tools": [{{"type": "function", "function": {{"name": "calculator"}}}}]}}'

  A custom tool, once my_tools.py has a function calculator(expression) ({docs}/environments.md shows how to write one):
    hybridrl quickstart --tool 'actor_rollout_ref.rollout.multi_turn.tools=[]' \\
        actor_rollout_ref.rollout.multi_turn.function_tool_path=my_tools.py

  An agent: the same model learns a game of several turns:
    hybridrl quickstart --agent

With a GPU, the calculator on a real task: {recipes}/gsm8k/README.md."""


def response_line(record: SampleRecord) -> str:
    """Return a response in one line, with its calls and their results."""
    parts = []
    for message in record.episode["messages"][1:]:
        parts += [message["content"]] if message["content"] else []
        for call in message.get("tool_calls", ()):
            parts.append(f"{call['function']['name']}({', '.join(map(str, call['function']['arguments'].values()))})")
    return one_line(f"{' -> '.join(parts)}   {'right' if record.score == 1 else 'wrong'}")


def main() -> int:
    figures = {"calls per response": ("tool_call_counts/mean", 1.0)}

    def title(record: SampleRecord) -> str:
        return one_line(f"{record.episode['messages'][0]['content']}  (It is {record.truth}.)")

    return show_episodes("tool", 1.0, figures, title, response_line, WHAT_CHANGED, NEXT)


if __name__ == "__main__":
    sys.exit(main())
