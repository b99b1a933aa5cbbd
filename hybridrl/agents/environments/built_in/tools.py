"""Tools: a calculator, which is arithmetic of numbers without eval; Python in the sandbox that runs the programs of
rewards, with no files, no network, limits of time and memory; search, by a client of Search-R1's retrieval protocol;
and SQL over sqlite databases, read only, in processes. The last two with SkyRL's environments."""

import ast
import json
import math
import operator
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.agents.environments import (
    Environment,
    EpisodeFault,
    Response,
    Schema,
    Step,
    ToolError,
    column,
    ground_truth,
    schema_of_texts,
)
from hybridrl.agents.environments.built_in import sql_query
from hybridrl.agents.environments.built_in.sql_query import SECONDS
from hybridrl.agents.environments.function_process import FunctionProcesses
from hybridrl.agents.environments.tools import Tool
from hybridrl.agents.environments.user_code import ToolResult, finished
from hybridrl.rewards.sandbox.run import ProgramLimits, check_sandbox, run
from hybridrl.rewards.score import OutOfTime
from hybridrl.rewards.scorers.short_answers import score_search_qa, tagged

CALCULATOR = schema_of_texts(
    "calculator",
    "Evaluate an arithmetic expression, such as (3 + 4) * 2.5.",
    expression="Numbers, + - * / // % ** and parentheses; sqrt, log, exp, sin, cos, tan, floor, ceil, round, abs, min, "
    "max; pi, e.",
)
PYTHON = schema_of_texts(
    "python",
    "Run Python code and return what it prints. The standard library can be imported.",
    code="The code to run.",
)
LAST_LINES = 3  # shown of a traceback
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
LONGEST, LARGEST_BITS, DIGITS = 1000, 10_000, 12
OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _power(base, exponent),
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "log", "log2", "log10", "exp", "sin", "cos", "tan", "gcd")},
    **{"floor": math.floor, "ceil": math.ceil, "abs": abs, "min": min, "max": max},
    "round": lambda number, *digits: _round(number, *digits),
}
CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator(Tool):
    """The tool `calculator`."""

    def __init__(self, config: Mapping[str, Any], schema: Schema = CALCULATOR) -> None:
        super().__init__(schema)

    async def call(self, state: None, arguments: dict[str, Any]) -> str:
        return calculate(arguments["expression"])


