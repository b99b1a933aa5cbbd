from .conftest import Load

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"

QUIET = (f"{ROLLOUT}.n=8",)


def test_a_sound_configuration_needs_no_words(load: Load) -> None:
    assert load(*QUIET).notes == []


def test_settings_that_change_nothing_are_noted(load: Load) -> None:
    wanted = {
        "hydra.run.dir=x": "hydra.run.dir has no effect: Hydra only reads the configuration here",
        "data.train_batch_size=32": f"{ACTOR}.ppo_mini_batch_size=256 is more than data.train_batch_size=32: "
        "one update a step",
        f"{ROLLOUT}.val_kwargs.n=4": f"{ROLLOUT}.val_kwargs.n=4: validation is greedy, so all answers are equal; "
        f"set {ROLLOUT}.val_kwargs.do_sample=true",
        f"{ROLLOUT}.val_kwargs.temperature=0.6": f"{ROLLOUT}.val_kwargs.temperature has no effect without "
        f"{ROLLOUT}.val_kwargs.do_sample=true",
        f"{ROLLOUT}.mode=sync": f"{ROLLOUT}.mode=sync has no effect: answers enter and leave one by one",
        f"{ROLLOUT}.calculate_log_probs=false": f"{ROLLOUT}.calculate_log_probs=false has no effect: "
        "the engine's log-probs are kept",
        f"{ROLLOUT}.prompt_length=9": f"{ROLLOUT}.prompt_length has no effect: "
        "data.max_prompt_length says which prompts there are",
        f"{ROLLOUT}.response_length=9": f"{ROLLOUT}.response_length=9 ends answers, not data.max_response_length=512",
        "algorithm.kl_ctrl.kl_coef=0.1": "algorithm.kl_ctrl.kl_coef has no effect without "
        "algorithm.use_kl_in_reward=true",
        f"{ACTOR}.kl_loss_coef=0.1": f"{ACTOR}.kl_loss_coef has no effect without {ACTOR}.use_kl_loss=true",
        "trainer.test_freq=5": "trainer.test_freq has no effect without data.val_files",
    }
    assert load(*QUIET, *wanted).notes == list(wanted.values())


def test_neutral_values_are_not_noted(load: Load) -> None:
    assert load(*QUIET, "algorithm.kl_ctrl.kl_coef=0", f"{ACTOR}.kl_loss_coef=0.0").notes == []


def test_a_kl_that_counts_twice_is_noted(load: Load) -> None:
    assert load(*QUIET, f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true").notes == [
        "KL against the reference policy counts twice: in the reward and in the loss"
    ]


def test_a_grpo_group_of_one_is_noted_unless_nothing_is_trained(load: Load) -> None:
    assert load().notes == [
        f"{ROLLOUT}.n=1: in a GRPO group of one every advantage is 0, so nothing can be learnt; set {ROLLOUT}.n=8"
    ]
    assert load("trainer.val_only=true", "data.val_files=train.jsonl").notes == []
