"""Tools from plain functions: their schemas, and what is rejected before a run."""

import asyncio
import os

import psutil
import pytest

from hybridrl.agents.environments import EpisodeFault, Response, ToolCall
from hybridrl.agents.environments.load import function_tools
from hybridrl.agents.environments.user_code import to_result
from hybridrl.config import ConfigError
from tests.agents.environments.conftest import made
from tests.agents.sections import environments_of

TWO = '''
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b

def _hidden(): ...

async def weather(city: str):
    """Look up the weather.

    Args:
        city: where
    """
    return {"sun": city}
'''


@pytest.fixture
def tools_of(tmp_path):
    """The tools of a file with this source."""

    def read(source: str) -> list:
        (tmp_path / "functions.py").write_text(source)
        return function_tools(str(tmp_path / "functions.py"))

    return read


def test_public_functions_of_a_file_are_tools_with_the_schema_of_their_docstring(tools_of) -> None:
    add, weather = tools_of(TWO)
    assert add.schema["function"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first"},
                "b": {"type": "integer", "description": "the second"},
            },
            "required": ["a"],
        },
    }
    assert weather.name == "weather"


def test_an_optional_argument_may_be_null(tools_of) -> None:
    add = tools_of(TWO.replace("b: int = 1", "b: int | None = None"))[0]
    assert add.invalid({"a": 1, "b": None}) == "" == add.invalid({"a": 1})
    assert "is not of type 'integer'" in add.invalid({"a": None})


def test_of_marked_functions_only_those_are_tools_under_the_names_given(tools_of) -> None:
    schema = {"type": "function", "function": {"name": "own", "parameters": {"type": "object", "properties": {}}}}
    source = "from hybridrl.agents.environments.tools import function_tool\n"
    source += TWO.replace("def add", '@function_tool("plus")\ndef add')
    source += f"\n@function_tool(schema={schema!r})\ndef other(*anything): ...\n"
    assert [tool.name for tool in tools_of(source)] == ["plus", "own"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(a: int): ...", "functions.py:1: tool f: there is no docstring, which describes it and a"),
        ('def f(a):\n    """Do.\n\n    Args:\n        a: it\n    """', "tool f: argument a has no type annotation"),
        ('def f(a: int):\n    """Do."""', 'tool f: argument a is not described under "Args:" in the docstring'),
        ('def f(*rest: int):\n    """Do."""', "tool f: *rest cannot be described to a model"),
        ("x = 1", "there is no function in the file"),
        ("def f(:", "does not import: SyntaxError"),
    ],
)
def test_a_function_without_a_complete_description_is_rejected_by_name_and_argument(tools_of, source, said) -> None:
    with pytest.raises(ConfigError) as raised:
        tools_of(source)
    assert said in str(raised.value)


CALLED = '''
import os, pickle, re, time
from hybridrl.environments import EpisodeFault, ToolError

class Unreachable(ConnectionError): ...

COUNT = []

def act(what: str):
    """Do something.

    Args:
        what: what
    """
    match what:
        case "digits":
            return len(str(9 ** 9 ** 9))
        case "pattern":
            return re.match("(a+)+$", "a" * 60 + "b")
        case "sleep":
            time.sleep(60)
        case "count":
            COUNT.append(1)
            return len(COUNT)
        case "exit":
            os._exit(3)
        case "leave":
            raise SystemExit(3)
        case "tool":
            raise ToolError("there is none")
        case "fault":
            raise EpisodeFault("the disk is full")
        case "raise":
            raise KeyError("no such\\nthing")
        case "away":
            raise Unreachable("nobody")
        case "nan":
            return "text", float("nan")
        case "process":
            return os.getpid(), 0.5, {"hits": 2}
        case "fork exit" if os.fork() == 0:
            raise SystemExit(0)
        case "fork raise" if os.fork() == 0:
            raise KeyError("child")
        case "fork return" if os.fork() == 0:
            return "child"
        case "write":
            link = next(one for one in range(3, 4096) if os.path.exists(f"/proc/self/fd/{one}")
                        and "socket" in os.readlink(f"/proc/self/fd/{one}"))
            content = pickle.dumps((99, ("", "forged", None, {})))
            os.write(link, b"\\0hybridrl" + len(content).to_bytes(8) + content)

async def where():
    """Return the process."""
    return os.getpid()
'''


