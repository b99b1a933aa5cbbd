"""SQL over sqlite databases, read only: a tool, and SkyRL's environment text2sql."""

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.environments.environment import Environment, Response, Schema, Step, ToolError
from hybridrl.environments.rows import field, ground_truth
from hybridrl.environments.tools import Tool

SCHEMA: Schema = {
    "type": "function",
    "function": {
        "name": "sql",
        "description": "Run one SQL query (sqlite, read only) on the database of the question and return its rows.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "The query."}},
            "required": ["query"],
        },
    },
}
SECONDS, MAX_ROWS, MAX_CHARACTERS = 5.0, 50, 9000
LARGEST_VALUE = 1 << 20  # bytes
MAX_FETCHED = 100_000  # rows of a result that is compared
INSTRUCTIONS_BETWEEN_CHECKS = 10_000  # of sqlite's virtual machine
FOLDERS = {"synsql": "SynSQL-2.5M/databases", "spider": "spider/database", "bird": "bird/train/train_databases"}
QUERY = re.compile(r"<sql>(.*?)</sql>", re.DOTALL)
SOLUTION = re.compile(r"<solution>(.*?)</solution>", re.DOTALL)


def query(database: str, sql: str, seconds: float = SECONDS, most: int = MAX_FETCHED) -> tuple[list[str], list[tuple]]:
    """Run a query that can change nothing; return the columns and at most `most` rows. ToolError says why it fails."""
    connection = sqlite3.connect(f"{Path(database).absolute().as_uri()}?mode=ro", uri=True)
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # a query must not open other files
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
        end = time.monotonic() + seconds
        connection.set_progress_handler(lambda: time.monotonic() > end, INSTRUCTIONS_BETWEEN_CHECKS)
        cursor = connection.execute(sql)
        return [column[0] for column in cursor.description or ()], cursor.fetchmany(most)
    except sqlite3.OperationalError as error:
        cause = f"time limit of {seconds:g} s reached" if "interrupted" in str(error) else str(error)
        raise ToolError(f"Error: {cause}") from None
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise ToolError(f"Error: {error}") from None
    finally:
        connection.close()


def as_table(columns: list[str], rows: list[tuple]) -> str:
    """Write rows as lines of columns separated by |, at most 50 rows and 9,000 characters."""
    lines = [" | ".join("NULL" if value is None else str(value) for value in row) for row in rows[:MAX_ROWS]]
    text = "\n".join([" | ".join(columns), *lines])[:MAX_CHARACTERS]
    return f"{text}\n... (more rows)" if len(rows) > MAX_ROWS else text


def database_of(row: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The file of the row's database: `db_path` of the row, or `db_id` below `db_path` of the configuration."""
    name = field(row, "db_id")
    path = Path(str(field(row, "db_path", ".", config)))
    below = path / FOLDERS.get(str(field(row, "data")), "")
    places = [path, below / f"{name}/{name}.sqlite", path / f"{name}/{name}.sqlite", path / f"{name}.sqlite"]
    for place in places:
        if place.is_file():
            return str(place)
    raise FileNotFoundError(f"no database of db_id={name}: there is no file {places[1]}; set db_path")


class Sql(Tool):
    """The tool `sql` for rows with `db_id`, or `db_path` of a file; its configuration may have `db_path`, `seconds`."""

    def __init__(self, config: Mapping[str, Any], schema: Schema = SCHEMA) -> None:
        super().__init__(schema)
        self._config = dict(config)

    def start(self, row: Mapping[str, Any]) -> str:
        return database_of(row, self._config)

    def call(self, state: str, arguments: dict[str, Any]) -> str:
        seconds = float(self._config.get("seconds", SECONDS))
        return as_table(*query(state, arguments["query"], seconds, MAX_ROWS + 1))


class TextToSql(Environment):
    """SkyRL's environment: queries in <sql> tags are answered, and <solution> ends the episode.

    Reward 1 if the solution returns the rows of `reward_spec.ground_truth` in any order, else 0; -1 without exactly one
    solution, or without <think>. `max_turns` (5) of the row, or of the configuration.
    """

    def __init__(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        super().__init__(config, row)
        self._database = database_of(row, config)
        self._truth = str(ground_truth(row))
        self._most = int(field(row, "max_turns", 5, config))
        self._texts: list[str] = []

    def step(self, response: Response) -> Step:
        self._texts.append(response.text)
        if len(self._texts) >= self._most or SOLUTION.search(response.text):
            return Step(reward=self._reward("".join(self._texts)), done=True)
        found = QUERY.search(response.text)
        left = f"<reminder>You have {self._most - len(self._texts)} turns left to complete the task.</reminder>"
        content = f"\n\n<observation>{self._answer(found)}\n{left}</observation>\n\n"
        return Step([{"role": "user", "content": content}], reward=0.0)

    def _answer(self, found: re.Match[str] | None) -> str:
        if found is None:
            return (
                "No query was found: think in <think> tags, then write a query in <sql> tags or end in <solution> tags."
            )
        try:
            return as_table(*query(self._database, found[1], most=MAX_ROWS + 1))
        except ToolError as error:
            return str(error)

    def _reward(self, said: str) -> float:
        solutions = SOLUTION.findall(said)
        if len(solutions) != 1 or said.count("<solution>") != 1 or "<think>" not in said:
            return -1.0
        expected = query(self._database, self._truth, seconds=6 * SECONDS)[1]
        try:
            found = query(self._database, solutions[0].strip(), seconds=6 * SECONDS)[1]
        except ToolError:
            return 0.0
        return float(Counter(found) == Counter(expected))
