"""Teachers and the loss by which a policy learns from them: values that are filled in, and what is rejected."""

import pytest

from tests.config.conftest import Load, errors_of

ON, LOSS, MODELS = "distillation.enabled=true", "distillation.distillation_loss", "distillation.teacher_models"
SELF = f"+{MODELS}.me.model_path=policy"
ONE = f"+{MODELS}.teacher_model.model_path=model"
FAR = f"+{MODELS}.far.base_url=http://127.0.0.1:8001/v1"


def test_a_teacher_is_named_by_its_path_alone(load: Load) -> None:
    section = load(ON, ONE).config.distillation
    assert [*section.teachers] == ["teacher_model"] and str(section.teachers["teacher_model"].model_path).endswith(
        "/model"
    )
    assert section.distillation_loss.loss_mode == "forward_kl" and not section.chooses
    assert load(ON, ONE, f"{LOSS}.use_policy_gradient=true").config.distillation.distillation_loss.loss_mode == "k1"


def test_behind_an_endpoint_the_loss_is_k1_as_a_reward_unless_another_is_chosen(load: Load) -> None:
    section = load(ON, FAR, f"{MODELS}.far.served_name=big").config.distillation
    assert [*section.teachers] == [*section.endpoints] == ["far"] and section.endpoints["far"].served_name == "big"
    assert (section.distillation_loss.loss_mode, section.distillation_loss.use_policy_gradient) == ("k1", True)
    loss = load(ON, FAR, f"{LOSS}.loss_mode=k3").config.distillation.distillation_loss
    assert (loss.loss_mode, loss.use_policy_gradient) == ("k3", False)


