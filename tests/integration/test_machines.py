"""A run on two machines of one device is that on one machine of two devices, bit for bit."""

import pytest

from tests.core.cluster.machines import two_machines
from tests.integration.test_resume import compared_metrics
from tests.integration.test_run import finish, start

pytestmark = pytest.mark.drill
FSDP = "actor_rollout_ref.actor.fsdp_config"
KINDS = {
    "GRPO": {},
    "PPO": {"algorithm.adv_estimator": "gae", "actor_rollout_ref.rollout.n": 1, "data.train_batch_size": 16},
    "LoRA": {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.target_modules": "all-linear"},
    "experts": {f"{FSDP}.expert_parallel_size": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_machines_do_not_matter(kind, overrides, tiny, mixture, tmp_path):
    more = KINDS[kind] | {"trainer.total_training_steps": 2, "trainer.deterministic": True}
    if kind == "experts":
        more["actor_rollout_ref.model.path"] = mixture

    def run(name: str, machines: int) -> list[str]:
        place = {"trainer.nnodes": machines, "trainer.n_gpus_per_node": 2 // machines, "trainer.device": "cpu"}
        directory = tmp_path / name
        finish(
            start("main_ppo", overrides(directory, more | place | {"trainer.rollout_data_dir": directory / "samples"}))
        )
        return [(directory / "samples" / f"{step}.jsonl").read_text() for step in (1, 2)]

    samples = run("one", 1)
    with two_machines():
        assert run("two", 2) == samples
    metrics = compared_metrics(tmp_path / "one")
    assert len(metrics[2]) > 50 and compared_metrics(tmp_path / "two") == metrics
