import json
from types import SimpleNamespace

import pytest

from hybridrl.assembly import open_store, with_restarts
from hybridrl.checkpoint.store import Store
from hybridrl.cluster import WorkerDied
from hybridrl.config import ConfigError, load_sft_config

GOOD = {"healthy": True, "recovery": False, "metrics": {}}


@pytest.mark.parametrize("began", ["resume_path", "disable", "auto"])
@pytest.mark.parametrize("saves", [False, True])
def test_a_run_that_died_before_its_first_save_begins_again_where_it_began(tmp_path, began, saves):
    """Not at a step of an earlier run that lies there."""
    store = Store(tmp_path)
    store.begin(30)
    store.publish(30, GOOD)
    trainer = SimpleNamespace(default_local_dir=str(tmp_path), max_restarts=1, resume_mode=began)
    modes: list[str] = []

    def attempt() -> None:
        modes.append(trainer.resume_mode)
        if len(modes) == 1:
            if saves:
                store.begin(2)
                store.publish(2, GOOD)
            raise WorkerDied("gone")

    with_restarts(attempt, trainer)
    store.close()
    assert modes == [began, "auto" if saves else began]


def test_a_second_run_in_a_directory_leaves_the_first_ones_configuration(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    (model / "model.safetensors").touch()
    (tmp_path / "rows.jsonl").write_text("{}")

    def config(seed: int):
        values = {"data.train_files": tmp_path / "rows.jsonl", "model.path": model, "trainer.seed": seed}
        values |= {"trainer.device": "cpu", "trainer.default_local_dir": tmp_path}
        return load_sft_config([f"{key}={value}" for key, value in values.items()])

    first = open_store(config(1), tmp_path)
    written = (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="another run is at work there"):
        open_store(config(2), tmp_path)
    assert (tmp_path / "config.yaml").read_text() == written and "seed: 1" in written
    first.close()
