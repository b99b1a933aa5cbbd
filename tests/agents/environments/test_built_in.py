"""Built-in tools and environments."""

import asyncio
import inspect
import itertools
import sqlite3
import threading

import pytest

from hybridrl.agents.environments import EpisodeFault, Response, ToolCall, ToolError
from hybridrl.agents.environments.built_in import sql_query
from hybridrl.agents.environments.built_in.games import Gsm8kMultiTurn, GuessNumber, Wordle, best_guessing, marks
from hybridrl.agents.environments.built_in.tools import SearchQuestions, TextToSql, calculate, run_python, run_query
from hybridrl.environments.retriever import Index, serve
from hybridrl.rewards.score import OutOfTime
from tests.agents.environments.conftest import made
from tests.agents.sections import environments_of


def play(environment, *texts):
    """The steps after these responses; an environment's methods may be coroutines or plain."""

    async def run():
        steps = []
        for turn, text in enumerate(texts):
            step = environment.step(Response(text, turn=turn))
            steps.append(await step if inspect.isawaitable(step) else step)
        return steps

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("1/3", "0.333333333333"),
        ("2 ^ 10", "1024"),
        ("1,250 * 4", "5000"),
        ("max(1, 2) - sqrt(16)", "-2"),
        ("7 \u00f7 2 \u00d7 2", "7"),
        ("-7 // 2", "-4"),
        ("round(1, -10**7)", "0"),
        ("round(7.25, 1)", "7.2"),
        ("round(5, -10**2000)", "0"),
        ("(-1) ** 10**9", "1"),
    ],
)
def test_the_calculator_evaluates_arithmetic(expression, value) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "1/0",
            "9**9**9**9",
            "__import__('os')",
            "(1).real",
            "1 +",
            "x",
            "'a' * 3",
            "1e308 * 10 ** 400",
            "(-8) ** 0.5",
        ),
        "1+" * 600,
        "1" * 1_000_000,
        "9**9**9",
        "9**3000*9**3000",
        "*".join(["9**3000"] * 100),
        "-" * 999 + "1",
        "(" * 500,
        *("round(1, 1, 1)", "min()", "floor(1e308) ** 100"),
    ],
)
def test_the_calculator_answers_anything_else_with_an_error(expression) -> None:
    with pytest.raises(ToolError, match="Error: "):
        calculate(expression)


def test_python_prints_output_the_last_value_and_a_short_traceback() -> None:
    assert run_python("print('a')\n[n * n for n in range(4)]") == "a\n[0, 1, 4, 9]"
    assert run_python("def f():\n    return 1 / 0\nf()").splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert run_python("x + 1", earlier=["x = 4; print('silent')", "1 / 0"]) == "5"
    assert run_python("print(").endswith("SyntaxError: '(' was never closed")


def test_python_has_no_files_and_ends_at_its_limit() -> None:
    assert "Error" in run_python("open('/etc/passwd').read()")
    with pytest.raises(ToolError, match="stopped at a limit: 1 s of computing"):
        run_python("while True: pass", seconds=1)


def test_stateful_python_keeps_names_for_the_episode_only() -> None:
    settings = environments_of(tools=("python",), environment_kwargs={"python": {"stateful": True}})

    async def episode(*cells):
        environment = made({}, settings)
        await environment.reset([])
        steps = [await environment.step(Response("", [ToolCall("python", {"code": cell})])) for cell in cells]
        return [step.calls[0].result for step in steps]

    assert asyncio.run(episode("n = 2", "n * 21")) == ["", "42"]
    assert "NameError" in asyncio.run(episode("n"))[0]


@pytest.fixture
def database(tmp_path):
    (tmp_path / "spider/database/d").mkdir(parents=True)
    with sqlite3.connect(tmp_path / "spider/database/d/d.sqlite") as connection:
        connection.execute("create table t (a, b)")
        connection.executemany("insert into t values (?, ?)", [(1, "x"), (2, "y"), (2, "y")])
    return tmp_path


@pytest.fixture
def file(database) -> str:
    return str(database / "spider/database/d/d.sqlite")