@pytest.fixture
def act(tmp_path):
    """Calls a function of a file, in an episode of its own."""
    (tmp_path / "functions.py").write_text(CALLED)

    def act(*whats: str, name: str = "act", **settings):
        options = {"tool_timeout": 10, "tool_retries": 0, "max_parallel_calls": 8, **settings}
        settings = environments_of(function_tool_path=str(tmp_path / "functions.py"), **options)
        calls = [ToolCall(name, {"what": what} if what else {}) for what in whats]

        async def run():
            environment = made({}, settings)
            await environment.reset([])
            return (await environment.step(Response("", calls))).calls

        return [(record.outcome, record.result, record.reward) for record in asyncio.run(run())]

    return act


@pytest.mark.parametrize(
    "what", ["digits", *(pytest.param(one, marks=pytest.mark.slow) for one in ("pattern", "sleep"))]
)
def test_a_function_is_killed_at_its_time_limit_and_others_continue_meanwhile(act, what) -> None:
    hung, counted = act(what, "count", tool_timeout=1)
    assert hung == ("timeout", "Error: time limit of 1 s reached", None)
    assert counted[0] == act("count", tool_timeout=1)[0][0] == "ok"


def test_a_plain_function_runs_in_another_process_which_is_used_again_and_a_coroutine_here(act) -> None:
    (one,), (other,), (here,) = act("process"), act("process"), act("", name="where")
    assert one == other == ("ok", one[1], 0.5) and int(one[1]) != os.getpid()
    assert here == ("ok", str(os.getpid()), None)
    assert [act("count")[0][1] for _ in range(2)] == ["1", "2"]


def test_what_a_function_forks_returns_no_result(act) -> None:
    for what in ("fork exit", "fork raise", "fork return"):
        assert act(what)[0][:2] == ("ok", "")
        assert act("process")[0][0] == act("count")[0][0] == "ok"
    assert int(act("count")[0][1]) == 4  # all in one process


def test_a_process_that_is_killed_while_it_waits_is_replaced(act) -> None:
    process = psutil.Process(int(act("process")[0][1]))
    process.kill()
    assert psutil.wait_procs([process], timeout=20)[0]
    assert act("count") == [("ok", "1", None)]


def test_a_process_that_ends_while_it_imports_the_file_is_a_fault(act, tmp_path) -> None:
    act("", name="where")  # has read the file here
    (tmp_path / "functions.py").write_text("import os; os._exit(3)")
    with pytest.raises(EpisodeFault, match=r"imports .*function_tool_path=.*functions.py ended with exit code 3"):
        act("count")


def test_what_a_function_raises_is_as_if_it_ran_here(act, caplog) -> None:
    assert act("tool") == [("error", "there is none", None)]
    assert act("raise") == [("error", "Error: KeyError: 'no such\\nthing'", None)]
    assert "functions.py" in caplog.text and "no such" in caplog.text
    assert act("leave") == [("error", "Error: RuntimeError: SystemExit: 3", None)]
    assert act("exit") == [("error", "Error: RuntimeError: the tool's process ended with exit code 3", None)]
    ((outcome, text, _),) = act("write")
    assert outcome == "error" and "is not its next result (it has the number 99" in text
    assert act("count") == [("ok", "1", None)]  # in another process
    for what, said in {"fault": "the disk is full", "away": "Unreachable: nobody", "nan": "the tool act is no"}.items():
        with pytest.raises(EpisodeFault, match=said):
            act(what)


@pytest.mark.parametrize(
    ("returned", "text", "reward", "metrics"),
    [
        ("yes", "yes", None, {}),
        ({"a": "\u00e9"}, '{"a": "\u00e9"}', None, {}),
        (3, "3", None, {}),
        (None, "", None, {}),
        (b"abc", "abc", None, {}),
        (("yes", 1), "yes", 1.0, {}),
        (("yes", None, {"hits": 2, "page": "x"}), "yes", None, {"hits": 2.0}),
    ],
)
def test_results_of_all_forms_are_read(returned, text, reward, metrics) -> None:
    result = to_result(returned)
    assert (result.text, result.reward, result.metrics) == (text, reward, metrics)
