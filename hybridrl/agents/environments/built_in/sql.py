"""SQL over sqlite databases, read only: a tool, and SkyRL's environment text2sql. Queries run in processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.agents.environments.built_in import sql_query
from hybridrl.agents.environments.built_in.sql_query import SECONDS
from hybridrl.agents.environments.built_in.sql_query import as_table as as_table
from hybridrl.agents.environments.built_in.sql_query import query as query
from hybridrl.agents.environments.environment import (
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
from hybridrl.agents.environments.function_process import FunctionProcesses
from hybridrl.agents.environments.tools import Tool
from hybridrl.agents.environments.user_code import ToolResult
from hybridrl.rewards.score import OutOfTime
from hybridrl.rewards.scorers.short_answers import tagged

SCHEMA = schema_of_texts(
    "sql",
    "Run one SQL query (sqlite, read only) on the database of the question and return its rows.",
    query="The query.",
)
SECONDS_TO_COMPARE = 2 * SECONDS  # of a solution, and of the true query
FOLDERS = {"synsql": "SynSQL-2.5M/databases", "spider": "spider/database", "bird": "bird/train/train_databases"}


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


def table(database: str, sql: str, seconds: float = SECONDS) -> ToolResult:
    """Return the rows of a query, which runs in another process; ToolError or OutOfTime says why there are none."""
    arguments = {"database": database, "sql": sql, "seconds": seconds}
    return _processes.call("table", arguments, 2 * seconds)  # sqlite ends most queries before


class Sql(Tool):
    """The tool `sql` for rows with `db_id`, or `db_path` of a file; its configuration may have `db_path`, `seconds`."""

    def __init__(self, config: Mapping[str, Any], schema: Schema = SCHEMA) -> None:
        super().__init__(schema)
        self._config = dict(config)

    def start(self, row: Mapping[str, Any]) -> str:
        return database_of(row, self._config)

    def call(self, state: str, arguments: dict[str, Any]) -> ToolResult:
        return table(state, arguments["query"], float(self._config.get("seconds", SECONDS)))


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
            return table(self._database, queries[0]).text
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
