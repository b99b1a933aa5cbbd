"""What a run's configuration makes of rollout.agent."""

import json
import socket
from pathlib import Path

import pytest

from hybridrl.agents.endpoint.agent import Agents
from hybridrl.agents.endpoint.episodes import agents_of, check_continued, episode_logs, invitation, runs_episodes
from hybridrl.config import ConfigError, PPOConfig, load_ppo_config
from hybridrl.config.findings import Findings
from hybridrl.required import required

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


@pytest.fixture
def agents_in(config_of, kit_of):
    """The agents of a configuration, as the processes of episodes make them; None: there are none."""

    def make(*overrides: str, needs_reward: bool = True) -> Agents | None:
        rollout = config_of(*overrides).actor_rollout_ref.rollout
        made = agents_of(rollout, 1, "secret", needs_reward=needs_reward)
        assert runs_episodes(rollout, []) == (made is not None)
        return made and made(kit_of(), None)

    return make


def test_without_a_path_no_row_runs_in_an_agent(agents_in):
    assert agents_in() is None


def test_an_agent_runs_in_the_processes_of_episodes_and_waits_for_no_other_where_batches_are_fixed(agents_in, agent):
    keys = (f"{AGENT}.path={agent}", f"{AGENT}.name=solve", f"{AGENT}.turn_discount=0.9")
    agents = required(agents_in(*keys))
    assert (agents.function, agents.concurrency, agents.settings.turn_discount) == (f"{agent}:solve", 64, 0.9)
    assert agents.needs_reward and agents.waiting is None
    assert required(agents_in(*keys, "trainer.deterministic=true")).concurrency is None


def test_a_function_that_is_missing_is_named_with_those_there_are(agents_in, agent):
    with pytest.raises(ConfigError, match=f"{AGENT}.path=.*has no function run; it has solve"):
        agents_in(f"{AGENT}.path={agent}")


def test_agents_outside_the_run_find_its_episodes_at_one_address_with_a_key(config_of, agents_in):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    online = (f"{AGENT}.mode=online", f"{AGENT}.port={port}")
    agents, config = required(agents_in(*online)), config_of(*online)
    assert agents.waiting and (agents.settings.port, agents.admin_key) == (port, "secret")
    rollout = config.actor_rollout_ref.rollout
    assert len(episode_logs(rollout, config.trainer, Path("logs"))) == 1
    assert f"POST http://127.0.0.1:{port}/rl/start_session with the admin key key" in invitation(rollout.agent, "key")


def test_what_does_not_go_with_agents_outside_the_run_is_rejected(agents_in, agent):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"{AGENT}.port={taken.getsockname()[1]}"
        wrong = [f"{AGENT}.path={agent}", f"{AGENT}.num_workers=2", "trainer.deterministic=true", port]
        with pytest.raises(ConfigError) as raised:
            agents_in(f"{AGENT}.mode=online", *wrong)
    for said in ("agents are outside the run", "there is one endpoint", "the order of requests", "cannot be used"):
        assert said in str(raised.value)


def test_what_does_not_go_with_episodes_that_outlive_a_step_is_rejected(config_of):
    def errors(*more: str) -> list[str]:
        findings = Findings()
        check_continued(config_of(*more).actor_rollout_ref.rollout, findings)
        return [finding.cause for finding in findings.errors]

    full, online = "actor_rollout_ref.rollout.full_determinism=true", f"{AGENT}.mode=online"
    assert errors() == []
    assert [cause.split()[0] for cause in errors(full, online)] == [full.split("=")[0], f"{online}:"]
