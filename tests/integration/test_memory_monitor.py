"""Ray's memory monitor, which kills processes before the kernel would: a run that it kills ends by name."""

import pytest

from tests.integration.test_run import finish, start


@pytest.mark.drill
def test_a_run_that_the_memory_monitor_kills_is_restarted_and_ends_by_name(tiny, tmp_path):
    """It kills whatever uses memory, as the machine always uses more than a thousandth of its own."""
    values = {
        "data.train_files": tiny / "warmup.jsonl",
        "data.max_length": 128,
        "data.train_batch_size": 24,
        "model.path": tiny / "model",
        "trainer.total_training_steps": 2,
        "trainer.n_gpus_per_node": 1,
        "trainer.max_restarts": 1,
        "trainer.logger": "[console]",
        "trainer.default_local_dir": tmp_path,
    }
    arguments = [f"{key}={value}" for key, value in values.items()]
    lines = finish(start("main_sft", arguments, RAY_memory_usage_threshold="0.001"), status=1)
    output = " ".join(lines.split())  # whatever the width of a line
    assert output.count("restarting the workers as the run began, without a checkpoint") == 1
    assert "failed [host-memory]: " in output and "train-0" in output
    assert "the largest processes of the driver's machine now:" in output
    assert "Traceback" not in output
