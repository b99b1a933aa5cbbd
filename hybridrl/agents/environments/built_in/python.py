"""Python in the sandbox that runs the programs of rewards: no files, no network, limits of time and memory."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.agents.environments.environment import Schema, ToolError, schema_of_texts
from hybridrl.agents.environments.tools import Tool
from hybridrl.rewards.sandbox.run import ProgramLimits, check_sandbox, run

SCHEMA = schema_of_texts(
    "python",
    "Run Python code and return what it prints. The standard library can be imported.",
    code="The code to run.",
)
LAST_LINES = 3  # of a traceback
# Runs the earlier cells in silence, then the last one; a last expression is printed, and an exception is printed short.
_PROGRAM = """
import ast, contextlib, io, json, sys, traceback
cells = json.loads({cells!r})
names = {{"__name__": "__main__"}}
def execute(code):
    tree = ast.parse(code, "<cell>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        if value is not None:
            print(repr(value))
for cell in cells[:-1]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(BaseException):
        execute(cell)
try:
    execute(cells[-1])
except SystemExit:
    pass
except BaseException:
    lines = traceback.format_exc().rstrip().split("\\n")
    print("\\n".join(lines[-{last_lines}:]))
"""


class Python(Tool):
    """The tool `python`; with `stateful: true` in its configuration, names of earlier calls of the episode persist.

    `seconds` (5) and `memory_mb` (512) limit a call. State is kept by running the earlier cells again.
    """

    def __init__(self, config: Mapping[str, Any], schema: Schema = SCHEMA) -> None:
        super().__init__(schema)
        check_sandbox()
        self._seconds, self._memory = float(config.get("seconds", 5)), int(config.get("memory_mb", 512))
        self._stateful = bool(config.get("stateful", False))

    async def start(self, row: Mapping[str, Any]) -> list[str]:
        return []

    def call(self, state: list[str], arguments: dict[str, Any]) -> str:
        printed = run_python(arguments["code"], self._seconds, state, self._memory)
        if self._stateful:
            state.append(arguments["code"])
        return printed


def run_python(code: str, seconds: float = 5, earlier: Sequence[str] = (), memory_mb: int = 512) -> str:
    """Return what the code printed, after the cells of `earlier`; ToolError if it exceeded a limit."""
    program = _PROGRAM.format(cells=json.dumps([*earlier, code]), last_lines=LAST_LINES)
    printed = run(program, [""], ProgramLimits(seconds, memory_mb, total_seconds=2 * seconds + 5))[0]
    if printed is None:
        raise ToolError(
            f"Error: stopped at a limit: {seconds:g} s of computing, {memory_mb} MiB of memory, or 64 KiB printed"
        )
    return printed.rstrip("\n")
