import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from hybridrl.config import ConfigError
from hybridrl.required import required
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.process import ScorerDied
from hybridrl.rewards.score import Score, ScoringRequest

# Does what the answer says, so that a test shows in its answers what happens in the scoring process.
OBEDIENT = """
import ctypes, os, pickle, re, subprocess, sys, threading, time

def connection():
    return next(fd for fd in range(3, 4096) if os.path.exists(f"/proc/self/fd/{fd}")
                and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"))

def compute_score(solution_str, ground_truth, pid_file=None):
    match solution_str.split():
        case ["loop"]:
            while True: pass
        case ["backtrack"]:  # in C, deaf to signals that Python would handle
            re.match("(a+)+$", "a" * 64 + "b")
        case ["spawn"]:
            child = subprocess.Popen(["sleep", "60"])
            open(pid_file, "w").write(str(child.pid))
            child.wait()
        case ["exit"]: os._exit(3)
        case ["crash"]: ctypes.string_at(0)
        case ["raise"]: raise KeyError(solution_str)
        case ["none"]: return None
        case ["print"]: print("a word from the reward")
        case ["sleep", seconds]: time.sleep(float(seconds))
        case ["half"]:
            os.write(connection(), b"\\0hybridrl" + (1000).to_bytes(8) + b"not all of it")
            time.sleep(60)
        case ["garbage"]: os.write(connection(), b"a line of a library that writes where it should not\\n")
        case ["send", message]:
            content = pickle.dumps(eval(message))
            os.write(connection(), b"\\0hybridrl" + len(content).to_bytes(8) + content)
        case ["kill"]: os.kill(os.getppid(), 9)
        case ["leave", code]: sys.exit(int(code))
        case ["linger"]:
            threading.Thread(target=time.sleep, args=[0.2]).start()  # waited for when the interpreter ends
            os.close(connection())
            raise BaseException
        case ["grow"]:
            hoard = []
            while True: hoard.append(b"x" * (1 << 24))
        case ["child"]:
            os.system(f"{sys.executable} -c 'x = b\\"x\\" * (1 << 30); import time; time.sleep(60)'")
    return {"score": float(ground_truth), "pid": os.getpid()}
"""


def requests(*solutions: str) -> list[ScoringRequest]:
    """Return one request per text; the n-th one's score is n if its scorer survives."""
    return [ScoringRequest("test", solution, str(position), {}) for position, solution in enumerate(solutions)]


def results(futures: list[Future[Score]]) -> list[Score]:
    return [future.result(timeout=10) for future in futures]


def values(scores: list[Score]) -> list[float | None]:
    return [score.value for score in scores]


def exists(pid: int) -> bool:
    """Whether the process still runs; one that nobody has waited for yet counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


SLOW_FIRST = """
import os, time
def score(text):
    if text.startswith("slow") and not os.path.exists({file!r}):
        with open({file!r} + "+", "w") as file:
            file.write(str(os.getpid()))
        os.rename({file!r} + "+", {file!r})
        time.sleep(60)
    return float(text[-1])
