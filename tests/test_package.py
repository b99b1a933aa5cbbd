"""The wheel has what commands and texts name, and texts name it where it is installed."""

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridrl import project_file

TOP = Path(__file__).parents[1]
OF_A_CHECKOUT = re.compile(r"\b(docs|recipes|scripts)/[\w.-]")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a wheel installs it, made of a copy of what git tracks, outside the checkout."""
    place = tmp_path_factory.mktemp("wheel")
    copy, files = place / "copy", subprocess.run(["git", "ls-files"], cwd=TOP, capture_output=True, text=True).stdout
    for name in files.splitlines():
        if (TOP / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((TOP / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(place), "."]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (file,) = place.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(place / "installed")
    return place / "installed"


def printed(wheel: Path, code: str) -> str:
    """Return what code prints with the wheel's package, in an empty directory."""
    here = wheel / "here"
    here.mkdir(exist_ok=True)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(wheel)!r})\n{code}"]
    return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()


def test_every_tracked_file_of_the_package_recipes_and_pages_is_in_the_wheel(wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=TOP, capture_output=True, text=True).stdout.splitlines()
    below = {"hybridrl": "hybridrl", **{name: f"hybridrl/{name}" for name in ("conf", "recipes", "docs")}}
    wanted = [
        f"{below[top]}/{rest}"
        for top, _, rest in (name.partition("/") for name in tracked)
        if top in below and not rest.endswith((".png", ".css.map")) and (TOP / top / rest).is_file()
    ]
    assert len(wanted) > 300 and [name for name in wanted if not (wheel / name).is_file()] == []


def test_a_python_with_the_wheel_starts_with_what_makes_torchvision_importable(wheel: Path) -> None:
    assert (wheel / "hybridrl_torchvision.pth").read_text() == "import hybridrl_torchvision\n"
    assert (wheel / "hybridrl_torchvision.py").read_text() == (TOP / "hybridrl_torchvision.py").read_text()


def test_files_of_the_project_are_found_in_the_wheel_and_in_a_checkout(wheel: Path) -> None:
    code = "from hybridrl import project_file as f; print(f('docs/errors.md'), f('conf'), f('scripts/install.sh'))"
    assert printed(wheel, code).split() == [
        f"{wheel}/hybridrl/docs/errors.md",
        f"{wheel}/hybridrl/conf",
        "scripts/install.sh",
    ]
    assert Path(project_file("docs/errors.md#unexpected").partition("#")[0]).resolve() == TOP / "docs" / "errors.md"


def test_without_a_checkout_no_script_of_it_is_named_as_a_remedy(wheel: Path) -> None:
    code = (
        "from hybridrl.doctor.machine import install_command as c; print(c('torch', 'cpu')); print(c('vllm', 'cuda'))"
    )
    assert printed(wheel, code).splitlines() == [
        f"install hybridrl again with [{extra}], as {wheel}/hybridrl/docs/machines.md#installing says"
        for extra in ("cpu", "gpu")
    ]


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings of a module that are no docstrings and no argument of `project_file`."""
    expressions = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "project_file")
    resolved = {argument for call in calls for argument in call.args} | {*expressions}
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in resolved)


def test_every_file_of_the_project_that_a_text_names_is_looked_up() -> None:
    """Constants with a file's name alone are passed to `project_file`."""
    named = [
        f"{path.relative_to(TOP)}:{node.lineno}: {node.value}"
        for path in sorted([*TOP.glob("hybridrl/**/*.py"), *TOP.glob("recipes/quickstart/*.py")])
        for node in texts(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node.value, str) and OF_A_CHECKOUT.search(node.value)
        if not re.fullmatch(r"docs/\w+\.md(#\w+)?", node.value)
    ]
    assert named == []


def test_every_page_that_the_package_names_exists() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in TOP.glob("hybridrl/**/*.py"))
    pages = {*re.findall(r"docs/\w+\.md", sources)}
    assert len(pages) > 10 and [page for page in sorted(pages) if not (TOP / page).is_file()] == []