def test_a_query_reads_and_can_change_nothing(database, file) -> None:
    assert sql_query.as_table(*sql_query.query(file, "select * from t")) == "a | b\n1 | x\n2 | y\n2 | y"
    for statement in (
        *("delete from t", "create table u (a)", "create temp table u as select 1", "begin"),
        *(f"attach '{database}/new.db' as n", f"vacuum into '{database}/new.db'", "update sqlite_master set sql = ''"),
        *("pragma user_version = 5", "PRAGMA query_only=0; drop table t", "PRAGMA query_only=0"),
        *("PRAGMA writable_schema=1", "PRAGMA hard_heap_limit=0", f"PRAGMA temp_store_directory='{database}'"),
        *("select randomblob(100000000)", "select zeroblob(100000000)", "select load_extension('x')"),
        "select " + ", ".join("a" for _ in range(1000)) + " from t",
        f"select {'(' * 1000}1{')' * 1000}",
        "select randomblob(1000000) from t, t x, t y, t z, t u",  # 243 MB
    ):
        with pytest.raises(ToolError, match="Error: "):
            sql_query.query(file, statement)
    assert len(sql_query.query(file, "select * from t")[1]) == 3
    assert not (database / "new.db").exists()
    with pytest.raises(ToolError, match=r"time limit of 0\.2 s reached"):
        sql_query.query(file, "with recursive c(n) as (select 1 union all select n+1 from c) select max(n) from c", 0.2)


@pytest.mark.slow
def test_a_query_has_a_limit_of_memory(file) -> None:
    rows = "select randomblob(1000000) a from t, t x, t y, t z, t u, t v order by random()"
    with pytest.raises(ToolError, match="more than 256 MiB of memory"):
        run_query(file, f"select max(a) from ({rows})")


def test_a_query_may_read_the_schema(file) -> None:
    assert [row[1] for row in sql_query.query(file, "pragma table_info(t)")[1]] == ["a", "b"]
    assert sql_query.query(file, "select name from pragma_table_info('t')")[1] == [("a",), ("b",)]
    assert sql_query.query(file, "explain query plan select * from t join t u on t.a = u.a")[1]
    recursive = "with recursive c(n) as (select 1 union all select n + 1 from c where n < 3) select * from c"
    assert sql_query.query(file, recursive)[1] == [(1,), (2,), (3,)]


def test_a_query_that_sqlite_cannot_interrupt_ends_at_the_time_limit(file) -> None:
    with pytest.raises(OutOfTime, match=r"time limit of 1 s reached"):
        run_query(file, "select printf('%.*c', 2000000000, 'x')", 0.5)
    assert run_query(file, "select 1 as n").text == "n\n1"
    environment = TextToSql({"db_path": file}, {"db_path": file, "reward_spec": {"ground_truth": "select nothing"}})
    with pytest.raises(EpisodeFault, match="the query of the row's ground truth fails: Error: near"):
        environment.step(Response("<think></think><solution>select 1</solution>"))


@pytest.mark.parametrize("tag", ["search", "answer", "sql", "solution"])
def test_many_open_tags_are_searched_once(tag, file) -> None:
    text = f"<{tag}>" * 100_000
    question = SearchQuestions({}, {"reward_spec": {"ground_truth": {"target": ["Rome"]}}})
    for environment in (question, TextToSql({"db_path": file}, {"reward_spec": {"ground_truth": ""}})):
        (step,) = play(environment, text)
        assert (step.done, step.reward) == (False, 0.0)


def test_a_table_has_at_most_50_rows() -> None:
    text = sql_query.as_table(["n"], [(n,) for n in range(60)])
    assert len(text.splitlines()) == 1 + 50 + 1
    assert text.endswith("... (more rows)")


@pytest.mark.parametrize(
    ("solution", "reward"),
    [
        ("<think>t</think><solution>select b, a from t order by a desc</solution>", 0.0),
        ("<think>t</think><solution>select a, b from t order by a desc</solution>", 1.0),
        ("<think>t</think><solution>select distinct a, b from t</solution>", 0.0),
        ("<think>t</think><solution>select nothing</solution>", 0.0),
        ("<solution>select a, b from t</solution>", -1.0),
        ("<think>t</think><solution>a</solution><solution>b</solution>", -1.0),
    ],
)
def test_text2sql_answers_queries_and_compares_results_as_multisets(database, solution, reward) -> None:
    row = {"db_id": "d", "data": "spider", "reward_spec": {"ground_truth": "select a, b from t"}}
    environment = TextToSql({"db_path": str(database)}, row)
    first, bad, last = play(environment, "<sql>select a from t</sql>", "<sql>select c from t</sql>", solution)
    assert "<observation>a\n1\n2\n2\n<reminder>You have 4 turns left" in first.messages[0]["content"]
    assert "no such column: c" in bad.messages[0]["content"]
    assert (first.reward, last.reward, last.done) == (0.0, reward, True)


