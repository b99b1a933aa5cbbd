"""The asynchronous keys of other systems, of which several count together."""

import json

import pytest

from hybridrl.compat.translation import SYSTEMS
from hybridrl.config import PPOConfig
from hybridrl.config.load import ResolvedConfig, resolve_config

from .test_verl import SHARED, at_hand, command_lines, errors_of

NEEDED = ("data.train_files=x.jsonl", "actor_rollout_ref.model.path=a/b", "trainer.n_gpus_per_node=8")
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8")
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
FULLY_ASYNC = (
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    "actor_rollout_ref.hybrid_engine=False",
    f"{MINI}=32",
    "rollout.nnodes=2",
    "rollout.n_gpus_per_node=8",
    "rollout.total_rollout_steps=2000",
    "async_training.staleness_threshold=1.5",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.require_batches=2",
    "async_training.partial_rollout=True",
)


def resolved(*overrides: str, system: str = "verl") -> ResolvedConfig[PPOConfig]:
    overrides = (*NEEDED, *GRPO, *overrides)
    return resolve_config(PPOConfig, [*overrides], "ppo_trainer", offline=True, translation=SYSTEMS[system])


def accepted(*overrides: str, system: str = "verl") -> PPOConfig:
    result = resolved(*overrides, system=system)
    assert not result.findings.errors
    assert result.config is not None
    return result.config


def mode(config: PPOConfig) -> tuple[str, int]:
    return config.trainer.v1.trainer_mode, config.trainer.v1.sampler.max_off_policy_threshold


def notes(*overrides: str, system: str = "verl") -> list[str]:
    """What is reported of commands, but for simple renames."""
    items = resolved(*overrides, system=system).findings.items
    texts = [finding.text for finding in items if finding.code != "not-here"]
    return [text for text in texts if "=" in text.partition(" is now ")[0] or " is now " not in text]


def test_fully_async_becomes_separate_async_with_the_batch_between_two_syncs():
    config = accepted(*FULLY_ASYNC)
    assert mode(config) == ("separate_async", 2)
    assert config.actor_rollout_ref.rollout.over_sample_rate == 1.5
    assert (config.data.train_batch_size, config.data.gen_batch_size) == (4 * 2 * 32, None)
    assert config.trainer.total_training_steps == 7  # of 2000 / 256
    assert config.rollout_pool == (2, 8)
    assert config.algorithm.rollout_correction.bypass_mode


def test_keys_that_count_together_are_reported_in_one_line():
    assert notes(*FULLY_ASYNC) == [
        "actor_rollout_ref.hybrid_engine=False is now trainer.v1.trainer_mode=separate_async "
        "algorithm.rollout_correction.bypass_mode=true",
        "async_training.staleness_threshold=1.5 async_training.trigger_parameter_sync_step=4 "
        "async_training.require_batches=2 is now data.train_batch_size=256 "
        "trainer.v1.sampler.max_off_policy_threshold=2 actor_rollout_ref.rollout.over_sample_rate=1.5",
        "rollout.total_rollout_steps=2000 is now trainer.total_training_steps=7",
    ]


def test_a_threshold_of_0_is_a_bound_of_0():
    config = accepted(*FULLY_ASYNC, "async_training.staleness_threshold=0")
    assert (*mode(config), config.actor_rollout_ref.rollout.over_sample_rate) == ("separate_async", 0, 0)


def test_what_fully_async_s_command_leaves_out_is_as_in_its_settings_file():
    config = accepted("actor_rollout_ref.hybrid_engine=False", "async_training.trigger_parameter_sync_step=2")
    assert mode(config) == ("separate_async", 1)
    assert config.actor_rollout_ref.rollout.over_sample_rate == 0.1
    assert config.data.train_batch_size == 2 * config.actor_rollout_ref.actor.ppo_mini_batch_size


def test_one_step_off_is_a_bound_of_1_on_devices_of_its_own():
    config = accepted("data.train_batch_size=512", "actor_rollout_ref.hybrid_engine=False", "rollout.n_gpus_per_node=4")
    assert mode(config) == ("separate_async", 1)
    assert (config.data.train_batch_size, config.rollout_pool) == (512, (1, 4))


def test_the_usual_engine_says_nothing():
    assert mode(accepted("actor_rollout_ref.hybrid_engine=True")) == ("sync", 8)
    assert notes("actor_rollout_ref.hybrid_engine=True") == []


def test_partial_rollouts_alone_are_those_on_shared_devices():
    assert mode(accepted("+async_training.partial_rollout=True"))[0] == "colocate_async"


@pytest.mark.parametrize(
    ("system", "override", "reason"),
    [
        ("verl", "async_training.partial_rollout=False", "responses that are open when weights are sent"),
        ("SkyRL", "generator.num_engines=6", ""),
        ("AReaL", "rollout.max_concurrent_rollouts=256", "at most (max_off_policy_threshold + 1)"),
    ],
    ids=["waiting for open responses", "engines on shared devices", "a number of open rollouts"],
)
def test_what_only_separate_devices_need_has_no_effect(system, override, reason):
    (note,) = notes(override, system=system)
    assert note.startswith(f"{override.partition('=')[0]} has no effect: {reason}")


