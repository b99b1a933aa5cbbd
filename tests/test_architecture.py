"""House rules that a test can check: who may import whom, who may import which library, how long things may get."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hybridrl.config.load import key_meanings
from hybridrl.config.schema import PPOConfig, SFTConfig
from hybridrl.config.values import value_keys

TOP = Path(__file__).parent.parent
FILES = {path.relative_to(TOP / "hybridrl").as_posix(): path for path in sorted(TOP.glob("hybridrl/**/*.py"))}

# What the core (hybridrl/core: what a step computes) may import besides itself; the list may only shrink.
GROUND = """
    config.catalog  config.custom_code  config.files  config.findings  config.schema  config.values
    checkpoint.export  checkpoint.read  checkpoint.tensors  data.order  data.prompts  data.tokenizer  rewards.score
    plugins  required  runtime.environment  runtime.guard  runtime.keeper  runtime.stacks
    tracking.console  tracking.faults  tracking.sink
"""
# Who may name a library, as beginnings of paths.
KNOWN_TO = {
    "ray": (
        "core/cluster/",
        "core/training/worker.py",
        "core/rollout/fleet.py",
        "agents/environments/pool.py",
        "doctor/cluster.py",
    ),
    "vllm": ("core/rollout/vllm/", "model_merger/source.py"),
    "hydra": ("config/compose.py",),
    "omegaconf": ("config/compose.py",),
    "torch.cuda": ("core/device.py",),
    "fastapi": ("agents/endpoint/",),
    "uvicorn": ("agents/endpoint/",),
}

# What is imported late, inside a function, and why.
LATE = {
    "api.py": "pandas is slow to import, and wanted where a table is requested only",
    "core/batch.py": "tensordict is slow to import, and wanted for code that is written for it only",
    "config/__init__.py": "Hydra is slow to import, and wanted where a configuration is loaded only",
    "config/files.py": "huggingface_hub reads when it is imported whether it is offline, which is known later",
    "data/row_files.py": "datasets is slow to import, and wanted for directories and data sets of the hub only",
    "model_merger/__init__.py": "torch and transformers come only once a model has to be merged",
    "model_merger/__main__.py": "torch and transformers come only once the command stands",
    "model_merger/source.py": "vLLM comes only where a model is checked in it",
    "evaluation/statistics.py": "scipy is slow to import, and a run writes its page at its end only",
    "main_eval.py": "torch, Ray and transformers come only once the configuration stands",
    "runs/command.py": "torch, Ray and transformers come only once the configuration stands",
    "core/training/token_outputs.py": "Triton comes with torch's builds for CUDA, and is used there only",
    "chat.py": "torch, transformers and vLLM come only once the command stands",
    "agents/endpoint/serve.py": "torch, transformers and vLLM come only once the command stands",
    "tracking/report.py": "matplotlib is slow to import, and wanted at the end of a run only",
    "tracking/tracker.py": "sinks whose libraries are heavy, or an extra, come only where they are chosen",
}

HEAVY = {"torch", "ray", "transformers", "vllm"}
LONGEST_FUNCTION, LONGEST_FILE = 60, 400


TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def imports(node: ast.AST) -> Iterator[str]:
    """Full names of all that is imported: `from a import b` is a.b."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are written in full"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)


