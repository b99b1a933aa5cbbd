"""What the processes of a run have imported: no face of the product is among what holds a model or an engine."""

import json
from pathlib import Path

import pytest

from tests.integration.test_run import finish, start
from tests.test_size import FACES

# Imported by the processes that load a model or its tokenizer; writes now and then what they have imported by then.
PROBE = """
import json, os, sys, threading, time

def watch():
    while True:
        names = sorted(name for name in list(sys.modules) if name.startswith("hybridrl."))
        with open("/proc/self/cmdline") as title:  # Ray names its actor there
            actor = title.read().partition("::")[2].partition(".")[0].rstrip(chr(0))
        with open(f"{DIRECTORY}/{os.getpid()}.new", "w") as file:
            json.dump([actor, names], file)
        os.replace(f"{DIRECTORY}/{os.getpid()}.new", f"{DIRECTORY}/{os.getpid()}.json")
        time.sleep(0.2)

threading.Thread(target=watch, daemon=True).start()
"""
STEPS = {"trainer.total_training_steps": 2, "trainer.n_gpus_per_node": 1}
AGENT = {
    "actor_rollout_ref.rollout.multi_turn.environment": f"{Path(__file__).parent}/agents.py:OneResponse",
    "actor_rollout_ref.rollout.agent.num_workers": 1,
}

pytestmark = pytest.mark.slow


def faces(directory: Path) -> dict[str, list[str]]:
    """The modules of faces in the processes of ranks and servers, by the class of their actor."""
    found = dict(json.loads(file.read_text()) for file in directory.glob("*.json"))
    holds = {name: found[name] for name in ("TrainWorker", "RolloutServer") if name in found}
    return {name: [one for one in names if one.split(".")[1] in FACES] for name, names in holds.items()}


@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.drill), AGENT], ids=["responses", "episodes"])
def test_no_rank_and_no_server_of_a_run_loads_a_face(more, overrides, tmp_path):
    (tmp_path / "probe.py").write_text(f"DIRECTORY = {str(tmp_path)!r}\n{PROBE}")
    keys = STEPS | more | {"actor_rollout_ref.model.external_lib": f"[{tmp_path}/probe.py]"}
    finish(start("main_ppo", overrides(tmp_path / "run", keys)))
    assert faces(tmp_path) == {"TrainWorker": [], "RolloutServer": []}


def test_no_rank_of_a_supervised_run_loads_a_face(tiny, tmp_path):
    (tmp_path / "probe.py").write_text(f"DIRECTORY = {str(tmp_path)!r}\n{PROBE}")
    keys = {
        "data.train_files": tiny / "warmup.jsonl",
        "data.train_batch_size": 32,
        "data.max_length": 128,
        "model.path": tiny / "model",
    }
    keys |= {"model.external_lib": f"[{tmp_path}/probe.py]", "trainer.default_local_dir": tmp_path / "run"} | STEPS
    finish(start("main_sft", [f"{key}={value}" for key, value in keys.items()]))
    assert faces(tmp_path) == {"TrainWorker": []}