def test_what_the_command_sets_by_its_name_here_stays():
    kept = ("trainer.v1.sampler.max_off_policy_threshold=4", "algorithm.rollout_correction.bypass_mode=False")
    config = accepted(*kept, *FULLY_ASYNC)
    assert mode(config) == ("separate_async", 4)
    assert not config.algorithm.rollout_correction.bypass_mode


def test_a_number_that_is_not_known_yet_is_an_error_that_names_its_key():
    found = resolved("async_training.require_batches=2", f"{MINI}='${{oc.env:SIZE}}'").findings.errors
    assert [finding.text for finding in found if finding.code == "unsupported"] == [
        "async_training.require_batches=2: data.train_batch_size is not computed from "
        f"{MINI}=${{oc.env:SIZE}}; set data.train_batch_size"
    ]


def test_a_file_s_values_count_with_those_of_the_command(load, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "data: {train_batch_size: 0, gen_batch_size: 1}\n"
        "async_training: {trigger_parameter_sync_step: 4, require_batches: 1}\n"
        "actor_rollout_ref: {hybrid_engine: false, actor: {ppo_mini_batch_size: 16}}\n"
    )
    device = "trainer.device=cpu"
    assert load(*GRPO, device, config_dir=tmp_path, config_name="mine").config.data.train_batch_size == 64
    more = "async_training.require_batches=2"
    config = load(*GRPO, device, more, config_dir=tmp_path, config_name="mine").config
    assert config.data.train_batch_size == 4 * 2 * 16
    assert config.trainer.v1.trainer_mode == "separate_async"


SEPARATE = ("trainer.v1.trainer_mode=separate_async", "data.train_batch_size=64", f"{MINI}=16")
STEP = "trainer.v1.separate_async.parameter_sync_step"


def test_verl_s_sync_step_is_that_of_the_batch_or_an_error_with_the_batch(load):
    assert notes(*SEPARATE, f"{STEP}=4") == []
    assert errors_of(load, *GRPO, *SEPARATE, "trainer.device=cpu", f"{STEP}=8") == [
        f"{STEP}=8: weights are sent once per step, after data.train_batch_size / ppo_mini_batch_size updates; "
        "set data.train_batch_size=128"
    ]
    assert notes(f"{STEP}=8") == []  # verl reads it in this mode only


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.v1.separate_async.num_warmup_batches=1", ""),
        ("trainer.v1.colocate_async.num_warmup_batches=1", ""),
        ("trainer.v1.separate_async.num_warmup_batches=9", "the engines are filled from the first step on"),
        ("trainer.v1.separate_async.hybrid_rollout.enable_switch=False", ""),
        ("trainer.v1.separate_async.hybrid_rollout.enable_switch=True", "devices of training do not help with rollout"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=nccl", ""),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=nixl", "weights go to devices of their own by NCCL"),
        ("trainer.v1.sampler.max_off_policy_strategy=drop", "wait is used for "),
    ],
)
def test_a_key_of_verl_s_modes_is_accepted_with_a_line_at_most(override, said):
    found = notes(*SEPARATE, override)
    assert len(found) == bool(said)
    assert not found or said in found[0]


def test_the_older_places_of_rollout_log_probs_choose_bypass_mode():
    used = accepted("actor_rollout_ref.actor.use_rollout_log_probs=True").algorithm.rollout_correction
    again = accepted(*FULLY_ASYNC, "async_training.compute_prox_log_prob=True").algorithm.rollout_correction
    assert (used.bypass_mode, again.bypass_mode) == (True, False)


SKYRL = (
    "trainer.placement.colocate_all=false",
    "trainer.placement.policy_num_gpus_per_node=4",
    "trainer.placement.policy_num_nodes=2",
    "generator.inference_engine.num_engines=6",
    "generator.inference_engine.tensor_parallel_size=2",
)


def test_skyrl_s_separate_devices_are_as_synchronous_as_there():
    config = accepted(*SKYRL, system="SkyRL")
    assert mode(config) == ("separate_async", 0)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 4)
    assert config.rollout_pool == (2, 6)


def test_skyrl_s_fully_async_has_its_bound():
    fully = "trainer.fully_async.enabled=true"
    assert mode(accepted(*SKYRL, fully, system="SkyRL")) == ("separate_async", 4)
    bounded = accepted(*SKYRL, "trainer.fully_async.max_staleness_steps=2", fully, system="SkyRL")
    assert mode(bounded) == ("separate_async", 2)
    assert mode(accepted("trainer.fully_async.enabled=false", system="SkyRL")) == ("sync", 8)
    workers = "trainer.fully_async.num_parallel_generation_workers"
    (*_, note) = notes(*SKYRL, fully, f"{workers}=9", system="SkyRL")
    assert note.startswith(f"{workers} has no effect: at most (max_off_policy")


