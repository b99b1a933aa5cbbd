"""One query of a sqlite database within bounds of time, memory and size, for a process of its own.

Most of it is bounded by sqlite. A single function, such as printf, can only be interrupted by the end of the process.
"""

import sqlite3
import time
from collections import Counter
from pathlib import Path

from hybridrl.agents.environments import ToolError

SECONDS, MAX_ROWS, MAX_CHARACTERS = 5.0, 50, 9000
MAX_FETCHED = 100_000  # rows of a result that is compared
MAX_RESULT, MAX_MEMORY = 64 << 20, 256 << 20  # bytes
INSTRUCTIONS_BETWEEN_CHECKS = 10_000  # steps of sqlite's virtual machine
LIMITS = {
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,  # a query must not open other files
    sqlite3.SQLITE_LIMIT_LENGTH: 1 << 20,  # bytes of a value
    sqlite3.SQLITE_LIMIT_COLUMN: 256,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 17,
}
READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
PRAGMAS = ("table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list", "data_version")
FORBIDDEN_FUNCTIONS = ("load_extension", "fts3_tokenizer")


def query(database: str, sql: str, seconds: float = SECONDS, most: int = MAX_FETCHED) -> tuple[list[str], list[tuple]]:
    """Run a query that can change nothing; return the columns and at most `most` rows. ToolError says why it fails."""
    connection = sqlite3.connect(f"{Path(database).absolute().as_uri()}?mode=ro", uri=True)
    try:
        for pragma in ("query_only = ON", "temp_store = MEMORY", f"hard_heap_limit = {MAX_MEMORY}"):
            connection.execute(f"PRAGMA {pragma}")
        for limit, value in LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(_allows)
        end = time.monotonic() + seconds
        connection.set_progress_handler(lambda: time.monotonic() > end, INSTRUCTIONS_BETWEEN_CHECKS)
        cursor = connection.execute(sql)
        return [column[0] for column in cursor.description or ()], _rows(cursor, most)
    except sqlite3.OperationalError as error:
        cause = f"time limit of {seconds:g} s reached" if "interrupted" in str(error) else str(error)
        raise ToolError(f"Error: {cause}") from None
    except MemoryError:
        raise ToolError(f"Error: the query takes more than {MAX_MEMORY >> 20} MiB of memory") from None
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise ToolError(f"Error: {error}") from None
    finally:
        connection.close()


def _allows(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Return whether a statement may do this: only what reads, and opens or writes no file."""
    if action == sqlite3.SQLITE_PRAGMA:
        allowed = first in PRAGMAS
    elif action == sqlite3.SQLITE_FUNCTION:
        allowed = second not in FORBIDDEN_FUNCTIONS
    else:  # the functions of pragmas declare their table in the schema, which nobody can write
        allowed = action in READS or (action, first) == (sqlite3.SQLITE_UPDATE, "sqlite_master")
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _rows(cursor: sqlite3.Cursor, most: int) -> list[tuple]:
    rows, size = list[tuple](), 0
    for row in cursor:
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if size > MAX_RESULT:
            raise ToolError(f"Error: the result has more than {MAX_RESULT >> 20} MiB")
        rows.append(row)
        if len(rows) >= most:
            break
    return rows


def as_table(columns: list[str], rows: list[tuple]) -> str:
    """Write rows as lines of columns separated by |, at most 50 rows and 9,000 characters."""
    lines = [" | ".join("NULL" if value is None else str(value) for value in row) for row in rows[:MAX_ROWS]]
    text = "\n".join([" | ".join(columns), *lines])[:MAX_CHARACTERS]
    return f"{text}\n... (more rows)" if len(rows) > MAX_ROWS else text


def table(database: str, sql: str, seconds: float) -> str:
    """Return the rows of a query as a table."""
    return as_table(*query(database, sql, seconds, MAX_ROWS + 1))


def same_rows(database: str, sql: str, truth: str, seconds: float) -> str:
    """Return "same" if a query returns the rows of the true one in any order, else "others"."""
    expected = query(database, truth, seconds)[1]
    try:
        rows = query(database, sql, seconds)[1]
    except ToolError:
        return "others"
    return "same" if Counter(rows) == Counter(expected) else "others"
