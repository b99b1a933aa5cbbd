"""Mutation testing for scripts/mutation.sh: which mutants there are, which are drawn, and whether tests kill them.

The mutants are those of mutmut's operators. mutmut's own runner imports torch for every mutant, or all of them in one
module of switches, which would change the source that some code reads; here a process that has imported the libraries
forks for each mutant, and the child imports the package from a copy of the checkout with that mutant in it.
"""

import argparse
import contextlib
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import chain, zip_longest
from pathlib import Path

import yaml

TOP = Path(__file__).parent.parent
REQUIREMENTS = ("mutmut>=3.8.1,<3.9", "libcst>=1.9,<2")
SEED, COUNT, LEAST = 20261126, 300, 0.9
SELECT = "not slow and not gpu and not drill"
# Imported once; a child imports the rest.
LIBRARIES = ("torch", "transformers", "ray", "datasets", "peft", "pydantic", "hydra", "fastapi", "pytest", "hypothesis")
KERNELS, FAULTS = "hybridrl/core/training/logit_kernels.py", "scripts/kernel_faults.yaml"
# Each mutated file's tests, those first that are quick and likely to fail.
TESTS = {
    "hybridrl/core/algorithms/algorithm.py": "core/algorithms/test_algorithm.py core/algorithms/test_agreement.py "
    "core/algorithms/test_lookup.py runs/test_trials.py",
    "hybridrl/core/algorithms/batch_metrics.py": "core/algorithms/test_batch_metrics.py "
    "core/algorithms/test_agreement.py agents/environments/test_conversations.py",
    "hybridrl/core/algorithms/estimators.py": "core/algorithms/test_estimators.py",
    "hybridrl/core/algorithms/objective.py": "core/algorithms/test_objective.py "
    "core/algorithms/test_algorithm.py core/experience/test_episodes.py",
    "hybridrl/core/algorithms/policy_losses.py": "core/algorithms/test_policy_losses.py",
    "hybridrl/core/algorithms/rollout_correction.py": "core/algorithms/test_rollout_correction.py",
    "hybridrl/runs/trials.py": "runs/test_trials.py runs/test_extensions.py doctor/test_algorithm.py",
    "hybridrl/checkpoint/store.py": "checkpoint/test_retention.py checkpoint/test_store.py checkpoint/test_damage.py "
    "checkpoint/test_saver.py",
    "hybridrl/core/experience/batching.py": "core/experience/test_episodes.py core/experience/test_collector.py "
    "agents/environments/test_conversations.py core/experience/test_asynchronous.py",
    "hybridrl/rewards/score.py": "rewards/test_score.py rewards/test_parts.py rewards/test_shaping.py "
    "rewards/test_fault_guard.py rewards/test_managers.py",
    "hybridrl/core/training/token_outputs.py": "core/training/test_linear_log_probs.py",
    KERNELS: "core/training/test_logit_kernels.py::test_outputs_and_gradients_match_full_logits",
    "hybridrl/core/training/losses.py": "core/training/test_losses.py core/training/test_bypass.py "
    "core/training/test_value_model.py",
    "hybridrl/core/training/packing.py": "core/training/test_packing.py core/training/test_attention.py",
    "hybridrl/core/training/partition.py": "core/training/test_balance.py core/training/test_planning.py",
    "hybridrl/core/training/planning.py": "core/training/test_planning.py",
    "hybridrl/core/weights/buckets.py": "core/weights/test_layout.py core/weights/test_handles.py "
    "core/weights/test_sync.py core/weights/test_broadcast.py",
}


@dataclass
class Mutant:
    """One changed source; `change` is the operator's name. A mutant without a change measures its tests' time."""

    number: int
    file: str
    line: int
    change: str
    source: str

    def __str__(self) -> str:
        return f"{self.number:3d} {self.file}:{self.line} {self.change}"