def test_search_questions_are_answered_with_passages_until_there_is_an_answer() -> None:
    texts = ["Rome\nThe capital of Italy", "Bread\nFlour and water"]
    server = serve(Index(texts), [{"contents": text} for text in texts], "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kwargs = {"search_url": f"http://127.0.0.1:{server.server_port}/retrieve", "topk": 1}
    row = {"reward_spec": {"ground_truth": {"target": ["Rome"]}}, "max_turns": 3}
    first, last = play(SearchQuestions(kwargs, row), "<search>capital Italy</search>", "<answer>the rome.</answer>")
    assert first.messages[0]["content"] == "\n<information>Doc 1(Title: Rome) The capital of Italy</information>\n"
    assert (last.reward, last.done) == (1.0, True)
    server.shutdown()
    server.server_close()


def test_gsm8k_is_asked_again_until_it_is_right() -> None:
    row = {"reward_spec": {"ground_truth": "72"}, "extra_info": {"max_turns": 4}}
    steps = play(Gsm8kMultiTurn({"last_turn": "now"}, row), "#### 71", "none", "#### 7", "#### 8")
    assert [step.reward for step in steps] == [0.05, 0.0, 0.05, 0.05]
    assert (steps[2].messages[0]["content"], steps[3].done) == ("now", True)
    assert play(Gsm8kMultiTurn({}, row), "#### 72")[0].done


GAME = {"target": 37, "low": 1, "high": 99}


def test_guess_number_says_low_or_high_and_rewards_the_right_guess() -> None:
    game = GuessNumber({"texts": {"low": "<", "prompt": "?"}}, GAME)
    assert game.reset([{"role": "user", "content": "long"}]) == [{"role": "user", "content": "?"}]
    low, high, bad, right = play(game, "20", "50", "fifty", " 37\n")
    assert [step.messages[0]["content"] for step in (low, high, bad)] == ["<", "high", "bad"]
    assert [step.reward for step in (low, high, bad, right)] == [-0.02, -0.02, -0.02, 1.0]
    assert (bad.done, right.done, right.messages) == (False, True, [])
    assert game.close() == {"won": 1.0, "moves": 4.0}
    assert [step.done for step in play(GuessNumber({"max_turns": 2}, GAME), "1", "2")] == [False, True]


@pytest.mark.parametrize(("low", "high", "max_turns"), [(1, 1, 10), (1, 3, 10), (0, 99, 10), (1, 64, 6), (5, 20, 3)])
def test_the_best_play_of_guess_number_is_what_binary_search_gets(low, high, max_turns) -> None:
    total = 0.0
    for target in range(low, high + 1):
        first, last = low, high
        for move in range(max_turns):
            guess = (first + last) // 2
            if guess == target:
                total += 1 - 0.02 * move
                break
            first, last = (guess + 1, last) if guess < target else (first, guess - 1)
        else:
            total -= 0.02 * max_turns
    played = total / (high - low + 1)
    assert played <= best_guessing(low, high, max_turns=max_turns) + 1e-9
    if max_turns == 10 or high - low + 1 <= 2**max_turns:
        assert played == pytest.approx(best_guessing(low, high, max_turns=max_turns))


def marks_by_rules(guess: str, target: str) -> str:
    """First the letters at their places, then the others from the left, each letter of the target used once."""
    result, left = ["-"] * 5, list(target)
    for place in range(5):
        if guess[place] == target[place]:
            result[place] = "G"
            left.remove(guess[place])
    for place in range(5):
        if result[place] == "-" and guess[place] in left:
            result[place] = "Y"
            left.remove(guess[place])
    return "".join(result)


def test_wordle_marks_each_letter_as_often_as_the_target_has_it() -> None:
    assert marks("speed", "erase") == "Y-YY-"
    guesses = map("".join, itertools.product("ab", repeat=5))
    for guess, target in itertools.product(guesses, ["abbac", "aabbb", "ccaab"]):
        assert marks(guess, target) == marks_by_rules(guess, target)
    steps = play(Wordle({}, {"target": "CRANE"}), "trace", "abc", "crane")
    assert [step.messages[0]["content"] for step in steps[:2]] == ["-GGYG", "bad"]
    assert steps[2].done
