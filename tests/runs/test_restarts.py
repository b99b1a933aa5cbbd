"""What a run does after a lack of memory: what is lowered, in which order, and what a resumed run keeps of it."""

from contextlib import closing
from pathlib import Path

import pytest
from ray.exceptions import RaySystemError

from hybridrl.checkpoint.store import Store
from hybridrl.config.load import load_ppo_config, load_sft_config
from hybridrl.core.cluster import OutOfMemory, WorkerDied
from hybridrl.core.rollout.ladder import EngineOutOfMemory
from hybridrl.health import Unhealthy
from hybridrl.rewards.process import ScorerDied
from hybridrl.runs import setup
from hybridrl.runs.attempts import CRITIC, POLICY, with_restarts
from hybridrl.tracking.faults import code_of
from tests.sections import keys_of_run

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture
def load(tmp_path):
    def build(*overrides: str):
        return load_ppo_config([*keys_of_run(tmp_path), f"trainer.default_local_dir={tmp_path}", *overrides])

    return build


def save(directory: Path, step: int, **state: object) -> None:
    with closing(Store(directory)) as store:
        store.begin(step)
        store.publish(step, {"healthy": True, "recovery": False, "metrics": {}} | state)


def lacks(call: str, tokens: int | None) -> OutOfMemory:
    method, _, model = call.partition(" ")
    error = OutOfMemory(f"train worker.{method}: train-1 ran out of memory", f"train worker.{method}")
    error.tokens, error.model = tokens, model
    return error


def run(config, *errors: Exception) -> list[dict[str, object]]:
    """Make one attempt per error and one that succeeds; returns what each got as lowered."""
    attempts: list[dict[str, object]] = []

    def attempt(adjusted: dict[str, list]) -> None:
        attempts.append({key: now for key, (_, now) in adjusted.items()})
        if len(attempts) <= len(errors):
            raise errors[len(attempts) - 1]

    with_restarts(attempt, config)
    return attempts


@pytest.mark.parametrize("began", ["resume_path", "disable", "auto"])
@pytest.mark.parametrize("saves", [False, True])
def test_a_run_that_died_before_its_first_checkpoint_restarts_as_it_began(load, tmp_path, began, saves):
    """Not from a checkpoint of an earlier run in the same directory."""
    save(tmp_path, 30)
    config = load("trainer.max_restarts=1")
    trainer, modes = config.trainer, []
    trainer.resume_mode, trainer.resume_from_path = began, f"{tmp_path}/global_step_30"

    def attempt(_: object) -> None:
        modes.append(trainer.resume_mode)
        if len(modes) == 1:
            if saves:
                save(tmp_path, 2)
            raise WorkerDied("gone")

    with_restarts(attempt, config)
    assert modes == [began, "auto" if saves else began]


def test_an_error_of_ray_itself_is_one_of_the_run_which_needs_no_traceback(load, tmp_path):
    def job(_: object) -> None:
        raise RaySystemError("Broken pipe")

    with pytest.raises(WorkerDied, match=r"^the run: .*Broken pipe"):
        setup.run(load(), job, tmp_path, {}, setup.Sessions(), again=False)