def mutations(file: str) -> Iterator[tuple[str, int, str, Callable[[], str]]]:
    """Yield file, line, operator and what makes the source of each mutant. Docstrings, messages (strings with a space)
    and annotations stay as they are."""
    import libcst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.mutators import mutation_operators

    wrapper = MetadataWrapper(libcst.parse_module((TOP / file).read_text(encoding="utf-8")))
    positions, nodes = wrapper.resolve(PositionProvider), [wrapper.module]
    while nodes:
        node = nodes.pop()
        if isinstance(node, libcst.Annotation) or (isinstance(node, libcst.SimpleString) and " " in node.value):
            continue
        nodes += reversed(node.children)
        for kind, operator in mutation_operators:
            for mutated in operator(node) if isinstance(node, kind) else ():
                make = partial(wrapper.module.deep_replace, node, mutated)
                yield file, positions[node].start.line, operator.__name__, lambda make=make: make().code


def drawn(seed: int, count: int) -> list[Mutant]:
    """Return so many mutants, from each operator in turn, as two thirds of all would otherwise change an argument.
    Those that do not compile or repeat another are passed over."""
    by_operator = defaultdict(list)
    for file in TESTS:
        for mutation in mutations(file) if file != KERNELS else ():
            by_operator[mutation[2]].append(mutation)
    for operator, found in by_operator.items():
        random.Random(f"{seed} {operator}").shuffle(found)
    turns = zip_longest(*(found for _, found in sorted(by_operator.items())))
    sources: dict[str, Mutant] = {}
    for file, line, operator, make in filter(None, chain.from_iterable(turns)):
        if len(sources) == count:
            break
        source = make()
        with contextlib.suppress(SyntaxError):
            compile(source, file, "exec")
            sources.setdefault(source, Mutant(len(sources) + 1, file, line, operator, source))
    return list(sources.values())


def planted(first: int) -> list[Mutant]:
    """Return the faults of the kernels, numbered from `first`."""
    before = (TOP / KERNELS).read_text(encoding="utf-8")
    faults = yaml.safe_load((TOP / FAULTS).read_text(encoding="utf-8"))
    mutants = []
    for number, fault in enumerate(faults, start=first):
        assert before.count(fault["old"]) == 1, f"{FAULTS}: {fault['old']!r} does not occur once"
        line = before[: before.index(fault["old"])].count("\n") + 1
        mutants.append(Mutant(number, KERNELS, line, fault["why"], before.replace(fault["old"], fault["new"])))
    return mutants