def attributes(node: ast.AST) -> Iterator[str]:
    """Dotted names that are read: `torch.cuda.empty_cache()` reads torch.cuda.empty_cache and torch.cuda."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute):
            yield ast.unparse(child)


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (child for child in ast.walk(node) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines: functions, classes, variables, and attributes of `self`, `cls` and new instances."""
    for child in ast.walk(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and own(child):
            yield child.attr


def own(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def foreign_private(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, name and text of private names that a file takes from others: by attribute, import or monkeypatch."""
    for child in ast.walk(tree):
        if isinstance(child, ast.Attribute) and private(child.attr) and not own(child):
            yield child.lineno, child.attr, ast.unparse(child)
        elif isinstance(child, ast.ImportFrom):
            yield from ((child.lineno, each.name, ast.unparse(child)) for each in child.names if private(each.name))
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr == "setattr":
            match child.args:
                case [_, ast.Constant(value=str(name)), *_] if private(name):
                    yield child.lineno, name, ast.unparse(child)


def within(name: str, library: str) -> bool:
    return name == library or name.startswith(library + ".")


def package(name: str) -> str:
    """The package of a path ("core/rollout/client.py") or of an import ("hybridrl.core.rollout.client")."""
    return name.removeprefix("hybridrl.").replace("/", ".").removeprefix("core.").removesuffix(".py").split(".")[0]


def module(imported: str) -> str | None:
    """The module of hybridrl that an import takes something from, without the package's name."""
    path = imported.removeprefix("hybridrl.").replace(".", "/")
    if not within(imported, "hybridrl"):
        return None
    known = (one for one in (path, path.rpartition("/")[0]) if f"{one}.py" in FILES or f"{one}/__init__.py" in FILES)
    return next(known).replace("/", ".")


def test_every_package_has_its_layer() -> None:
    """The layers are contracts of import-linter, which .ci/run checks."""
    contract = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"][
        0
    ]
    layered = {package(name) for layer in contract["layers"] for name in layer.split(" | ")}
    assert {package(name) for name in FILES} - {"__init__"} == layered


def test_the_core_imports_itself_and_the_ground() -> None:
    beyond = [
        f"{name} imports {imported}"
        for name, tree in TREES.items()
        if name.startswith("core/")
        for imported in sorted(filter(None, map(module, imports(tree))))
        if not within(imported, "core") and imported not in GROUND.split()
    ]
    assert not beyond


def test_the_core_knows_an_engine_by_its_entry_only() -> None:
    """Another engine is a package next to core/rollout/vllm, and a line among the plug-ins."""
    knowing = []
    for name, tree in TREES.items():
        if name.startswith("core/") and not name.startswith("core/rollout/vllm/"):
            docstrings = {
                ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)
            }
            texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            words = [*attributes(tree), *imports(tree), *(text for text in texts if text not in docstrings)]
            knowing += [f"{name}: {word}" for word in words if isinstance(word, str) and "vllm" in word.lower()]
    assert not knowing


def test_a_library_is_named_only_where_it_may_be() -> None:
    misplaced = [
        f"{name} names {used}"
        for name, tree in TREES.items()
        for used in sorted({*imports(tree), *attributes(tree)})
        for library, places in KNOWN_TO.items()
        if within(used, library) and not name.startswith(places)
    ]
    assert not misplaced


def test_private_names_stay_in_their_file() -> None:
    files = sorted(path for top in ("hybridrl", "scripts", "recipes", "tests") for path in TOP.glob(f"{top}/**/*.py"))
    parsed = {FILES[name]: tree for name, tree in TREES.items()}
    trees = {path: parsed.get(path) or ast.parse(path.read_text(encoding="utf-8")) for path in files}
    names = {path: {name for name in defined(tree) if private(name)} for path, tree in trees.items()}
    # Names that only libraries define are theirs: torch, Ray and vLLM have no public way for some things.
    ours = set().union(*names.values())
    assert [
        f"{path.relative_to(TOP)}:{line}: {text}"
        for path, tree in trees.items()
        for line, name, text in foreign_private(tree)
        if name in ours - names[path]
    ] == []


# What the type checker is not to report in a line, and why, as two comments. It reports an ignore that is not needed.
IGNORE = re.compile(r"# pyrefly: ignore\[[a-z-]+(, [a-z-]+)*\]  # \w.*")
ANY_IGNORE = re.compile(r"#\s*(type|pyright|pyrefly|mypy|ty)\s*:\s*(ignore|basic|standard|strict)")
MOST_IGNORES = 30


def test_the_type_checker_is_silenced_rarely_by_line_and_rule_and_with_a_reason() -> None:
    files = [path for top in ("hybridrl", "scripts", "recipes", "tests") for path in TOP.glob(f"{top}/**/*.py")]
    comments = [
        (f"{path.relative_to(TOP)}:{token.start[0]}", token.string)
        for path in sorted(files)
        if ANY_IGNORE.search(text := path.read_text(encoding="utf-8"))
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and ANY_IGNORE.search(token.string)
    ]
    assert [place for place, comment in comments if not IGNORE.fullmatch(comment)] == []
    assert len(comments) <= MOST_IGNORES


def test_imports_stand_at_the_top() -> None:
    late = {name for name, tree in TREES.items() for function in functions(tree) if any(imports(function))}
    assert late == set(LATE)


@pytest.mark.parametrize(
    "module",
    [
        "hybridrl.config",
        "hybridrl.doctor.__main__",
        "hybridrl.doctor.leftovers",
        "hybridrl.compat.migrate",
        "hybridrl.doctor.why",
        "hybridrl.evaluation.statistics",
        "hybridrl.launch.__main__",
        "hybridrl.main_eval",
        "hybridrl.main_ppo",
        "hybridrl.main_rm",
        "hybridrl.main_sft",
        "hybridrl.report",
        "hybridrl.rewards.process",
        "hybridrl.runtime.completion",
    ],
)
def test_what_starts_quickly_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=TOP, capture_output=True, text=True, check=True)
    assert module in result.stdout.split()
    assert not HEAVY & set(result.stdout.split())


