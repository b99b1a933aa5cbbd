"""Tools from plain functions: their schemas, and what is rejected before a run."""

import pytest

from hybridrl.config import ConfigError
from hybridrl.environments.load import function_tools
from hybridrl.environments.tools import to_result

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


def test_public_functions_of_a_file_are_tools_with_the_schema_of_their_docstring(tmp_path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(TWO)
    add, weather = function_tools(str(file))
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


def test_of_marked_functions_only_those_are_tools_under_the_names_given(tmp_path) -> None:
    file = tmp_path / "marked.py"
    schema = {"type": "function", "function": {"name": "own", "parameters": {"type": "object", "properties": {}}}}
    file.write_text(
        "from hybridrl.environments.tools import function_tool\n"
        + TWO.replace("def add", '@function_tool("plus")\ndef add')
        + f"\n@function_tool(schema={schema!r})\ndef other(*anything): ...\n"
    )
    assert [tool.name for tool in function_tools(str(file))] == ["plus", "own"]


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
def test_a_function_without_a_complete_description_is_rejected_by_name_and_argument(tmp_path, source, said) -> None:
    file = tmp_path / "functions.py"
    file.write_text(source)
    with pytest.raises(ConfigError) as raised:
        function_tools(str(file))
    assert said in str(raised.value)


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