class Copy:
    """A copy of the checkout, in which a child tests a mutant at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.pid = directory, 0
        files = subprocess.check_output(("git", "ls-files", "-zco", "--exclude-standard"), cwd=TOP, text=True)
        for file in filter(None, files.split("\0")):
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TOP / file, directory / file)
        # Python compares the contents of files with these, not their times and sizes, which mutants can share.
        command = (sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "hybridrl", "tests")
        subprocess.run(command, cwd=directory, check=True)

    def start(self, mutant: Mutant, limit: float) -> None:
        """Fork a child that tests a mutant."""
        self.mutant, self.began, self.limit = mutant, time.monotonic(), limit
        (self.directory / mutant.file).write_text(mutant.source, encoding="utf-8")
        self.pid = os.fork()
        if not self.pid:
            status = 3  # as pytest's for an internal error
            try:
                status = self._test()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def _test(self) -> int:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        output = os.open(f"{self.directory}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.directory)
        sys.path[0] = os.environ["PYTHONPATH"] = str(self.directory)
        import pytest

        paths = [f"tests/{path}" for path in TESTS[self.mutant.file].split()]
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", SELECT, *paths])
        used = import_module(self.mutant.file.removesuffix(".py").replace("/", ".")).__file__ if not status else None
        assert used in (None, str(self.directory / self.mutant.file)), used
        return int(status)

    def result(self) -> str | None:
        """Return "survived" or how the mutant was killed, and undo it; None if the child still runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        late = time.monotonic() > self.began + self.limit
        if not pid and not late:
            return None
        self.end(ended=bool(pid))
        shutil.copy2(TOP / self.mutant.file, self.directory / self.mutant.file)
        code = os.waitstatus_to_exitcode(status) if pid else None
        return {None: "out of time", 0: "survived", 1: "killed"}.get(code, f"killed (status {code})")

    def end(self, *, ended: bool = False) -> None:
        """Kill what the child has started and, unless it has ended, the child."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            if not ended:
                os.waitpid(self.pid, 0)
            self.pid = 0


def run(mutants: list[Mutant], copies: Sequence[Copy], limits: dict[str, float]) -> Iterator[tuple[Mutant, str, float]]:
    """Yield each mutant with its result and the seconds that it took."""
    waiting, idle = list(reversed(mutants)), list(copies)
    while waiting or len(idle) < len(copies):
        while waiting and idle:
            mutant = waiting.pop()
            idle.pop().start(mutant, limits.get(mutant.file, 600))
        for copy in copies:
            if copy not in idle and (result := copy.result()):
                idle.append(copy)
                yield copy.mutant, result, time.monotonic() - copy.began
        time.sleep(0.02)


def measured(files: set[str], copies: Sequence[Copy]) -> dict[str, float]:
    """Return the seconds after which a mutant of each file counts as killed, from tests without a mutant."""
    unchanged = [Mutant(0, file, 0, "", (TOP / file).read_text(encoding="utf-8")) for file in sorted(files)]
    limits = {}
    for mutant, result, seconds in run(unchanged, copies, {}):
        print(f"unchanged {mutant.file}: {seconds:.1f} s", flush=True)
        limits[mutant.file] = 20 + 3 * seconds
        if result != "survived":
            raise SystemExit(f"the tests fail without a mutant ({result}): {TESTS[mutant.file]}")
    return limits


def tested(mutants: list[Mutant], copies: Sequence[Copy]) -> list[Mutant]:
    """Test mutants and return those that survive."""
    survivors = []
    limits = measured({mutant.file for mutant in mutants}, copies)
    for done, (mutant, result, seconds) in enumerate(run(mutants, copies, limits), start=1):
        print(f"{done}/{len(mutants)} {result}: {mutant} ({seconds:.1f} s)", flush=True)
        if result == "survived":
            survivors.append(mutant)
    return survivors


def report(mutants: list[Mutant], survivors: list[Mutant]) -> int:
    """Print what survived and the score; return the exit status."""
    for mutant in survivors:
        print(f"\nsurvived: {mutant}")
        before = (TOP / mutant.file).read_text(encoding="utf-8").splitlines()
        print(*list(difflib.unified_diff(before, mutant.source.splitlines(), n=1, lineterm=""))[2:], sep="\n")
    passed = True
    for subject, kernels, least in (("mutants", False, LEAST), ("faults of the kernels", True, 1.0)):
        number, alive = (sum((one.file == KERNELS) == kernels for one in some) for some in (mutants, survivors))
        killed = number - alive
        print(f"{subject}: {killed} of {number} killed" + (f", {killed / number:.1%}" if number else ""))
        passed = passed and killed >= least * number
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the draw; default {SEED}")
    parser.add_argument("--count", type=int, default=COUNT, help=f"mutants drawn; default {COUNT}")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time; default 2")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="of the drawn mutants and faults, these")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="mutation-") as work:
        install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", f"{work}/tools")
        subprocess.run((*install, *REQUIREMENTS), check=True)
        sys.path.append(f"{work}/tools")
        mutants = drawn(options.seed, options.count)
        mutants += planted(options.count + 1)
        mutants = [mutant for mutant in mutants if options.only is None or mutant.number in options.only]
        versions = " ".join(f"{name} {version(name)}" for name in ("mutmut", "libcst", "torch", "pytest"))
        print(f"{len(mutants)} mutants, seed {options.seed}, Python {sys.version.split()[0]}, {versions}", flush=True)
        changes = Counter(mutant.change for mutant in mutants if mutant.file != KERNELS)
        print(*(f"{number} {change}" for change, number in sorted(changes.items())), sep=", ", flush=True)
        for library in LIBRARIES:
            import_module(library)
        copies = [Copy(Path(work) / str(number)) for number in range(options.jobs)]
        tempfile.tempdir = os.environ["TMPDIR"] = f"{work}/tmp"
        Path(tempfile.tempdir).mkdir()
        try:
            return report(mutants, tested(mutants, copies))
        finally:
            for copy in copies:
                copy.end()


if __name__ == "__main__":
    sys.exit(main())
