"""What hybridrl takes from vLLM exists there with these parameters, and what vLLM calls of hybridrl exists here: in the
installed version, and in those whose sources VLLM_SOURCES names."""

import ast
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hybridrl.required import required
from tests.core.rollout.vllm_sources import Found, Sources, signature_of, why_not_callable

TOP = Path(__file__).parents[3]
FILES = [*sorted(TOP.glob("hybridrl/core/rollout/vllm/*.py")), TOP / "hybridrl" / "model_merger" / "source.py"]
INSTALLED = Path(required(required(find_spec("vllm")).origin)).parent
VERSIONS = [INSTALLED, *map(Path, filter(None, os.environ.get("VLLM_SOURCES", "").split(":")))]
ENGINE = ("vllm.v1.engine.llm_engine", "LLMEngine")
# File and name of a variable -> the class of vLLM's that it is an instance of.
RECEIVERS = {
    ("engine.py", "engine"): ENGINE,
    ("collector.py", "engine"): ENGINE,
    ("worker.py", "manager"): ("vllm.lora.worker_manager", "WorkerLoRAManager"),
    ("source.py", "engine"): ("vllm.entrypoints.llm", "LLM"),
}
USED = ("__init__", "add_request", "step", "has_unfinished_requests", "sleep", "wake_up", "reset_prefix_cache")
# An attribute of LLMEngine -> the class that hybridrl puts there.
REPLACED = {"output_processor": ("collector.py", "Collector"), "logger_manager": ("collector.py", "Observer")}
# A class of hybridrl's -> the abstract one of vLLM's.
DERIVED = {
    ("worker.py", "BucketTransfer"): ("vllm.distributed.weight_transfer.base", "WeightTransferEngine"),
    ("collector.py", "Observer"): ("vllm.v1.metrics.loggers", "StatLoggerBase"),
}


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda root: Sources(root).version)
def sources(request: pytest.FixtureRequest) -> Sources:
    return Sources(request.param)


def imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """The module and name behind every name that is imported from vLLM."""
    nodes = [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module]
    from_vllm = [one for one in nodes if required(one.module).partition(".")[0] == "vllm"]
    return {name.asname or name.name: (node.module, name.name) for node in from_vllm for name in node.names}


def missing_names(sources: Sources, files: list[Path]) -> Iterator[str]:
    for file in files:
        for module, name in imported(ast.parse(file.read_text())).values():
            if sources.find(module, name) is None:
                yield f"{file.name}: {module}.{name}"


def wrong_calls(sources: Sources, files: list[Path]) -> Iterator[str]:
    """Calls of what is imported from vLLM, and of methods of what RECEIVERS names."""
    for file in files:
        tree = ast.parse(file.read_text())
        names = imported(tree)
        for call in calls_in(tree):
            if isinstance(call.func, ast.Name) and call.func.id in names:
                found = sources.find(*names[call.func.id])
                signature = sources.signature(found) if found else None
            elif isinstance(call.func, ast.Attribute) and (found := receiver(sources, file, call.func.value)):
                node = sources.members(found).get(call.func.attr)
                signature = signature_of(node, method=True) if node else None
            else:
                continue
            if signature and (reason := why_not_callable(signature, call)):
                yield f"{file.name}: {reason}"


def receiver(sources: Sources, file: Path, node: ast.expr) -> Found | None:
    place = RECEIVERS.get((file.name, node.id)) if isinstance(node, ast.Name) else None
    return sources.find(*place) if place else None


def missing_attributes(sources: Sources, files: list[Path]) -> Iterator[str]:
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            found = receiver(sources, file, node.value)
            if found and node.attr not in sources.members(found):
                yield f"{file.name}: {required(found.node).name}.{node.attr}"


def ours(file: str, name: str) -> ast.ClassDef:
    tree = ast.parse((TOP / "hybridrl" / "core" / "rollout" / "vllm" / file).read_text())
    return next(one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == name)


def calls_in(node: ast.AST) -> list[ast.Call]:
    return [one for one in ast.walk(node) if isinstance(one, ast.Call)]


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def test_every_name_that_is_imported_from_vllm_exists(sources):
    assert list(missing_names(sources, FILES)) == []


def test_every_call_has_parameters_that_vllm_takes(sources):
    assert list(wrong_calls(sources, FILES)) == []