@pytest.mark.parametrize("module", [f"hybridrl.main_{name}" for name in ("eval", "ppo", "rm", "sft")])
def test_the_driver_is_forked_before_torch_is_imported_so_cuda_is_untouched(module: str) -> None:
    code = "import os, runpy, sys; os.fork = lambda: os._exit('torch' in sys.modules)"
    command = [sys.executable, "-c", f"{code}; runpy.run_module({module!r}, run_name='__main__')"]
    assert subprocess.run(command, cwd=TOP).returncode == 0


def test_functions_and_files_fit_a_reader() -> None:
    long = [
        f"{name}: {function.name} has {lines} lines"
        for name, tree in TREES.items()
        for function in functions(tree)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > LONGEST_FUNCTION
    ]
    long += [name for name, path in FILES.items() if len(path.read_text().splitlines()) > LONGEST_FILE]
    assert not long


@pytest.mark.parametrize(("name", "schema"), [("ppo_trainer", PPOConfig), ("sft_trainer", SFTConfig)])
def test_conf_and_schema_have_the_same_keys(name: str, schema: type) -> None:
    assert sorted(key_meanings(TOP / "conf" / f"{name}.yaml")) == sorted(value_keys(schema))


# A preset sets keys whose meaning stands in another file.
EXPLAINED = sorted({*TOP.glob("conf/**/*.yaml")} - {*TOP.glob("conf/preset/*.yaml")})


@pytest.mark.parametrize("file", EXPLAINED, ids=lambda path: path.relative_to(TOP).as_posix())
def test_every_key_has_a_comment_above_it(file: Path) -> None:
    lines = ["", *file.read_text(encoding="utf-8").splitlines()]
    bare = [
        key.value
        for key in value_nodes(yaml.compose(file.read_text(encoding="utf-8")))
        if not lines[key.start_mark.line].lstrip().startswith("#")
    ]
    assert not bare


def value_nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    """The keys of a YAML mapping that are given a value there; the defaults list is not a key."""
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from value_nodes(value)
        elif key.value != "defaults":
            yield key


@pytest.mark.parametrize("file", sorted(TOP.glob("scripts/**/*.py")), ids=lambda path: path.name)
def test_a_program_is_a_file_and_no_string(file: Path) -> None:
    """Nothing checks a program in a string, and its script is run only now and then."""
    texts = [text_of(node) for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    assert [text for text in texts if is_program(text)] == []


def text_of(node: ast.AST) -> str:
    """A string, with a number in place of what is inserted."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "(0)" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def is_program(text: str) -> bool:
    """Whether a text is Python that imports or defines something."""
    try:
        return any(isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef) for node in ast.parse(text).body)
    except (SyntaxError, ValueError):  # also a text that cannot be encoded
        return False


def test_a_class_has_its_name_for_itself() -> None:
    places: dict[str, list[str]] = {}
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