"""


def wait_until(condition, seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_each_response_gets_its_own_score_in_the_order_of_submission(reward_config):
    with ScorerPool(reward_config(OBEDIENT, num_workers=2)) as pool:
        scores = results(pool.submit(requests(*["fine"] * 500)))
        assert values(scores) == list(range(500))
        assert len({score.extras["pid"] for score in scores} - {os.getpid()}) == 2


def test_the_built_in_scorer_runs_in_the_pool(reward_config):
    answers = [
        ScoringRequest(name, "#### 42", truth, {}) for name, truth in [("gsm8k", "42"), ("gsm8k", "7"), ("x", "")]
    ]
    with ScorerPool(reward_config()) as pool:
        right, wrong, unknown = results(pool.submit(answers))
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert unknown.fault == "raised:ConfigError" and "data_source x" in unknown.detail


def test_the_time_limit_holds_for_each_response_and_not_for_those_sent_together(reward_config):
    with ScorerPool(reward_config(OBEDIENT, timeout=0.5)) as pool:  # half of the eight are sent together: 0.6 s
        assert values(results(pool.submit(requests(*["sleep 0.15"] * 8)))) == list(range(8))


def test_a_process_killed_while_it_is_idle_costs_nothing(reward_config):
    with ScorerPool(reward_config(OBEDIENT)) as pool:
        victim = results(pool.submit(requests("fine")))[0].extras["pid"]
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: not exists(victim))
        assert values(results(pool.submit(requests("fine", "fine")))) == [0, 1]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("one_call", [False, True])
def test_a_process_killed_from_outside_while_it_scores_costs_nothing(reward_config, tmp_path, one_call, sent):
    call = {
        False: "def compute_score(solution_str): return score(solution_str)",
        True: "def compute_score(solution_strs): return [score(one) for one in solution_strs]",
    }
    source = SLOW_FIRST.format(file=str(tmp_path / "pid")) + call[one_call]
    config = reward_config(source, manager="batch" if one_call else "naive")
    with ScorerPool(config) as pool:
        futures = pool.submit(requests("3", "slow 4", "5"))
        assert wait_until((tmp_path / "pid").exists)
        os.kill(int((tmp_path / "pid").read_text()), sent)
        assert values(results(futures)) == [3, 4, 5]


def test_a_reward_that_kills_its_process_each_time_is_a_fault(reward_config):
    source = "import os\ndef compute_score(solution_str): return os.kill(os.getpid(), 9) if solution_str else 1.0"
    with ScorerPool(reward_config(source)) as pool:
        scores = results(pool.submit(requests("", "kill", "kill", "")))
    assert [score.fault for score in scores] == [None, "died", "died", None]
    assert "SIGKILL" in scores[1].detail


def test_what_a_hung_scorer_has_started_is_killed_with_it(reward_config, tmp_path):
    pid_file = tmp_path / "pid"
    with ScorerPool(reward_config(OBEDIENT, timeout=0.5, pid_file=str(pid_file))) as pool:
        assert results(pool.submit(requests("spawn")))[0].fault == "timeout"
    assert wait_until(lambda: not exists(int(pid_file.read_text())))


def test_faults_of_the_function_and_its_prints_are_distinguished_and_logged(reward_config, tmp_path):
    log = tmp_path / "reward.log"
    with ScorerPool(reward_config(OBEDIENT), log) as pool:
        scores = results(pool.submit(requests("raise", "none", "print")))
    assert [score.fault for score in scores] == ["raised:KeyError", "none", None]
    assert "a word from the reward" in log.read_text()
    assert "Traceback" in log.read_text() and "my_reward.py" in log.read_text()


def test_without_workers_the_caller_scores(reward_config):
    with ScorerPool(reward_config(OBEDIENT, num_workers=0)) as pool:
        futures = pool.submit(requests("fine", "raise"))
        assert [future.done() for future in futures] == [True, True]
        fine, raised = results(futures)
    assert fine.extras["pid"] == os.getpid() and raised.fault == "raised:KeyError"


ELSEWHERE = f"import os\nif os.getpid() != {os.getpid()}: raise OSError('no licence')\ndef compute_score(): ..."
HOARD = "import time\nhoard = b'x' * (1 << 29)\ntime.sleep(1)\ndef compute_score(): ..."


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (ELSEWHERE, {"num_workers": 2}, r"does not import: OSError: no licence .*my_reward\.py:2"),
        ("import os\nos._exit(4)", {}, r"exit code 4 while it loaded the reward; .*reward\.log"),
        (HOARD, {"more": {"memory_mb": 400}}, r"more than 400 MiB of memory \(reward\.memory_mb\) while it was loaded"),
    ],
    ids=["it loads here only", "it ends its process", "it needs more memory"],
)
def test_a_reward_that_the_processes_cannot_load_is_rejected_at_the_start(
    reward_config, tmp_path, source, options, said
):
    with pytest.raises(ConfigError, match=said):
        ScorerPool(reward_config(source, **options), tmp_path / "reward.log")


KILLED = """
import os, signal
with open({log!r}, "a") as file:
    file.write("x")
if os.path.getsize({log!r}) in {times}:
    os.kill(os.getpid(), signal.SIGKILL)
