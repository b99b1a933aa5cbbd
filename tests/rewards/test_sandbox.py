"""What a program in a response can and cannot do. Each program prints "done" if it was denied, not stopped."""

import time

import pytest

from hybridrl.config import ConfigError
from hybridrl.rewards.sandbox import run as sandbox
from hybridrl.rewards.sandbox.run import ProgramLimits, run

QUICK = ProgramLimits(seconds=1.0, total_seconds=10.0)


def outcome(program: str, limits: ProgramLimits = QUICK) -> str | None:
    (output,) = run(program, [""], limits)
    return output


def test_a_program_reads_its_input_and_its_output_comes_back():
    outputs = run("a, b = map(int, input().split())\nprint(a + b)", ["1 2\n", "3 4", "x y"], QUICK)
    assert outputs == ["3\n", "7\n", None]


def test_the_standard_library_is_there_and_nothing_else(monkeypatch):
    monkeypatch.setenv("SECRET", "42")
    assert outcome("import math, heapq, collections, itertools, re, json\nprint(math.gcd(4, 6))") == "2\n"
    for module in ("numpy", "hybridrl", "pip"):
        assert outcome(f"import {module}") is None
    assert outcome("import os, sys\nprint('SECRET' in os.environ, len(sys.argv))") == "False 1\n"


def test_threads_are_a_programs_own_business():
    start = "threading.stack_size(1 << 26)\nthreading.Thread(target=print, args=['done']).start()"
    assert outcome(f"import threading\n{start}") == "done\n"


def test_the_input_can_be_opened_as_a_file():
    assert run("print(open(0).read())", ["x"], QUICK) == ["x\n"]
    assert run("import sys\nsys.stdin = open('/dev/stdin')\nprint(input())", ["x"], QUICK) == ["x\n"]


@pytest.mark.parametrize(
    "attempt",
    [
        "import sqlite3, ssl, hashlib, lzma, zoneinfo, multiprocessing, asyncio, unittest, ctypes",
        "import datetime; datetime.datetime.strptime('2020', '%Y')",
        "'x'.encode('cp1252'), 'x'.encode('idna'), 'x'.encode('shift_jis')",
        "import decimal, fractions, statistics, random; random.seed(1)",
        "import concurrent.futures; list(concurrent.futures.ThreadPoolExecutor(2).map(str, range(9)))",
        "exit()",
    ],
)
def test_the_library_is_there_though_no_file_can_be_opened(attempt):
    assert outcome(f"print('done')\n{attempt}") == "done\n"


@pytest.mark.parametrize(
    "attempt",
    [
        *("open({file!r}, 'w')", "open({file!r}, 'a')", "open({file!r} + '2', 'x')", "os.unlink({file!r})"),
        *("os.rename({file!r}, {file!r} + '2')", "os.truncate({file!r}, 0)", "os.chmod({file!r}, 0)"),
        *("os.mkdir({file!r} + '2')", "os.symlink({file!r}, {file!r} + '2')", "os.mkfifo({file!r} + '2')"),
        *("os.fork()", "os.posix_spawn('/bin/true', ['true'], {{}})", "os.execv('/bin/true', ['true'])"),
        *("subprocess.run(['true'])", "multiprocessing.Process(target=print).start()"),
        *("socket.socket()", "socket.socket(socket.AF_UNIX)", "socket.socketpair()"),
        *("os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "signal.pidfd_send_signal(1, 9)"),
        *("os.setuid(1000)", "os.nice(-5)", "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))"),
        *("os.memfd_create('x')", "os.sched_setaffinity(0, [0])"),
    ],
)
def test_what_reaches_beyond_the_program_is_rejected(tmp_path, attempt):
    file = tmp_path / "file"
    file.write_text("as it was")
    imports = "import multiprocessing, os, resource, signal, socket, subprocess"
    program = f"{imports}\ntry:\n    {attempt.format(file=str(file))}\nexcept (OSError, ValueError):\n    print('done')"
    assert outcome(program) == "done\n"
    assert file.read_text() == "as it was" and list(tmp_path.iterdir()) == [file]


def test_the_filter_cannot_be_taken_off_again():
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
filter_again, trace, socket_by_another_number = (22, 0, 0, 0, 0), (101, 0, 0, 0, 0), (41 + 0x40000000, 1, 1, 0)
print(libc.prctl(*filter_again), libc.syscall(*trace), libc.syscall(*socket_by_another_number), ctypes.get_errno())
"""
    assert outcome(program) == "-1 -1 -1 1\n"


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import signal\nfor n in (1, 2, 15, 24, 25, 27): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "print('x' * 10_000_000)",
        "while True: print('x')",
        "import mmap\nmmap.mmap(-1, 3 << 30)",
        "x = []\nwhile True: x.append(' ' * 1_000_000)",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
        "import ctypes\nctypes.string_at(0)",
        "10 ** 10 ** 10",
        "(" * 100_000,
        "x = " + "-" * 100_000 + "1",
        "print('\ud800')",
        "\0",
        "raise KeyError",
        "raise SystemExit(3)",
        "import os\nos._exit(3)",
        "import os\nos.close(1)\nprint('x')",
        "import threading\nwhile True: threading.Thread(target=input).start()",
    ],
)
def test_a_program_that_overruns_or_fails_has_no_output_and_the_next_run_is_its_own(program):
    began = time.monotonic()
    assert outcome(program) is None
    assert time.monotonic() - began < 10
    assert outcome("print('done')") == "done\n"


def test_runs_share_nothing():
    program = "import sys\nsys.modules.setdefault('seen', []).append(1)\nprint(len(sys.modules['seen']))"
    assert run(program, ["", ""], QUICK) == ["1\n", "1\n"]


def test_all_runs_together_have_a_time_limit_and_what_is_not_reached_failed():
    limits = ProgramLimits(seconds=1.0, total_seconds=2.0)
    began = time.monotonic()
    outputs = run("n = int(input())\nwhile n: pass\nprint('done')", ["0", "1", "1", "1", "0"], limits)
    assert outputs == ["done\n", None, None, None, None]
    assert time.monotonic() - began < 6


def test_asserts_count_only_if_they_were_reached():
    tests = ["assert f(1) == 2", "assert f(1) == 3"]
    assert run("def f(x): return x + 1", tests, QUICK, "asserts") == ["", None]
    for escape in ("raise SystemExit(0)", "import os\nos._exit(0)", "import sys\nsys.exit()"):
        assert run(escape, tests[:1], QUICK, "asserts") == [None]


def test_a_function_or_a_method_is_called_and_its_value_comes_back():
    assert run("def f(a, b): return [a, b]", [[1, "x"]], QUICK, "call", "f") == ['[1, "x"]']
    program = "class Solution:\n    def f(self, a):\n        print('noise')\n        return a + 1"
    assert run(program, [[1], ["x"]], QUICK, "call", "f") == ["2", None]
    assert run("", [[]], QUICK, "call", "f") == [None]


def test_a_machine_without_the_filter_is_rejected(monkeypatch):
    monkeypatch.setattr(sandbox, "supported", lambda: False)
    with pytest.raises(ConfigError, match=r"x86_64 and aarch64; set reward\.custom_reward_function\.path"):
        outcome("print(1)")
