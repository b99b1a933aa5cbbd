import pytest

from hybridrl.config import load_sft_config

from .conftest import errors_of

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"

QUIET = (f"{ROLLOUT}.n=8",)


def test_a_sound_configuration_needs_no_words(load):
    assert load(*QUIET).notes == []


def test_settings_that_change_nothing_are_warnings(load):
    wanted = {
        "hydra.run.dir=x": "hydra.run.dir has no effect: Hydra only reads the configuration here",
        "data.train_batch_size=32": f"{ACTOR}.ppo_mini_batch_size=256 is more than data.train_batch_size=32: "
        "one update per step",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=true": "reward.reward_kwargs.overlong_buffer_cfg.enable=true "
        "has no effect without reward.reward_manager.name=dapo",
        f"{ROLLOUT}.val_kwargs.n=4": f"{ROLLOUT}.val_kwargs.n=4: validation is greedy, so all responses are equal; "
        f"set {ROLLOUT}.val_kwargs.temperature=1.0",
        f"{ROLLOUT}.mode=sync": f"{ROLLOUT}.mode=sync has no effect: responses enter and leave the engine one by one",
        f"{ROLLOUT}.calculate_log_probs=false": f"{ROLLOUT}.calculate_log_probs=false has no effect: "
        "the rollout log-probs are kept",
        f"{ROLLOUT}.prompt_length=9": f"{ROLLOUT}.prompt_length=9 has no effect: "
        "data.max_prompt_length limits the prompts",
        f"{ROLLOUT}.response_length=9": f"{ROLLOUT}.response_length=9: responses end there, "
        "not at data.max_response_length=512",
        "trainer.test_freq=5": "trainer.test_freq=5 has no effect without data.val_files",
        "algorithm.gdpo_reward_keys=[a]": "algorithm.gdpo_reward_keys has no effect with algorithm.adv_estimator=gae",
        "algorithm.filter_groups.metric=acc": "algorithm.filter_groups.metric has no effect without "
        "algorithm.filter_groups.enable=true",
        "data.gen_batch_size=9": "data.gen_batch_size has no effect without algorithm.filter_groups.enable=true",
        f"{CORRECTION}.loss_type=reinforce": f"{CORRECTION}.loss_type=reinforce has no effect without "
        f"{CORRECTION}.bypass_mode=true",
        f"{CORRECTION}.rollout_rs_threshold=2": f"{CORRECTION}.rollout_rs_threshold has no effect without "
        f"{CORRECTION}.rollout_rs",
        f"{ACTOR}.policy_loss.loss_mode=gspo": f"{ACTOR}.loss_agg_mode=seq-mean-token-sum applies to entropy and KL "
        "only with loss_mode=gspo, which averages over the tokens of a row, then over rows",
        "algorithm.kl_ctrl.type=adaptive": "algorithm.kl_ctrl.type=adaptive has no effect without "
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.1": "algorithm.kl_ctrl.kl_coef has no effect without "
        "algorithm.use_kl_in_reward=true",
        f"{ACTOR}.kl_loss_coef=0.1": f"{ACTOR}.kl_loss_coef has no effect without {ACTOR}.use_kl_loss=true",
        "actor_rollout_ref.ref.refresh_freq=5": "actor_rollout_ref.ref.refresh_freq has no effect: no KL against the "
        "reference policy is in use",
    }
    assert load(*QUIET, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", *wanted).notes == list(wanted.values())


def test_other_offloads_are_warnings_as_without_effect_under_offload_policy(load):
    fsdp = f"{ACTOR}.fsdp_config"
    notes = load(*QUIET, f"{fsdp}.offload_policy=true", f"{fsdp}.optimizer_offload=true").notes
    assert notes == [
        f"{fsdp}.optimizer_offload=true has no effect with offload_policy=true, which keeps more in host memory"
    ]


@pytest.mark.parametrize(
    ("actor", "critic", "kept", "said"),
    [
        (2, None, 2, None),
        (2, 2, 2, None),
        (2, 3, 3, "=3: as many checkpoints are kept, with both models, although trainer.max_actor_ckpt_to_keep=2"),
        (3, 2, 3, "=2 has no effect next to trainer.max_actor_ckpt_to_keep=3"),
        (None, 1, None, "=1 has no effect next to trainer.max_actor_ckpt_to_keep=null"),
    ],
)
def test_a_step_is_kept_with_both_models_so_the_larger_count_holds(load, actor, critic, kept, said):
    counts = {"actor": actor, "critic": critic}
    overrides = [f"trainer.max_{name}_ckpt_to_keep={count}" for name, count in counts.items() if count]
    loaded = load(*QUIET, "critic.enable=true", "algorithm.adv_estimator=gae", *overrides)
    assert loaded.config.trainer.max_actor_ckpt_to_keep == kept
    texts = [note for note in loaded.notes if "ckpt_to_keep" in note]
    assert not texts if said is None else texts[0].startswith(f"trainer.max_critic_ckpt_to_keep{said}")


def test_a_count_of_critics_without_a_critic_is_a_warning(load):
    notes = load(*QUIET, "algorithm.adv_estimator=grpo", "trainer.max_critic_ckpt_to_keep=1").notes
    assert notes == ["trainer.max_critic_ckpt_to_keep=1 has no effect without a critic"]


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ("hf_model", "no run can resume from such a checkpoint, without model"),
        ("model,extra", "a run that resumes from such a checkpoint starts without optimizer"),
        ("model,optimizer,extra", None),
    ],
)
def test_checkpoints_that_lack_what_a_run_resumes_with_are_a_warning_of_both_kinds_of_run(load, needed, parts, cause):
    def causes(*overrides: str) -> list[str]:
        notes, key = [], f"checkpoint.save_contents=[{parts}]"
        load_sft_config([needed[0], "model.path=model", key, *overrides], report=notes.append)
        notes += load(*QUIET, f"{ACTOR}.{key}", *overrides).notes
        return [note.partition(": ")[2] for note in notes if "checkpoint.save_contents" in note]

    assert causes() == ([] if cause is None else [cause, cause])
    assert causes("trainer.resume_mode=disable") == causes("trainer.save_freq=-1", "trainer.ckpt_freq_secs=-1") == []


