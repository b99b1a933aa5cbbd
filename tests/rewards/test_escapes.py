"""Nothing that a program tries gets it out of the sandbox: with and without Landlock, with and without root."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hybridrl.required import required
from hybridrl.rewards.sandbox import confinement
from hybridrl.rewards.sandbox import run as sandbox
from hybridrl.rewards.sandbox.run import ProgramLimits, run
from tests.rewards import escapes

HOUSE = Path(__file__).parents[2]
LIMITS = ProgramLimits(seconds=5.0, total_seconds=60.0)
KILLED = {"a longer output", "many threads", "a call of 32 bits"}  # for trying, or unable to say that it was held
X86 = os.uname().machine == "x86_64"


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def can_drop_root() -> bool:
    unshare = shutil.which("unshare")
    return os.getuid() == 0 and bool(unshare) and subprocess.run([unshare, "-U", "true"]).returncode == 0


@pytest.mark.skipif(not X86, reason="the attempts have system calls by their numbers on x86_64")
@pytest.mark.parametrize("options", [[], ["without_landlock"]], ids=["landlock", "no landlock"])
@pytest.mark.parametrize("unprivileged", [False, True], ids=["as is", "without root"])
def test_every_attempt_is_held(tmp_path, victim, options, unprivileged):
    if unprivileged and not can_drop_root():
        pytest.skip("this is no root, or one without user namespaces")
    file = tmp_path / "secret"
    file.write_text(escapes.SECRET)
    (tmp_path / "secret_module.py").write_text("")
    # In a user namespace that maps nobody, the process owns the files of root and has no right beyond that.
    command = [*(["unshare", "-U"] if unprivileged else []), sys.executable, escapes.__file__, str(victim.pid)]
    done = subprocess.run(
        [*command, str(file), *options],
        env=os.environ | {"PYTHONPATH": str(HOUSE), "API_KEY": escapes.SECRET},
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=True,
    )
    outcomes = json.loads(done.stdout)
    assert len(outcomes) == len(escapes.ATTEMPTS) > 100
    assert {name for name, outcome in outcomes.items() if outcome != "held\n"} == KILLED
    assert victim.poll() is None and file.read_text() == escapes.SECRET
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "secret_module.py"]


def test_fcntl_copies_descriptors_and_reads_and_sets_their_flags_and_nothing_else():
    harmless = {0, 1, 2, 3, 4, 1030}
    commands = [*range(17), *range(1024, 1042), (1 << 16) + 4]
    program = "import fcntl\ntry: print(fcntl.fcntl(0, int(input()), 0) >= 0)\nexcept PermissionError: print('held')"
    outputs = run(program, [str(command) for command in commands], LIMITS)
    assert outputs == ["True\n" if command in harmless else "held\n" for command in commands]


@pytest.mark.skipif(not X86, reason="numbers on x86_64")
def test_every_system_call_that_is_not_named_is_rejected():
    program = """
import ctypes
libc, allowed, answered = ctypes.CDLL(None, use_errno=True), set(map(int, input().split())), []
for number in {*range(600)} - allowed - {335, 336}:  # of kernel probes, which no filter sees
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 38):
        answered.append(number)
