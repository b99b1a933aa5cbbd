import time

import pytest

from hybridrl.config import ConfigError
from hybridrl.config.schema_parts import RewardManagerConfig, RewardManagerModuleConfig
from hybridrl.rewards.load import calls_at_once, load_reward, processes, seconds_between_calls
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Score, ScoringRequest
from tests.rewards.test_pool import values, wait_until

NUMBER = "def compute_score(solution_str): return float(solution_str)"


def requests(*solutions: str) -> list[ScoringRequest]:
    return [ScoringRequest("test", solution, "42", {}) for solution in solutions]


def scored(config, solutions: list[str]) -> list[Score]:
    with ScorerPool(config) as pool:
        return [future.result(timeout=20) for future in pool.submit(requests(*solutions))]


@pytest.mark.parametrize("manager", ["naive", "prime", "remote", "gdpo", "dapo", "rate_limited"])
def test_the_managers_of_single_responses_call_the_function_alike(reward_config, manager):
    assert values(scored(reward_config(NUMBER, manager=manager), ["1", "2", "3"])) == [1, 2, 3]


# batch

BATCH = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale=1):
    assert len(data_sources) == len(ground_truths) == len(extra_infos) == len(solution_strs)
    if "raise" in solution_strs: raise KeyError("unit")
    if "hang" in solution_strs: import time; time.sleep(60)
    if "short" in solution_strs: return [0.0]
    return [{"score": scale * float(text), "calls": len(solution_strs)} for text in solution_strs]
"""


def test_batch_calls_the_function_once_with_lists_of_all_responses(reward_config):
    scores = scored(reward_config(BATCH, manager="batch", num_workers=2, scale=2), [str(n) for n in range(300)])
    assert values(scores) == [2 * n for n in range(300)]
    assert {score.extras["calls"] for score in scores} == {300}


def test_batch_without_workers_is_one_call_too(reward_config):
    scores = scored(reward_config(BATCH, manager="batch", num_workers=0), ["1", "2"])
    assert [(score.value, score.extras["calls"]) for score in scores] == [(1, 2), (2, 2)]


@pytest.mark.parametrize(("what", "fault"), [("raise", "raised:KeyError"), ("short", "type"), ("hang", "timeout")])
def test_a_batch_that_fails_is_a_fault_of_every_response_in_it_and_the_next_one_is_scored(reward_config, what, fault):
    with ScorerPool(reward_config(BATCH, manager="batch", timeout=0.5)) as pool:
        failed = [future.result(timeout=20) for future in pool.submit(requests("1", what, "2"))]
        assert [score.fault for score in failed] == [fault] * 3
        assert values([future.result(timeout=20) for future in pool.submit(requests("5"))]) == [5]


# Coroutines, and rate_limited

ASYNC = """
import asyncio
async def compute_score(solution_str):
    await asyncio.sleep(60 if solution_str == "hang" else 0.3)
    return 1.0
"""


def test_calls_of_a_coroutine_function_overlap(reward_config):
    began = time.monotonic()
    assert values(scored(reward_config(ASYNC), ["x"] * 64)) == [1.0] * 64
    assert time.monotonic() - began < 0.3 * 64 / 2


def test_a_coroutine_that_hangs_is_given_up_and_those_beside_it_continue(reward_config):
    with ScorerPool(reward_config(ASYNC, timeout=1)) as pool:
        scores = [future.result(timeout=20) for future in pool.submit(requests("x", "hang", "x", "x"))]
    assert values(scores) == [1.0, None, 1.0, 1.0]
    assert scores[1].fault == "timeout" and "1 s (reward.timeout)" in scores[1].detail


def test_a_coroutine_that_is_given_up_is_told(reward_config, tmp_path):
    source = """
import asyncio, pathlib
async def compute_score(file):
    try: await asyncio.sleep(60)
    finally: pathlib.Path(file).touch()
"""
    file = tmp_path / "calls"
    with ScorerPool(reward_config(source, timeout=0.2, file=str(file))) as pool:
        assert pool.submit(requests("x"))[0].result(timeout=20).fault == "timeout"
        assert wait_until(file.exists, 10)


def test_a_coroutines_own_timeout_error_is_its_exception(reward_config):
    source = "async def compute_score(solution_str): raise TimeoutError('the judge is busy')"
    assert scored(reward_config(source), ["x"])[0].fault == "raised:TimeoutError"


def test_max_concurrent_bounds_the_calls_under_way_at_once(reward_config):
    source = """
import asyncio
running = 0
async def compute_score(solution_str):
    global running
    running += 1
    most = running
    for _ in range(20):
        await asyncio.sleep(0.005)
        most = max(most, running)
    running -= 1
    return most