def test_neutral_values_are_no_warnings(load):
    assert load(*QUIET, "algorithm.kl_ctrl.kl_coef=0", f"{ACTOR}.kl_loss_coef=0.0").notes == []


def test_a_kl_that_counts_twice_is_a_warning(load):
    assert load(*QUIET, f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true").notes == [
        "algorithm.use_kl_in_reward: KL against the reference policy counts twice: in the reward and in the loss"
    ]


def test_a_group_of_one_is_a_warning_where_it_has_no_baseline(load):
    assert load("algorithm.adv_estimator=rloo").notes == [
        f"{ROLLOUT}.n=1: algorithm.adv_estimator=rloo compares responses to the same prompt; in a group of one every "
        f"advantage is 0, so nothing can be learned; set {ROLLOUT}.n=8"
    ]
    assert load("algorithm.adv_estimator=rloo", "trainer.val_only=true", "data.val_files=train.jsonl").notes == []
    assert load("algorithm.adv_estimator=remax").notes == []


def test_a_critic_that_nothing_reads_is_a_warning_and_not_trained(load):
    loaded = load(*QUIET, "algorithm.adv_estimator=grpo", "critic.enable=true", "trainer.critic_warmup=3")
    assert loaded.notes == [
        "critic.enable=true has no effect: algorithm.adv_estimator=grpo reads no values",
        "trainer.critic_warmup=3 has no effect without a critic",
    ]
    assert loaded.config.critic.enable is False
    assert loaded.config.trainer.critic_warmup == 0