def test_skyrl_s_loss_by_rollout_probabilities_and_its_mask_are_translated():
    place = "trainer.algorithm.off_policy_correction"
    loss = ("trainer.algorithm.policy_loss_type=rollout_is", "trainer.algorithm.eps_clip_high=0.28")
    mask = (f"{place}.sequence_mask_metric=product", f"{place}.product_mask_low=0.25")
    config = accepted(*loss, *mask, system="SkyRL")
    correction = config.algorithm.rollout_correction
    assert (correction.bypass_mode, correction.loss_type) == (True, "reinforce")
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", "0.8_1.28")
    assert (correction.rollout_rs, correction.rollout_rs_threshold) == (["seq_sum_k1"], ["0.5_4"])


@pytest.mark.parametrize(
    ("allocation", "training", "rollout", "engine"),
    [
        ("sglang:d4+fsdp:d4", (1, 4), (1, 4), 1),
        ("vllm:d4+fsdp:d4", (1, 4), (1, 4), 1),
        ("sglang:d2t2p1+fsdp:d4", (1, 4), (1, 4), 2),
        ("vllm.d4p1t2+d8p1t1", (1, 8), (1, 8), 2),
        ("d6+d2", (1, 2), (1, 6), 1),
        ("sglang[rollout]:d16t2+fsdp[actor]:d4t2c2", (2, 8), (4, 8), 2),
    ],
)
def test_areal_s_allocation_divides_the_devices(allocation, training, rollout, engine):
    more = ("cluster.n_gpus_per_node=8", "rollout.max_head_offpolicyness=3")
    config = accepted(f'allocation_mode="{allocation}"', *more, system="AReaL")
    assert mode(config) == ("separate_async", 3)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == training
    assert config.rollout_pool == rollout
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == engine
    assert config.actor_rollout_ref.rollout.name == ("sglang" if "sglang" in allocation else "vllm")


def test_areal_s_backends_divide_the_devices_likewise():
    backends = ('rollout.backend="sglang:d2t2"', 'actor.backend="fsdp:d2"', "cluster.n_gpus_per_node=8")
    config = accepted(*backends, system="AReaL")
    assert mode(config) == ("separate_async", 0)
    assert (config.trainer.n_gpus_per_node, config.rollout_pool) == (2, (1, 4))
    assert config.actor_rollout_ref.rollout.name == "sglang"
    colocated = accepted(*backends, "rollout.scheduling_strategy.type=colocation", system="AReaL")
    assert mode(colocated)[0] == "colocate_async"


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("fsdp:d4", (1, 1, 1)),
        ("megatron:d4t2p2", (2, 1, 1)),
        ("megatron:d2t2c2e4", (2, 4, 2)),
        ("archon:d8e8", (1, 8, 1)),
    ],
)
def test_areal_s_sizes_of_training_divide_layers_experts_and_rows(backend, sizes):
    section = accepted(f'actor.backend="{backend}"', system="AReaL").actor_rollout_ref.actor
    fsdp = section.fsdp_config
    found = (fsdp.tensor_parallel_size, fsdp.expert_parallel_size, section.ulysses_sequence_parallel_size)
    assert found == sizes


@pytest.mark.parametrize(
    ("allocation", "engine"), [("vllm:d4t2|fsdp:d8", 2), ("sglang:d4t2|fsdp:d8", 2), ("fsdp:d8", 1), ("d8", 1)]
)
def test_areal_s_allocation_of_one_part_is_on_shared_devices(allocation, engine):
    config = accepted(f'allocation_mode="{allocation}"', system="AReaL")
    assert mode(config)[0] == "sync"
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.tensor_model_parallel_size) == (
        "sglang" if "sglang" in allocation else "vllm",
        engine,
    )


def test_areal_s_bound_alone_continues_rollouts_on_shared_devices():
    assert mode(accepted("rollout.max_head_offpolicyness=4", system="AReaL")) == ("colocate_async", 4)
    assert mode(accepted("rollout.max_head_offpolicyness=0", system="AReaL"))[0] == "sync"


@at_hand
def test_real_asynchronous_commands_of_verl_and_skyrl_are_accepted():
    """Others would generate or serve only, simulate training, or run another project."""
    words = ("async_training", "trainer_mode", "hybrid_engine=False", "fully_async", "colocate_all=false", "one_step")
    other = ("simulate", "arctic_rl", "harbor_trial_config", "trainer.logger", "train_files")
    lines = [line for file in sorted(SHARED.glob("*cmdlines*.jsonl")) for line in command_lines(file.name)]
    lines = [line for line in lines if any(word in json.dumps(line) for word in words)]
    for line in lines:
        system = SYSTEMS["SkyRL" if "SkyRL" in line["repo"] else "verl"]
        result = resolve_config(PPOConfig, line["overrides"], "ppo_trainer", offline=True, translation=system)
        found = result.findings
        texts = [finding.text for finding in found.errors]
        assert not texts or any(word in text for text in texts for word in other), (line["script"], texts)
    assert lines