"""
    scores = scored(reward_config(source, manager="rate_limited", more={"max_concurrent": 3}), ["x"] * 12)
    assert max(values(scores)) == 3


def test_calls_a_minute_are_kept_to_by_all_processes_together(reward_config):
    config = reward_config(NUMBER, manager="rate_limited", num_workers=2, more={"max_concurrent": 2, "max_rpm": 600.0})
    assert (processes(config), seconds_between_calls(config)) == (2, 0.2)
    with ScorerPool(config) as pool:
        began = time.monotonic()
        for future in pool.submit(requests(*["1"] * 10)):
            future.result(timeout=20)
        assert time.monotonic() - began >= 0.1 * (10 - 2)


def test_the_wait_for_a_turn_is_not_part_of_the_time_limit(reward_config):
    config = reward_config(NUMBER, manager="rate_limited", timeout=0.1, more={"max_rpm": 120.0})
    assert values(scored(config, ["1", "2"])) == [1, 2]


TOKENS = {"max_tpm": 60_000.0, "estimated_tokens_per_request": 500}


@pytest.mark.parametrize(
    ("limits", "seconds"), [({}, 0.0), ({"max_rpm": 120.0}, 0.5), (TOKENS, 0.5), (TOKENS | {"max_rpm": 60.0}, 1.0)]
)
def test_the_tighter_limit_of_calls_and_tokens_holds(reward_config, limits, seconds):
    assert seconds_between_calls(reward_config(NUMBER, manager="rate_limited", more=limits)) == seconds


def test_limits_are_of_rate_limited_alone(reward_config):
    config = reward_config(NUMBER, num_workers=4, more={"max_rpm": 60.0, "max_concurrent": 2})
    assert (processes(config), calls_at_once(config, False), seconds_between_calls(config)) == (4, 1, 0.0)


# One's own

MANAGER = """
def twice(compute_score, solution_str, ground_truth):
    first = compute_score(data_source="test", solution_str=solution_str, ground_truth=ground_truth, extra_info={})
    return {"score": 2 * first, "first": first}

class RewardManager:
    async def run_single(self, data): ...
"""


def own_manager(reward_config, tmp_path, name: str):
    (tmp_path / "manager.py").write_text(MANAGER)
    module = RewardManagerModuleConfig(str(tmp_path / "manager.py"), "twice")
    return reward_config(NUMBER + "\n", more={"reward_manager": RewardManagerConfig("importlib", name, module)})


@pytest.mark.parametrize("name", ["twice", "naive"])  # verl names the function by `name`; left alone, module.name does
def test_a_manager_of_ones_own_is_a_function_around_the_reward_function(reward_config, tmp_path, name):
    config = own_manager(reward_config, tmp_path, name)
    config.custom_reward_function.path = str(tmp_path / "reward.py")
    (tmp_path / "reward.py").write_text("def compute_score(solution_str, **rest): return float(solution_str)")
    assert scored(config, ["3"]) == [Score(6.0, {"score": 6.0, "first": 3.0})]


def test_a_manager_may_be_around_the_built_in_rewards(reward_config, tmp_path):
    config = own_manager(reward_config, tmp_path, "twice")
    config.custom_reward_function.path = None
    (tmp_path / "manager.py").write_text(MANAGER.replace('data_source="test"', 'data_source="gsm8k"'))
    assert values(scored(config, ["#### 42", "#### 41"])) == [2.0, 0.0]


def test_a_manager_class_is_rejected_with_the_form_that_is_wanted(reward_config, tmp_path):
    with pytest.raises(ConfigError, match=r"reward_manager.name=RewardManager is a class; .* keyword compute_score"):
        load_reward(own_manager(reward_config, tmp_path, "RewardManager"))


# Trying again

FLAKY = """
import os
def compute_score(solution_str, counter):
    with open(counter, "a") as file: file.write("x")
    tries = os.path.getsize(counter)
    if tries < 3:
        if solution_str == "die": os._exit(1)
        raise ConnectionError("busy")
    return tries
"""


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_response_is_scored_again_as_often_as_retries_say(reward_config, tmp_path, how, num_workers):
    if how == "die" and num_workers == 0:
        pytest.skip("there is no process to lose")
    counter = str(tmp_path / "counter")
    config = reward_config(FLAKY, num_workers=num_workers, counter=counter, more={"retries": 2})
    assert values(scored(config, [how])) == [3.0]


def test_after_the_last_try_the_fault_counts(reward_config, tmp_path):
    config = reward_config(FLAKY, counter=str(tmp_path / "counter"), more={"retries": 1})
    assert scored(config, ["raise"])[0].fault == "raised:ConnectionError"