def test_the_order_of_the_clip_range_is_checked_only_where_it_is_a_window_of_the_ratio(load):
    crossed = (f"{ACTOR}.clip_ratio_low=0.3", f"{ACTOR}.clip_ratio_high=0.2")
    assert load(*QUIET, *crossed).notes == [
        f"{ACTOR}.clip_ratio_high=0.2 is less than clip_ratio_low=0.3: the upper side is usually the wider one"
    ]
    assert load(*QUIET, f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.2").notes == []
    for loss in ("cispo", "sapo", "dppo_tv"):
        assert load(*QUIET, *crossed, f"{ACTOR}.policy_loss.loss_mode={loss}").notes == []


def test_a_lower_side_that_no_ratio_reaches_is_a_warning(load):
    wide = (f"{ACTOR}.clip_ratio_low=10", f"{ACTOR}.clip_ratio_high=10")
    assert load(*QUIET, *wide).notes == [
        f"{ACTOR}.clip_ratio_low=10: a ratio is never below 0, so that side does not clip"
    ]
    assert load(*QUIET, *wide, f"{ACTOR}.policy_loss.loss_mode=cispo").notes == []


def test_validation_at_a_temperature_samples_and_it_is_said_where_do_sample_is_not_set(load):
    key = f"{ROLLOUT}.val_kwargs"
    assert load(*QUIET, f"{key}.temperature=0.6", f"{key}.n=4").notes == [
        f"{key}.do_sample=false has no effect: at {key}.temperature=0.6 validation samples, as in verl; "
        f"for greedy responses set {key}.temperature=0"
    ]
    assert load(*QUIET, f"{key}.temperature=0.6", f"{key}.do_sample=true").notes == []


def test_do_sample_alone_samples_nothing_and_is_a_warning(load):
    key = f"{ROLLOUT}.val_kwargs"
    assert load(*QUIET, f"{key}.do_sample=true").notes == [
        f"{key}.do_sample=true has no effect: at {key}.temperature=0 validation is greedy, as in verl; "
        f"set {key}.temperature=1.0 to sample"
    ]


def test_values_of_what_is_switched_off_are_accepted_without_a_word(load):
    off = ("actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.lora_alpha=0")
    loaded = load(*QUIET, *off, "algorithm.rollout_correction.rollout_is_threshold=null")
    assert loaded.notes == []
    assert loaded.config.algorithm.rollout_correction.rollout_is_threshold == "2.0"


def test_sinks_of_other_systems_are_left_out_and_never_all_of_them(load):
    loaded = load(*QUIET, "trainer.logger=[aim,rl_insight]")
    assert loaded.config.trainer.logger == ["console"]
    assert loaded.notes == [
        "trainer.logger=[aim, rl_insight]: aim, rl_insight are not supported and left out; metrics go to console "
        "and metrics.jsonl"
    ]
    assert load(*QUIET, "trainer.logger=[aim,file]").config.trainer.logger == ["file"]


def test_an_engine_wider_than_a_machine_takes_that_machine_s_devices(load, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    devices = ("trainer.device=cuda", "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    loaded = load(*QUIET, *devices, f"{ROLLOUT}.tensor_model_parallel_size=16")
    assert loaded.config.actor_rollout_ref.rollout.tensor_model_parallel_size == 8
    assert loaded.notes == [
        f"{ROLLOUT}.tensor_model_parallel_size=16: an engine spans the devices of one machine; 8 is used"
    ]


@pytest.mark.parametrize(
    ("overrides", "beginning"),
    [
        ((f"{ROLLOUT}.temperature=3",), f"{ROLLOUT}.temperature=3: above 1.5 most models sample noise"),
        ((f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.n=1"), f"{ROLLOUT}.temperature=0: responses are greedy"),
        ((f"{ACTOR}.optim.lr=1e-2",), f"{ACTOR}.optim.lr=0.01: a policy is destroyed within a few updates"),
        ((f"{ACTOR}.clip_ratio=0",), f"{ACTOR}.clip_ratio=0: every ratio but 1 is clipped"),
    ],
)
def test_values_with_which_nothing_can_be_learned_are_warnings(load, overrides, beginning):
    (note,) = load(*QUIET, *overrides).notes
    assert note.startswith(beginning)


@pytest.mark.parametrize(
    "override", [f"{ROLLOUT}.temperature=1.5", f"{ACTOR}.optim.lr=1e-3", f"{ACTOR}.clip_ratio=0.01"]
)
def test_values_at_the_limits_give_no_warning(load, override):
    assert load(*QUIET, override).notes == []


@pytest.mark.parametrize("sampling", ["top_p=0.8", "top_k=20", "repetition_penalty=1.1"])
@pytest.mark.parametrize(
    "reads",
    [
        "trainer.v1.trainer_mode=colocate_async",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_rs=token_k2 algorithm.rollout_correction.rollout_rs_threshold=0.5",
        "algorithm.rollout_correction.bypass_mode=true",
    ],
)
def test_ratios_to_log_probs_of_a_truncated_distribution_are_named_as_wrong(load, reads, sampling):
    """The engine's log-probs are then of what is left of the distribution: each ratio lacks the mass that was left."""
    said = [note for note in load(*QUIET, *reads.split(), f"{ROLLOUT}.{sampling}").notes if "truncated" in note]
    assert len(said) == 1 and "every ratio is wrong" in said[0] and "set top_p=1" in said[0]
    assert not [note for note in load(*QUIET, *reads.split()).notes if "truncated" in note]


def test_without_such_ratios_sampling_may_truncate(load):
    assert load(*QUIET, f"{ROLLOUT}.top_p=0.8").notes == []


@pytest.mark.parametrize("other", ["trainer.total_training_steps=4", "algorithm.filter_groups.enable=true"])
def test_no_prompts_are_left_out_where_steps_are_counted_or_take_what_they_need(load, other):
    said = load(*QUIET, "data.drop_last=true", other).notes
    assert [note for note in said if "data.drop_last has no effect with" in note], said


CORRECTION = "algorithm.rollout_correction"
SGLANG = (f"{ROLLOUT}.name=sglang", "trainer.device=cpu")


@pytest.mark.parametrize("truncation", ["top_p=0.9", "top_k=20"])
@pytest.mark.parametrize("reads", ["rollout_is=token", "rollout_rs=token_k1"])
def test_a_correction_by_log_probs_before_the_truncation_is_rejected_with_sglang(load, truncation, reads):
    threshold = [f"{CORRECTION}.rollout_rs_threshold=0.5_2.0"] * reads.startswith("rollout_rs")
    keys = [*SGLANG, f"{CORRECTION}.{reads}", *threshold, f"{ROLLOUT}.{truncation}"]
    (line,) = errors_of(load, *keys)
    assert line.startswith(f"{CORRECTION}.{reads.split('=')[0]}=")
    assert "the log-probs of sglang are of the distribution before top_p and top_k truncate it" in line
    assert line.endswith(f"set {ROLLOUT}.top_p=1 and {ROLLOUT}.top_k=-1, or {CORRECTION}.bypass_mode=true")
    assert load(*(key for key in keys if truncation not in key))


def test_a_correction_that_asynchronous_rollout_chooses_is_checked_likewise(load):
    keys = (*SGLANG, "trainer.v1.trainer_mode=colocate_async", f"{ROLLOUT}.top_p=0.9")
    (line,) = errors_of(load, *keys)
    assert line.startswith(f"{CORRECTION}.rollout_is=auto: the log-probs of sglang")
    assert load(*keys, f"{CORRECTION}.bypass_mode=true")


@pytest.mark.parametrize(
    "keys",
    [
        (f"{ROLLOUT}.top_p=0.9",),
        (f"{ROLLOUT}.top_p=0.9", f"{CORRECTION}.bypass_mode=true"),
        (f"{ROLLOUT}.val_kwargs.top_p=0.9", f"{ROLLOUT}.val_kwargs.top_k=20", f"{CORRECTION}.rollout_is=token"),
    ],
)
def test_truncation_is_accepted_where_no_correction_reads_its_log_probs(load, keys):
    assert not [note for note in load(*SGLANG, *keys).notes if "ratio" in note]


def test_a_penalty_changes_the_log_probs_of_every_engine(load):
    keys = (f"{ROLLOUT}.repetition_penalty=1.1", f"{CORRECTION}.rollout_is=token")
    for engine in (SGLANG, ("trainer.device=cpu",)):
        assert len([note for note in load(*engine, *keys).notes if "every ratio is wrong" in note]) == 1
