"""Recipes of large mixtures: accepted as they are, and by the plan they fit into the GPUs that they name."""

import json
import runpy
from pathlib import Path

import pytest

from hybridrl.config import PPOConfig
from hybridrl.config.load import resolve_config
from hybridrl.doctor import __main__ as doctor
from hybridrl.doctor.memory import PlannedRun, make_plans
from hybridrl.doctor.memory_sizes import read_models

TOP = Path(__file__).parents[2]
RECIPES = {  # the model, the number of GPUs, and the memory of each machine
    "qwen3_30b_a3b_8gpu": ("Qwen3-30B-A3B", 8, 1e12),
    "qwen3_235b_32gpu": ("Qwen3-235B-A22B", 32, 2e12),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_accepted_for_another_machine(name, capsys) -> None:
    assert doctor.main(["--config-only", "--config-path", str(TOP / "recipes"), "--config-name", name]) == 0
    assert "no errors" in capsys.readouterr().out


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_into_its_machines(name, tmp_path, monkeypatch) -> None:
    model, gpus, host = RECIPES[name]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sizes = runpy.run_path(str(TOP / "scripts" / "sizing.py"))["MIXTURES"][model]
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    keys = [f"data.{kind}_files={tmp_path / 'rows.jsonl'}" for kind in ("train", "val")]
    keys += ["trainer.device=cuda", f"actor_rollout_ref.model.path={tmp_path}"]
    resolved = resolve_config(PPOConfig, keys, name, TOP / "recipes", offline=True)
    resolved.findings.close()
    assert resolved.config is not None and resolved.config.trainer.devices == gpus
    run = PlannedRun(resolved.config, read_models(resolved.config), gpu=80e9)
    device, machine = make_plans(run)
    assert device.peak < 0.95 * 80e9 and machine.peak < host
    assert run.models.policy.expert == 8