def calculate(expression: str) -> str:
    """Return the value with 12 significant digits; ToolError says what cannot be calculated."""
    if len(expression) > LONGEST:
        raise ToolError(f"Error: the expression has {len(expression)} characters; at most {LONGEST} are allowed")
    text = expression.replace("^", "**").replace("\u00d7", "*").replace("\u00f7", "/")
    if "(" not in text:  # no arguments: commas separate thousands
        text = text.replace(",", "")
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
        if isinstance(value, int):
            return str(value)
        return f"{value:.{DIGITS}g}"
    except SyntaxError:
        raise ToolError(f"Error: {expression!r:.80} is not an arithmetic expression") from None
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ToolError(f"Error: {error}") from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_value(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return _bounded(OPERATIONS[type(operation)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _bounded(FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"{ast.unparse(node)!r:.80} cannot be calculated")


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
        raise ValueError(f"a number of more than {LARGEST_BITS} bits is too large")
    return value


def _round(number: Any, digits: int | None = None) -> Any:
    """A rounded number. Rounding to 10,000 places before the decimal point gives 0 too, but in an acceptable time."""
    return round(number, max(digits, -LARGEST_BITS) if isinstance(digits, int) else digits)


def _power(base: Any, exponent: Any) -> Any:
    """A power whose result is of a bounded size; a negative base with a fraction has no real one."""
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and base.bit_length() * abs(exponent) > LARGEST_BITS
        and abs(base) > 1
    ):
        raise ValueError(f"{base}**{exponent} is too large".replace("\n", " ")[:100])
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError(f"{base}**{exponent} is not a real number")
    return result


class Python(Tool):
    """The tool `python`; with `stateful: true` in its configuration, names of earlier calls of the episode persist.

    `seconds` (5) and `memory_mb` (512) limit a call. State is kept by running the earlier cells again.
    """

    def __init__(self, config: Mapping[str, Any], schema: Schema = PYTHON) -> None:
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


SEARCH = schema_of_texts("search", "Search passages of text.", query="What to search for.")
SQL = schema_of_texts(
    "sql",
    "Run one SQL query (sqlite, read only) on the database of the question and return its rows.",
    query="The query.",
)
SECONDS_TO_COMPARE = 2 * SECONDS  # for a solution and the true query together
FOLDERS = {"synsql": "SynSQL-2.5M/databases", "spider": "spider/database", "bird": "bird/train/train_databases"}
URL = "http://127.0.0.1:8000/retrieve"
MAX_BYTES = 8 << 20  # in a retriever's answer


class Searcher:
    """A retriever at a URL: POST {queries, topk, return_scores} -> {result: for each query [{document, score}]}."""

    def __init__(self, url: str = URL, topk: int = 3, seconds: float = 30) -> None:
        self._url, self._topk, self._seconds = url, int(topk), float(seconds)

    def texts(self, queries: Sequence[str]) -> list[str]:
        """Return the passages for each query as one text; an exception of urllib if there is no retriever."""
        body = {"queries": list(queries), "topk": self._topk, "return_scores": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self._seconds) as answer:
            content = answer.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConnectionError(f"the retriever at {self._url} returned more than {MAX_BYTES >> 20} MiB")
        results = json.loads(content)["result"]
        return [_as_text(passages) for passages in results]


class Search(Tool):
    """The tool `search`; its configuration may have `search_url`, `topk` (3) and `timeout` in seconds (30)."""

    network = True

    def __init__(self, config: Mapping[str, Any], schema: Schema = SEARCH) -> None:
        super().__init__(schema)
        self._searcher = searcher(config)

    def call(self, state: None, arguments: dict[str, Any]) -> str:
        return self._searcher.texts([arguments["query"]])[0]


def searcher(config: Mapping[str, Any]) -> Searcher:
    """The retriever that a configuration names."""
    return Searcher(config.get("search_url", URL), config.get("topk", 3), config.get("timeout", 30))


def _as_text(passages: list[Mapping[str, Any]]) -> str:
    """Number the passages; the first line of a passage's contents is its title."""
    lines = []
    for number, passage in enumerate(passages, start=1):
        title, _, text = passage["document"]["contents"].partition("\n")
        lines.append(f"Doc {number}(Title: {title.strip()}) {text.strip()}")
    return "\n".join(lines) or "Nothing was found."


_processes = FunctionProcesses(f"pkg://{sql_query.__name__}", (), 4 * SECONDS_TO_COMPARE)


def database_of(row: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The file of the row's database: `db_path` of the row, or `db_id` below `db_path` of the configuration."""
    name = column(row, "db_id")
    path = Path(str(column(row, "db_path", ".", config)))
    below = path / FOLDERS.get(str(column(row, "data")), "")
    places = [path, below / f"{name}/{name}.sqlite", path / f"{name}/{name}.sqlite", path / f"{name}.sqlite"]
    for place in places:
        if place.is_file():
            return str(place)
    raise FileNotFoundError(f"no database of db_id={name}: there is no file {places[1]}; set db_path")


def run_query(database: str, sql: str, seconds: float = SECONDS) -> ToolResult:
    """Return the rows of a query, which runs in another process; ToolError or OutOfTime says why there are none."""
    arguments = {"database": database, "sql": sql, "seconds": seconds}
    return _processes.call("table", arguments, 2 * seconds)  # sqlite ends most queries before


class Sql(Tool):
    """The tool `sql` for rows with `db_id`, or `db_path` of a file; its configuration may have `db_path`, `seconds`."""

    def __init__(self, config: Mapping[str, Any], schema: Schema = SQL) -> None:
        super().__init__(schema)
        self._config = dict(config)

    def start(self, row: Mapping[str, Any]) -> str:
        return database_of(row, self._config)

    def call(self, state: str, arguments: dict[str, Any]) -> ToolResult:
        return run_query(state, arguments["query"], float(self._config.get("seconds", SECONDS)))


class SearchQuestions(Environment):
    """SkyRL's environment: text in <search> tags is searched, and <answer> ends the episode.

    Reward 1 if the last answer is one of `ground_truth.target` up to case, articles and punctuation, else 0.
    `max_turns` (2) of the row or of the configuration; the latter is otherwise that of the tool.
    """

    def __init__(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        super().__init__(config, row)
        self._searcher = searcher(config)
        self._most = int(column(row, "max_turns", 2, config))
        self._texts: list[str] = []

    async def step(self, response: Response) -> Step:
        self._texts.append(response.text)
        if len(self._texts) >= self._most or tagged(response.text, "answer"):
            return Step(reward=score_search_qa("".join(self._texts), ground_truth(self.row)), done=True)
        queries = tagged(response.text, "search")
        if not queries:
            information = "Nothing was searched: write a query in <search> tags, or the answer in <answer> tags."
        else:
            information = (await finished(self._searcher.texts, [queries[0].strip()]))[0]
        return Step([{"role": "user", "content": f"\n<information>{information}</information>\n"}], reward=0.0)


class TextToSql(Environment):
    """SkyRL's environment: queries in <sql> tags are answered, and <solution> ends the episode.

    Reward 1 if the solution returns the rows of `reward_spec.ground_truth` in any order, else 0; -1 without exactly one
    solution, or without <think>. `max_turns` (5) of the row, or of the configuration.
    """

    def __init__(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        super().__init__(config, row)
        self._database = database_of(row, config)
        self._truth = str(ground_truth(row))
        self._most = int(column(row, "max_turns", 5, config))
        self._texts: list[str] = []

    def step(self, response: Response) -> Step:
        self._texts.append(response.text)
        if len(self._texts) >= self._most or tagged(response.text, "solution"):
            return Step(reward=self._reward("".join(self._texts)), done=True)
        queries = tagged(response.text, "sql")
        left = f"<reminder>You have {self._most - len(self._texts)} turns left to complete the task.</reminder>"
        content = f"\n\n<observation>{self._answer(queries)}\n{left}</observation>\n\n"
        return Step([{"role": "user", "content": content}], reward=0.0)

    def _answer(self, queries: list[str]) -> str:
        if not queries:
            return (
                "No query was found: think in <think> tags, then write a query in <sql> tags or end in <solution> tags."
            )
        try:
            return run_query(self._database, queries[0]).text
        except ToolError as error:
            return str(error)
        except OutOfTime as error:
            return f"Error: {error}"

    def _reward(self, said: str) -> float:
        solutions = tagged(said, "solution")
        if len(solutions) != 1 or said.count("<solution>") != 1 or "<think>" not in said:
            return -1.0
        queries = {"database": self._database, "sql": solutions[0].strip(), "truth": self._truth}
        try:
            return float(_processes.call("same_rows", {**queries, "seconds": SECONDS_TO_COMPARE}).text == "same")
        except OutOfTime:
            return 0.0
        except ToolError as error:
            raise EpisodeFault(f"the query of the row's ground truth fails: {error}") from error