def compute_score(solution_str): return 1.0 if solution_str else os._exit(3)
"""


@pytest.mark.parametrize("times", [[1, 2], [2, 3]])
def test_a_process_that_is_killed_while_it_loads_the_reward_is_replaced(reward_config, tmp_path, times):
    source = KILLED.format(log=str(tmp_path / "loads"), times=times)
    with ScorerPool(reward_config(source)) as pool:
        scores = results(pool.submit(requests("a", "", "b")))
    assert [score.fault for score in scores] == [None, "died", None]


def test_a_process_that_is_killed_each_time_is_a_worker_that_died_and_no_rejection(reward_config, tmp_path):
    source = KILLED.format(log=str(tmp_path / "loads"), times=[1, 2, 3])
    with pytest.raises(ScorerDied, match="killed by SIGKILL while it loaded the reward, 3 times in a row"):
        ScorerPool(reward_config(source))


def test_a_reward_that_cannot_be_loaded_again_ends_the_pool_with_the_reason(reward_config, tmp_path):
    with ScorerPool(reward_config(OBEDIENT)) as pool:
        (tmp_path / "my_reward.py").write_text("raise OSError('gone')")
        scores = results(pool.submit(requests("exit", "fine")))
        assert [score.fault for score in scores] == ["died", "died"] and "OSError: gone" in scores[1].detail
        with pytest.raises(ConfigError, match="OSError: gone"):
            pool.submit(requests("fine"))


def test_closing_resolves_what_was_not_scored(reward_config):
    pool = ScorerPool(reward_config(OBEDIENT))
    futures = pool.submit(requests("loop", "fine", "fine"))
    pool.close()
    assert [score.fault for score in results(futures)] == ["died", "died", "died"]
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(requests("fine"))


class Broken:
    """A scorer that fails at its third request, of which it has scored two."""

    def start(self) -> bool:
        return False

    def score(self, requests):
        yield from [Score(1.0), Score(2.0)]
        raise OSError("the connection is lost")

    def stop(self) -> None: ...
    def close(self) -> None: ...


def test_each_request_is_called_back_for_once_with_its_score_or_what_ended_the_scorer(reward_config):
    came: dict[int, Score | Exception] = {}
    ended = threading.Event()

    def scored(index: int, score: Score | Exception) -> None:
        assert index not in came
        came[index] = score
        if len(came) == 4:
            ended.set()

    with ScorerPool(reward_config(OBEDIENT, manager="batch"), scorers=[Broken()]) as pool:
        pool.score(requests(*["fine"] * 4), scored)
        assert ended.wait(10)
        with pytest.raises(OSError, match="the connection is lost"):
            pool.score(requests("fine"), scored)
    assert [came[0], came[1]] == [Score(1.0), Score(2.0)]
    assert [str(came[index]) for index in (2, 3)] == ["the connection is lost"] * 2


def test_a_future_cannot_be_cancelled(reward_config):
    with ScorerPool(reward_config(OBEDIENT)) as pool:
        futures = pool.submit(requests("sleep 0.05", "fine"))
        assert not any(future.cancel() for future in futures)
        assert values(results(futures)) == [0, 1]


DRIVER = """
import pickle, sys, time
from pathlib import Path
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import ScoringRequest

config, log = pickle.load(open(sys.argv[1], "rb"))
with ScorerPool(config, log) as pool:
    pids = {int(f.result().extras["pid"]) for f in pool.submit([ScoringRequest("", "sleep 0.05", "0", {})] * 8)}
    pool.submit([ScoringRequest("", "loop", "0", {})])
    print(*pids, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_or_interrupted_driver_leaves_no_process_and_no_traceback_of_theirs(reward_config, tmp_path, sent):
    log = tmp_path / "reward.log"
    (tmp_path / "config").write_bytes(pickle.dumps((reward_config(OBEDIENT, num_workers=2), log)))
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "config")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job would ignore it
    )
    pids = [int(pid) for pid in required(driver.stdout).readline().split()]
    assert len(pids) == 2 and all(exists(pid) for pid in pids)
    os.killpg(driver.pid, sent)  # as Ctrl-C in a terminal does: to the whole foreground group
    driver.wait(timeout=10)
    assert wait_until(lambda: not any(exists(pid) for pid in pids))
    assert log.read_text() == ""