def test_the_most_probable_tokens_come_from_an_endpoint(load: Load) -> None:
    keys = (f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=8", f"{LOSS}.log_prob_min_clamp=-10")
    loaded = load(ON, FAR, *keys)
    loss = loaded.config.distillation.distillation_loss
    assert (loss.loss_mode, loss.topk, loss.log_prob_min_clamp) == ("forward_kl_topk", 8, -10)
    assert not any("no effect" in note for note in loaded.notes)


def test_teachers_of_both_kinds_have_different_rows(load: Load) -> None:
    both = (ON, ONE, FAR, f"{MODELS}.teacher_model.key=a", f"{MODELS}.far.key=b")
    section = load(*both).config.distillation
    assert [*section.teachers] == ["teacher_model", "far"] and [*section.endpoints] == ["far"]
    assert section.distillation_loss.loss_mode == "k1" and not section.leaves_out


def test_the_teacher_of_the_default_name_stays_when_others_are_added(load: Load) -> None:
    several = (ON, ONE, f"{MODELS}.teacher_model.key=a", f"{MODELS}.other.key=b", f"{MODELS}.other.model_path=model")
    none = (f"{MODELS}.none.key=c",)
    section = load(*several, *none).config.distillation
    assert [*section.teachers] == ["teacher_model", "other"] and section.chooses and section.leaves_out
    assert not load(*several).config.distillation.leaves_out


def test_keys_of_a_pool_and_of_a_truncated_table_have_no_effect(load: Load) -> None:
    more = [f"{MODELS}.teacher_model.inference.gpu_memory_utilization=0.4", "distillation.nnodes=1", f"{LOSS}.topk=64"]
    notes = load(ON, ONE, *more, f"{LOSS}.loss_mode=forward_kl_topk").notes
    assert any("need no pool of servers" in note for note in notes)
    assert any(f"{LOSS}.topk has no effect without {LOSS}.loss_mode=forward_kl_topk" in note for note in notes)
    assert any("in the training ranks it is forward_kl" in note for note in notes)


def test_a_policy_that_teaches_itself_with_a_context_has_a_reverse_divergence(load: Load) -> None:
    context = f"+{MODELS}.me.context=[sibling,feedback]"
    section = load(ON, SELF, context, "actor_rollout_ref.rollout.n=4").config.distillation
    assert section.distillation_loss.loss_mode == "reverse_kl" and section.leaves_out and section.reads_contexts
    base = load(ON, f"+{MODELS}.start.model_path=base").config.distillation
    assert base.distillation_loss.loss_mode == "forward_kl" and not base.leaves_out


@pytest.mark.parametrize(
    ("overrides", "errors"),
    [
        ((ON,), [f"no teacher has a model; add {MODELS}.teacher_model.model_path=..."]),
        ((ON, f"+{MODELS}.one.model_paht=model"), [f"unknown key {MODELS}.one.model_paht; did you mean model_path?"]),
        ((ON, f"+{MODELS}.one=model"), ["is a section"]),
        ((ON, f"+{MODELS}.one.model_path=nowhere/at/all"), ["nowhere/at/all"]),
        ((ON, ONE, f"+{MODELS}.none.key=null"), ["it has neither a model nor a key"]),
        ((ON, ONE, f"+{MODELS}.other.model_path=model", f"{MODELS}.other.key=b"), ["each needs the value of"]),
        (
            (ON, ONE, f"+{MODELS}.other.model_path=model", f"{MODELS}.other.key=b", f"{MODELS}.teacher_model.key=b"),
            ["teacher_model and other have the same key=b, and a row has one teacher"],
        ),
        ((ON, SELF), ["the policy is equal to itself, so it learns nothing from itself", "context=[sibling,feedback]"]),
        ((ON, ONE, f"+{MODELS}.teacher_model.ema=0.1"), ["an average is one of the policy's weights"]),
        ((ON, SELF, f"+{MODELS}.me.ema=1"), ["must be more than 0 and less than 1"]),
        ((ON, SELF, f"+{MODELS}.me.ema=0.1", "actor_rollout_ref.model.lora_rank=8"), ["model_path=base without ema"]),
        ((ON, SELF, f"+{MODELS}.me.context=[siblings]"), ["has the unknown source siblings"]),
        ((ON, SELF, f"+{MODELS}.me.context=['column:']"), ["has the unknown source column:"]),
        ((ON, SELF, f"+{MODELS}.me.context=[sibling]", "actor_rollout_ref.rollout.n=1"), ["has no other responses"]),
        ((ON, SELF, f"+{MODELS}.me.context=[feedback]", f"+{MODELS}.me.template='{{{{hint}}}}'"), ["field hint"]),
        ((ON, SELF, f"+{MODELS}.me.context=[feedback]", f"+{MODELS}.me.template=x"), ["does not show the context"]),
        ((ON, ONE, f"{LOSS}.loss_mode=k1"), ["its gradient does not depend on the teacher"]),
        ((ON, ONE, f"{LOSS}.loss_mode=jsd", f"{LOSS}.use_policy_gradient=true"), ["has no sampled token to reward"]),
        ((ON, ONE, f"{LOSS}.loss_mode=jsd", f"{LOSS}.beta=1"), ["must be more than 0 and less than 1"]),
        ((ON, FAR, f"{LOSS}.loss_mode=reverse_kl"), ["far gives log-probs of single tokens"]),
        ((ON, FAR, f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.use_policy_gradient=true"), ["has no sampled token"]),
        (
            (ON, ONE, FAR, f"{MODELS}.teacher_model.key=a", f"{MODELS}.far.key=b", f"{LOSS}.loss_mode=forward_kl_topk"),
            ["a teacher with a model_path sends no most probable tokens"],
        ),
        ((ON, FAR, "actor_rollout_ref.rollout.temperature=0.7"), ["gives log-probs at temperature 1"]),
        ((ON, FAR, f"{MODELS}.far.model_path=model"), [f"it has a model_path too; leave {MODELS}.far.base_url out"]),
        ((ON, f"{FAR}/chat/completions"), ["names one path too many"]),
        ((ON, ONE, f"{LOSS}.loss_mode=revers_kl"), ["did you mean reverse_kl?"]),
        ((ON, ONE, f"{LOSS}.use_task_rewards=false", "critic.enable=true", "algorithm.adv_estimator=gae"),
         ["critic.enable=true: nothing learns from it without task rewards"]),
        ((ON, ONE, f"{LOSS}.use_task_rewards=false", "algorithm.use_kl_in_reward=true"),
         ["algorithm.use_kl_in_reward=true: nothing learns from it without task rewards"]),
    ],
)  # fmt: skip
def test_what_cannot_teach_is_rejected_with_the_fix(load: Load, overrides, errors) -> None:
    found = errors_of(load, *overrides)
    for error in errors:
        assert any(error in line for line in found), found


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (
            (ON, ONE, f"+{MODELS}.teacher_model.threshold=0.5"),
            f"threshold has no effect without {MODELS}.teacher_model",
        ),
        ((ONE,), f"{MODELS} has no effect without distillation.enabled=true"),
        (
            (ON, ONE, f"{MODELS}.teacher_model.served_name=a"),
            f"{MODELS}.teacher_model.served_name has no effect without {MODELS}.teacher_model.base_url",
        ),
        ((ON, ONE, f"{LOSS}.beta=0.3"), f"{LOSS}.beta has no effect without {LOSS}.loss_mode=jsd"),
        (
            (ON, ONE, f"{LOSS}.use_task_rewards=false", f"{LOSS}.distillation_loss_coef=0.5"),
            f"{LOSS}.distillation_loss_coef has no effect: it weighs the distillation next to task rewards",
        ),
    ],
)
def test_what_has_no_effect_is_said(load: Load, overrides, note) -> None:
    assert any(note in each for each in load(*overrides).notes)


def test_one_response_to_a_prompt_is_enough_without_task_rewards(load: Load) -> None:
    alone = ("actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=grpo")
    cause = "in a group of one every advantage is 0"
    assert not any(cause in note for note in load(ON, ONE, f"{LOSS}.use_task_rewards=false", *alone).notes)
    assert any(cause in note for note in load(ON, ONE, *alone).notes)


def test_without_task_rewards_no_critic_is_trained_whatever_the_estimator(load: Load) -> None:
    assert load(ON, ONE, "algorithm.adv_estimator=gae").config.critic.enable
    assert not load(ON, ONE, f"{LOSS}.use_task_rewards=false", "algorithm.adv_estimator=gae").config.critic.enable
