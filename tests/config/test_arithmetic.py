import pytest

from hybridrl.config.load import batch_arithmetic

from .conftest import Load

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            (),
            "1024 prompts x 5 responses = 5120 samples per step, 4 mini-batches of 256 prompts (1280 samples on 2 "
            "devices), in micro-batches of up to 16384 tokens per device",
        ),
        (
            ("data.train_batch_size=10", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"),
            "10 prompts x 5 responses = 50 samples per step, 3 mini-batches of up to 4 prompts (20 samples on 2 "
            "devices), in micro-batches of up to 2 rows per device",
        ),
        (
            ("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_epochs=2"),
            "4 prompts x 5 responses = 20 samples per step, 1 mini-batch of 4 prompts (20 samples on 2 "
            "devices) x 2 epochs, in micro-batches of up to 16384 tokens per device",
        ),
    ],
)
def test_the_batch_of_a_step_is_reported_in_one_line(load: Load, overrides: tuple[str, ...], line: str) -> None:
    config = load("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.n=5", *overrides).config
    assert batch_arithmetic(config) == line