def test_a_micro_batch_that_was_too_large_is_halved_whatever_larger_size_was_allowed(load):
    config = load(f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    assert run(config, lacks("update_policy", 9000), lacks("update_policy", 4400)) == [{}, {key: 4500}, {key: 2200}]
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 2200
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 16384


@pytest.mark.parametrize(
    ("call", "key"),
    [
        ("update_policy", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
        ("forward actor", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"),
        ("forward reference", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"),
        ("forward critic", "critic.forward_micro_batch_size_per_gpu"),
        ("update_critic", "critic.ppo_micro_batch_size_per_gpu"),
    ],
)
def test_each_call_has_its_own_number_of_rows(load, call, key):
    more = ["algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true"]
    assert run(load(*more, f"{key}=8"), lacks(call, 900)) == [{}, {key: 4}]


def test_when_every_micro_batch_is_one_row_activations_are_recomputed(load):
    config = load("actor_rollout_ref.model.enable_gradient_checkpointing=false")
    key = "actor_rollout_ref.model.enable_gradient_checkpointing"
    assert run(config, lacks("update_policy", None)) == [{}, {key: True}]
    assert run(load(f"{key}=2"), lacks("update_policy", None)) == [{}, {key: True}]
    with pytest.raises(OutOfMemory, match="no setting is left"):  # undecided: all are
        run(load(), lacks("update_policy", None))


@pytest.mark.parametrize(
    ("call", "switches"),
    [
        ("update_policy", [*POLICY]),
        ("forward reference", ["actor_rollout_ref.ref.fsdp_config.param_offload", *POLICY]),
        ("update_critic", [*CRITIC]),
    ],
)
def test_on_a_gpu_parts_are_offloaded_one_by_one_once_every_micro_batch_is_one_row(load, call, switches):
    config = load("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true")
    config.trainer.device = "cuda"
    lowered = run(config, *(lacks(call, None) for _ in switches))
    assert lowered == [dict.fromkeys(switches[:count], True) for count in range(len(switches) + 1)]
    with pytest.raises(OutOfMemory, match="no setting is left"):
        run(config, lacks(call, None))


def test_with_nothing_left_to_lower_the_error_lists_what_was_tried(load):
    config, key = load(f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"), f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    with pytest.raises(OutOfMemory, match=f"ran out of memory\ntried: {key}=1 instead of 2\nno setting is left"):
        run(config, lacks("update_policy", 900), lacks("update_policy", None))


def test_a_lack_of_memory_elsewhere_counts_as_a_restart(load):
    assert run(load("trainer.max_restarts=1"), lacks("offload", None)) == [{}, {}]
    with pytest.raises(OutOfMemory, match="no setting is left"):
        run(load(), lacks("offload", None))
    with pytest.raises(WorkerDied, match=r"^gone$"):
        run(load(), WorkerDied("gone"))


def test_a_second_kill_for_lack_of_memory_ends_the_run_whatever_restarts_are_left(load):
    keys, low = (
        ("trainer.max_restarts=9", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"),
        "the node is running low on memory",
    )
    died, scorer = WorkerDied("train-0 died: killed by the kernel for lack of memory"), ScorerDied(low)
    lowered, engine = OutOfMemory(low, "train worker.update_policy"), EngineOutOfMemory(low)  # built again
    for first, second in ((died, lowered), (lowered, scorer), (scorer, died), (engine, engine)):
        assert first is engine or len(run(load(*keys), first)) == 2
        with pytest.raises(OutOfMemory, match=r"(?s)memory.*hybridrl doctor plans it") as error:
            run(load(*keys), first, second)
        assert code_of(error.value) == "host-memory"
    assert len(run(load(*keys), *[WorkerDied("gone")] * 3)) == 4


def test_a_supervised_run_lowers_its_own_key(tmp_path):
    rows, _, device = keys_of_run(tmp_path)
    directories = [f"model.path={tmp_path}", f"trainer.default_local_dir={tmp_path}"]
    config = load_sft_config([rows, device, *directories, "data.max_token_len_per_gpu=8192"])
    assert run(config, lacks("update_policy", 8000)) == [{}, {"data.max_token_len_per_gpu": 4000}]


def test_a_resumed_run_keeps_what_was_lowered_unless_it_is_configured_anew(load, tmp_path):
    tokens, rows = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    save(tmp_path, 3, adjusted={tokens: [16384, 4096], rows: [8, 2]})
    config = load(f"{rows}=4")
    assert run(config) == [{tokens: 4096}]
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 4096
    named = [f"{rows}=8", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_3"]
    assert run(load(*named)) == [{tokens: 4096, rows: 2}]
    assert run(load(f"{rows}=8", "trainer.resume_mode=disable")) == [{}]


def test_a_diagnosis_takes_the_run_back_to_a_healthy_checkpoint_with_half_the_learning_rate(load, tmp_path):
    back, config = Unhealthy("collapsed", rollback=True), load(f"{ACTOR}.optim.lr=8e-6")
    with pytest.raises(Unhealthy):
        run(config, back)  # there is no checkpoint to go back to
    save(tmp_path, 3)
    key = f"{ACTOR}.optim.lr"
    assert run(config, back, back, back) == [{}, {key: 4e-6}, {key: 2e-6}, {key: 1e-6}]
    with pytest.raises(Unhealthy):
        run(load(), back, back, back, back)
    with pytest.raises(Unhealthy):
        run(load(), Unhealthy("flat", rollback=False))