def scored(reward_config, *solutions: str, **more) -> list[Score]:
    with ScorerPool(reward_config(OBEDIENT, **more)) as pool:
        return results(pool.submit(requests(*solutions)))


def test_half_a_reply_blocks_nothing_beyond_the_time_limit(reward_config):
    scores = scored(reward_config, "fine", "half", "fine", timeout=0.5)
    assert values(scores) == [0, None, 2] and scores[1].fault == "timeout"


LITTLE = {"more": {"memory_mb": 500}}
TOO_MUCH = "more than 500 MiB of memory (reward.memory_mb)"


@pytest.mark.parametrize(
    ("solution", "options", "fault", "said"),
    [
        ("loop", {"timeout": 0.5}, "timeout", "0.5 s (reward.timeout)"),
        ("backtrack", {"timeout": 0.5}, "timeout", "0.5 s (reward.timeout)"),
        ("exit", {}, "died", "exit code 3"),
        ("crash", {}, "died", "SIGSEGV"),
        ("garbage", {}, "died", "wrote to its connection"),
        ("grow", LITTLE, "memory", TOO_MUCH),
        ("child", LITTLE, "memory", TOO_MUCH),
        ("leave 0", {}, "raised:SystemExit", "called exit(0)"),
        ("leave 0", {"num_workers": 0}, "raised:SystemExit", "called exit(0)"),
    ],
)
def test_a_scorer_that_fails_costs_its_own_response_only_and_is_named(reward_config, solution, options, fault, said):
    scores = scored(reward_config, "fine", solution, "fine", **options)
    assert values(scores) == [0, None, 2]
    assert scores[1].fault == fault and said in scores[1].detail


def test_a_coroutine_that_calls_exit_is_reported_so_and_the_next_one_runs(reward_config):
    source = "import sys\nasync def compute_score(solution_str): return sys.exit(3) if solution_str == 'exit' else 1"
    with ScorerPool(reward_config(source)) as pool:
        scores = results(pool.submit(requests("exit", "fine")))
    assert scores[0].fault == "raised:SystemExit" and "called exit(3)" in scores[0].detail and scores[1].value == 1


def test_a_process_that_takes_its_time_to_end_is_reported_by_its_exit_code(reward_config):
    (score,) = scored(reward_config, "linger")
    assert score.fault == "died" and "SIGKILL" not in score.detail and "exit code 1" in score.detail


def test_a_stopped_process_is_replaced(reward_config):
    with ScorerPool(reward_config(OBEDIENT, timeout=0.5)) as pool:
        victim = results(pool.submit(requests("fine")))[0].extras["pid"]
        os.kill(victim, signal.SIGSTOP)
        long = ScoringRequest("test", "fine", "1", {"text": "x" * 4_000_000})  # more than the connection holds
        assert values(results(pool.submit([long]))) == [1]


SENT = {  # after the replies 0 and 1
    "(7,[1.0,{},None,'',None,None])": "it has the number 7 instead of 2",
    "(2,[float('inf'),{},None,'',None,None])": "its value is inf",
    "(2,[1e30,{},None,'',None,None])": "its value is 1e+30",
    "(2,[None,{},None,'',None,None])": "its fault is None",
    "(2,[1.0,{},None,'',[float('nan')],None])": "its value is 1.0",
    "(2,os.mkdir)": "it is a posix.mkdir",
    "(2,'x'*(17<<20))": "bytes, of at most",
}


def test_what_a_scoring_process_sends_is_checked_before_it_counts(reward_config):
    with ScorerPool(reward_config(OBEDIENT)) as pool:
        scores = results(pool.submit(requests(*[text for message in SENT for text in ("fine", f"send {message}")])))
    assert [score.value for score in scores[::2]] == [*range(0, 2 * len(SENT), 2)]
    for score, why in zip(scores[1::2], SENT.values(), strict=True):
        assert score.fault == "died" and score.detail.startswith("what the scoring process sent is not the next score")
        assert why in score.detail