def test_engines_and_managers_of_adapters_have_the_attributes_that_are_used(sources):
    assert list(missing_attributes(sources, FILES)) == []


def test_every_argument_of_an_engine_is_one_of_vllms(sources):
    tree = ast.parse((TOP / "hybridrl" / "core" / "rollout" / "vllm" / "engine.py").read_text())
    function = next(one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == "vllm_arguments")
    names = [key for one in ast.walk(function) if isinstance(one, ast.Dict) for key in one.keys]
    keys = {key.value for key in names if isinstance(key, ast.Constant)}
    parameters = sources.signature(sources.find("vllm", "EngineArgs")).parameters
    assert len(keys) > 20 and sorted(keys - set(parameters)) == []


@pytest.mark.parametrize("attribute", REPLACED)
def test_what_vllms_engine_calls_of_its_output_processor_and_logger_exists_here(sources, attribute):
    engine = sources.members(sources.find(*ENGINE))
    here = methods(ours(*REPLACED[attribute]))
    if attribute == "logger_manager":
        here = sources.members(sources.find(*DERIVED["collector.py", "Observer"])) | here
    calls = [one for name in USED for one in calls_in(engine[name])]
    calls = [one for one in calls if ast.unparse(one.func).startswith(f"self.{attribute}.")]
    assert len(calls) >= 3
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        assert why_not_callable(signature_of(here[call.func.attr], method=True), call) == ""


@pytest.mark.parametrize("derived", DERIVED, ids=lambda place: place[1])
def test_every_abstract_method_of_vllms_is_implemented_with_as_many_parameters(sources, derived):
    base, here = sources.members(sources.find(*DERIVED[derived])), methods(ours(*derived))
    abstract = {
        name: node
        for name, node in base.items()
        if node and name != "__init__" and any("abstractmethod" in ast.unparse(one) for one in node.decorator_list)
    }
    assert abstract and sorted(abstract.keys() - here.keys()) == []
    for name, node in abstract.items():
        given = [one for one in signature_of(node, method=True).parameters.values() if one.default is one.empty]
        call = ast.Call(ast.Name(name), [ast.Name(one.name) for one in given if one.kind <= 1], [])
        assert why_not_callable(signature_of(here[name], method=True), call) == ""


def test_an_adapter_is_loaded_with_what_its_manager_passes(sources):
    manager = sources.find("vllm.lora.worker_manager", "WorkerLoRAManager").node
    (call,) = [one for one in calls_in(manager) if ast.unparse(one.func).endswith(".from_local_checkpoint")]
    here = signature_of(methods(ours("worker.py", "AdapterFromMemory"))["from_local_checkpoint"], method=True)
    assert why_not_callable(here, call) == ""
    base = sources.members(sources.find("vllm.lora.lora_model", "LoRAModel"))["from_lora_tensors"]
    consumed = {"lora_dir", "expected_lora_modules", "moe_ep_spec", "tensorizer_config_dict"}
    passed = [one for one in call.keywords if one.arg not in consumed]
    passed.append(ast.keyword("tensors", ast.Name("tensors")))
    assert why_not_callable(signature_of(base, method=True), ast.Call(ast.Name("from_lora_tensors"), [], passed)) == ""


def test_a_name_that_is_gone_another_parameter_and_another_method_are_noticed(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("from .parameters import Kept\nfrom dataclasses import dataclass\n")
    (tmp_path / "vllm" / "parameters.py").write_text(
        "@dataclass\nclass Kept:\n    size: int\n    seed: int = 0\n\n\ndef make(size, *, seed=0): ...\n"
    )
    user = tmp_path / "user.py"
    user.write_text(
        "from vllm import Kept, Lost\nfrom vllm.parameters import make\n"
        "Kept(size=1)\nKept(width=1)\nmake(1, seed=2)\nmake(1, 2)\nmake()\nmake(**{})\n"
    )
    sources = Sources(tmp_path / "vllm")
    assert list(missing_names(sources, [user])) == ["user.py: vllm.Lost"]
    assert [line.partition(": ")[2].partition(":")[0] for line in wrong_calls(sources, [user])] == [
        "Kept(width=1)",
        "make(1, 2)",
        "make()",
    ]