print(answered)
"""
    from_table = {int(number) for number in confinement.ALLOWED.split()[1::3]}
    assert run(program, [" ".join(map(str, from_table))], LIMITS) == ["[72]\n"]  # fcntl: copy the input's descriptor
    opening = {2, 85, 257, 304, 437}
    starting = {41, 57, 58, 59, 322}
    reading_others = {101, 310, 311, 425, 438}
    assert not from_table & (opening | starting | reading_others)


def test_landlock_alone_holds_files_too(monkeypatch, tmp_path):
    """The second barrier, tried where the first one is taken away."""
    patch = "import hybridrl.rewards.sandbox.confinement as c; c.filter_system_calls = print; main{descriptors}"
    monkeypatch.setattr(sandbox, "START", sandbox.START.replace("main{descriptors}", patch))
    (tmp_path / "file").write_text("")
    program = "import os\nfor path in input().split():\n    try: open(path)\n    except PermissionError: print('held')"
    paths = [tmp_path / "file", f"/proc/{os.getpid()}/environ", "/proc/self/mem", "/etc/passwd"]
    (output,) = run(program, [" ".join(map(str, paths))], LIMITS)
    if "held" not in output:
        pytest.skip("this kernel has no Landlock")
    assert required(output).count("held") == len(paths)


def test_a_descriptor_that_the_caller_has_open_is_not_the_programs(tmp_path):
    with open(tmp_path / "file", "w") as file:
        os.dup2(file.fileno(), 300)
        os.set_inheritable(300, True)
        program = "import os\ntry: os.fstat(300)\nexcept OSError as error: print(error.errno)"
        assert run(program, [""], LIMITS) == ["9\n"]
        os.close(300)


@pytest.mark.slow
def test_nothing_outlives_a_caller_that_is_killed():
    code = "import sys\nfrom hybridrl.rewards.sandbox.run import *\n"
    code += "run('while True: pass', [''] * 2, ProgramLimits(30, total_seconds=60), sys.argv[1])"
    environment, processes = os.environ | {"PYTHONPATH": str(HOUSE)}, {"stdin": 2, "asserts": 4}
    callers = [subprocess.Popen([sys.executable, "-c", code, kind], env=environment) for kind in processes]
    for caller, expected in zip(callers, processes.values(), strict=True):
        started: list[psutil.Process] = []
        deadline = time.monotonic() + 30
        while len(started) < expected and time.monotonic() < deadline:
            time.sleep(0.05)
            started = psutil.Process(caller.pid).children(recursive=True)
        assert len(started) == expected
        caller.kill()
        caller.wait()
        _, alive = psutil.wait_procs(started, timeout=10)
        assert not alive


UNGUESSABLE = 918273645546
TEST = f"assert f(1) == {UNGUESSABLE}"


@pytest.mark.parametrize(
    "program",
    [
        "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
        "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return E()",
        "class E(type):\n    def __eq__(self, other): return True\nclass F(metaclass=E): pass\ndef f(x): return F",
        "import os\ndef f(x): os._exit(0)",
        "import sys\nsys.exit(0)",
        "def f(x): raise SystemExit(0)",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: ''",
        "import builtins\nbuiltins.AssertionError = int\ndef f(x): return 0",
        "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x): return 0",
        "import atexit\natexit.register(print, '')\ndef f(x): return 0",
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for code in [frame.f_code]:\n            if wanted in code.co_consts: return wanted\n"
        "        frame = frame.f_back\nwanted = 918273645545 + 1",
        "import gc\ndef f(x):\n    text = 'assert' + ' f(1) =='\n"
        "    found = [o for k in gc.get_objects() for o in gc.get_referents(k) if isinstance(o, str) and text in o]\n"
        "    return int(found[0].split()[-1])",
        'import os\nfor fd in range(3, 999):\n    try: os.write(fd, b\'null\\n{"dict": [["value", null]]}\\n\' * 9)\n'
        "    except OSError: pass\nos._exit(0)",
        "import os\nfor fd in range(3, 999):\n    try: os.write(fd, b'[' * 100000 + b'\\n')\n    except OSError: pass\n"
        "os._exit(0)",
        "import os, time\ndef f(x): print(''); time.sleep(60)",
        "def f(x): return [1] * 10**8",
        "def f(x): return f",
        "f = None",
    ],
)
def test_a_program_cannot_pass_asserts_by_deceit(program):
    limits = ProgramLimits(seconds=1.0, total_seconds=20.0)
    honest = f"def f(x): return {UNGUESSABLE - 1} + x"
    assert run(program, [TEST], limits, "asserts") == [None]
    assert run(honest, [TEST], limits, "asserts") == [""]


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("abs = lambda x: 0\ndef f(x): return 5", "assert abs(f(1) - 9) < 1e-6"),
        ("class math:\n    isclose = lambda *a: True\ndef f(x): return 5", "assert math.isclose(f(1), 9)"),
        ("len = lambda x: 9\ndef f(x): return []", "assert len(f(1)) == 9"),
    ],
)
def test_a_program_does_not_replace_what_the_test_compares_with(program, test):
    assert run(program, [test], LIMITS, "asserts") == [None]


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
        ("import math\ndef f(x): return math.pi", "assert math.isclose(f(1), 3.14159265, rel_tol=1e-6)"),
        ("def f(x): x.sort()", "xs = [2, 1]\nf(xs)\nassert xs == [1, 2]"),
        ("def f(x): x['a'] = 1", "xs = {}\nf(xs)\nassert xs == {'a': 1}"),
        ("def f(x):\n    yield from range(x)", "assert list(f(3)) == [0, 1, 2]"),
        ("from collections import Counter\nf = Counter", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(x): return (x, {x}, b'x', 1j, None, float('inf'), 10**5000)[:x]", "assert f(2) == (2, {2})"),
        ("def f(x): return 10 ** x", "assert f(5000) == 10 ** 5000"),
        ("from fractions import Fraction\ndef f(x): return Fraction(1, x)", "assert f(2) == 0.5 and f(3) * 3 == 1"),
        ("def f(x, *, y=1): return x + y", "assert f(1, y=2) == 3"),
        (
            "def f(x): raise ValueError('odd')",
            "try: f(1)\nexcept ValueError as e: assert 'odd' in str(e)\nelse: assert 0",
        ),
        ("def f(x, kind): return [y for y in x if isinstance(y, kind)]", "assert f([1, 'a'], int) == [1]"),
        (
            "class P:\n    def __init__(self, a): self.a = a\n    def __lt__(self, o): return self.a < o.a\n"
            "    def get(self): return self.a\ndef f(ps): return max(ps).a",
            "a, b = P(1), P(2)\nb.a = 3\nassert f([a, b]) == 3 and a.get() == 1 and a < b and isinstance(a, P)",
        ),
        ("def twice(f): return lambda x: f(f(x))", "assert twice(lambda x: x * 3)(2) == 18"),
        (
            "def f(keep, xs): return [x for x in xs if keep(x)]\ndef even(x): return x % 2 == 0",
            "assert f(lambda x: even(x), [1, 2, 4]) == [2, 4]",
        ),
        ("def f(g):\n    try: g(0)\n    except ZeroDivisionError: return 'z'", "assert f(lambda x: 1 / x) == 'z'"),
        (
            "class P:\n    def __init__(self, x): self.x = x\ndef f(g, ps): return [g(p) for p in ps]",
            "assert f(lambda p: p.x, [P(1), P(2)]) == [1, 2]",
        ),
        ("def f(x):\n    yield from range(x)", "assert 2 in f(3) and 3 not in f(3)"),
        (
            "class V:\n    def __init__(self, x): self.x, self.next = x, None\n"
            "    def __add__(self, o): return V(self.x + o.x)\n    def __eq__(self, o): return self.x == o.x\n"
            "    def __getitem__(self, i): return self.x * i\n    def __len__(self): return self.x",
            "a = V(1) + V(2)\nassert a == V(3) and a != V(4) and a in [V(3)] and a != None and a.next == None\n"
            "assert a[2] == 6 and len(a) == 3 and a and len({a: 1, 0: 2}) == 2",
        ),
        ("class Counter:\n    def count(self): return 1", "c = Counter()\nassert c.count() == 1"),
        ("def f(x): return [x, x]", "assert Counter(f('a')) == Counter({'a': 2}) and isclose(len(f('a')), 2)"),
        ("def sorted(xs): return xs[::-1]", "xs = [2, 1]\nassert sorted(xs) == [1, 2]"),
        ("def f(x): return x + 1", "def check(candidate):\n    assert abs(candidate(1) - 2) < 1e-6\ncheck(f)"),
    ],
)
def test_honest_programs_pass_the_tests_that_python_would_let_them_pass(program, test):
    assert run(program, [test], LIMITS, "asserts") == [""]
