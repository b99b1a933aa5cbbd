"""What a run's configuration makes of rollout.agent."""

import json
import socket
from pathlib import Path

import pytest

from hybridrl.agents.endpoint.episodes import (
    agent_settings,
    check_continued,
    episode_limits,
    episode_processes,
    invitation,
    runs_episodes,
)
from hybridrl.agents.endpoint.functions import AgentSettings
from hybridrl.config import ConfigError, PPOConfig, load_ppo_config
from hybridrl.config.findings import Findings
from hybridrl.core.required import required

AGENT = "actor_rollout_ref.rollout.agent"


@pytest.fixture
def config_of(tmp_path):
    def load(*overrides: str) -> PPOConfig:
        (tmp_path / "train.jsonl").write_text("{}\n")
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
        (tmp_path / "model.safetensors").touch()
        needed = [f"data.train_files={tmp_path}/train.jsonl", f"actor_rollout_ref.model.path={tmp_path}"]
        return load_ppo_config([*needed, "trainer.device=cpu", *overrides])

    return load


@pytest.fixture
def agent(tmp_path) -> Path:
    (tmp_path / "agent.py").write_text("async def solve(data, **endpoint): return 1.0\n")
    return tmp_path / "agent.py"


def test_without_a_path_no_row_runs_in_an_agent(config_of):
    assert agent_settings(config_of()) is None and not runs_episodes(config_of(), [])


def test_an_agent_runs_in_the_processes_of_episodes(config_of, agent):
    config = config_of(f"{AGENT}.path={agent}", f"{AGENT}.name=solve", f"{AGENT}.turn_discount=0.9")
    assert agent_settings(config) == AgentSettings(str(agent), "solve", "inline", 64, 0.9, needs_reward=True)
    assert runs_episodes(config, [])


def test_a_reward_function_may_score_instead_of_the_agent(config_of, agent):
    function = f"reward.custom_reward_function.path={agent}"
    config = config_of(f"{AGENT}.path={agent}", f"{AGENT}.name=solve", function)
    assert not required(agent_settings(config)).needs_reward


def test_where_batches_are_fixed_no_agent_waits_for_another(config_of, agent):
    config = config_of(f"{AGENT}.path={agent}", f"{AGENT}.name=solve", "trainer.deterministic=true")
    assert required(agent_settings(config)).concurrency is None


def test_a_function_that_is_missing_is_named_with_those_there_are(config_of, agent):
    with pytest.raises(ConfigError, match=f"{AGENT}.path=.*has no function run; it has solve"):
        agent_settings(config_of(f"{AGENT}.path={agent}"))


def test_agents_outside_the_run_find_its_episodes_at_one_address_with_a_key(config_of, monkeypatch):
    monkeypatch.setenv("HYBRIDRL_ADMIN_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = config_of(f"{AGENT}.mode=online", f"{AGENT}.port={port}")
    settings = agent_settings(config)
    assert (required(settings).mode, required(settings).port, required(settings).admin_key) == (
        "online",
        port,
        "secret",
    )
    assert runs_episodes(config, []) and episode_processes(config, Path("logs"))[0] == 1
    assert f"POST http://127.0.0.1:{port}/rl/start_session with the admin key secret" in invitation(settings)


def test_what_does_not_go_with_agents_outside_the_run_is_rejected(config_of, agent):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"{AGENT}.port={taken.getsockname()[1]}"
        wrong = [f"{AGENT}.path={agent}", f"{AGENT}.num_workers=2", "trainer.deterministic=true", port]
        with pytest.raises(ConfigError) as raised:
            agent_settings(config_of(f"{AGENT}.mode=online", *wrong))
    for said in ("agents are outside the run", "there is one endpoint", "the order of requests", "cannot be used"):
        assert said in str(raised.value)


@pytest.mark.parametrize(
    "mode", ["trainer.v1.trainer_mode=colocate_async", "actor_rollout_ref.rollout.over_sample_rate=0.5"]
)
def test_what_does_not_go_with_episodes_that_outlive_a_step_is_rejected(config_of, mode):
    def errors(*more: str) -> list[str]:
        findings = Findings()
        check_continued(config_of(*more), findings)
        return [finding.cause for finding in findings.errors]

    full, online = "actor_rollout_ref.rollout.full_determinism=true", f"{AGENT}.mode=online"
    assert errors(full, online) == errors(mode) == []
    assert [cause.split()[0] for cause in errors(mode, full, online)] == [full.split("=")[0], f"{online}:"]
    assert (episode_limits(config_of()).held, episode_limits(config_of(mode)).held) == (False, True)
