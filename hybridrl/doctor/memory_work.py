"""What a phase of training works with beside the models it keeps: of a rank, in bytes by kind."""

from collections import Counter

from hybridrl.doctor import memory_formulas as formulas
from hybridrl.doctor.memory_formulas import Kept, ModelSizes
from hybridrl.doctor.memory_setup import Setup
from hybridrl.runs.settings import build_critic_plan, build_policy_plan
from hybridrl.training.linear_log_probs import tokens_at_once
from hybridrl.training.worker import LearnerConfig

Needs = Counter[str]


def working(run: Setup, phase: str) -> Needs:
    """The most that is there at a time; nothing in phases that only move weights or wait."""
    config, worker = run.config, run.worker
    if phase == "log-probs":
        return max(_passes(run), key=Counter.total)
    if phase == "policy update":
        budget = build_policy_plan(config).updates.budget
        tokens = run.tokens(budget, config.actor_rollout_ref.actor.ppo_mini_batch_size)
        return _update(run, run.models.policy, worker.policy, tokens, padded=budget.padded)
    if phase == "critic update" and worker.critic and run.models.critic:
        budget = build_critic_plan(config).updates.budget
        tokens = run.tokens(budget, config.critic.ppo_mini_batch_size)
        update = _update(run, run.models.critic, worker.critic, tokens, padded=budget.padded)
        return max(update, _values(run, run.models.critic, worker.critic), key=Counter.total)
    return Counter()


def _passes(run: Setup) -> list[Needs]:
    """Of policy and reference, of which one at a time goes over a step's rows."""
    plan, prompts = build_policy_plan(run.config), run.config.data.train_batch_size
    found = [_pass(run, run.models.policy, run.kept(run.worker.policy), run.tokens(plan.log_prob_budget, prompts))]
    if run.models.reference:
        tokens = run.tokens(plan.reference_budget, prompts)
        found.append(_pass(run, run.models.reference, run.reference_kept, tokens))
    return found


def _values(run: Setup, sizes: ModelSizes, critic: LearnerConfig) -> Needs:
    tokens = run.tokens(build_critic_plan(run.config).value_budget, run.config.data.train_batch_size)
    return _pass(run, sizes, run.kept(critic), tokens, values=True)


def _pass(run: Setup, sizes: ModelSizes, kept: Kept, tokens: int, *, values: bool = False) -> Needs:
    needs = Counter({"gathered": formulas.gathered(sizes, kept), "activations": formulas.passing(sizes, kept, tokens)})
    if not values:
        needs["logits"] = _logits(run, sizes, kept, tokens)
    return needs


def _update(run: Setup, sizes: ModelSizes, learner: LearnerConfig, tokens: int, *, padded: bool) -> Needs:
    """Of the backward pass or of the optimizer's step, whichever holds more."""
    kept = run.kept(learner)
    by_rows = not padded and (run.on_cpu or kept.computed == formulas.FULL)
    again = {
        "checkpointed": learner.model.enable_gradient_checkpointing,
        "selective": learner.model.selective_checkpointing,
    }
    backward = Counter(
        {
            "gathered": formulas.gathered(sizes, kept) + formulas.reduced(sizes, kept),
            "activations": formulas.activations(sizes, kept, tokens, **again, by_rows=by_rows),
        }
    )
    if learner is run.worker.policy:
        backward["logits"] = _logits(run, sizes, kept, tokens)
    if learner.fsdp.offload_policy and not run.on_cpu:
        return backward  # the optimizer steps in host memory
    step = Counter({"optimizer": formulas.optimizer_step(sizes, kept)})
    if learner.fsdp.optimizer_offload and not run.on_cpu:
        step["optimizer"] += run.moments(sizes, learner)
    return max(backward, step, key=Counter.total)


def _logits(run: Setup, sizes: ModelSizes, kept: Kept, tokens: int) -> float:
    at_once = tokens_at_once(run.config.trainer.device, sizes.vocabulary)
    return formulas.logits(sizes, kept, tokens, at_once, on_cpu=run.on_cpu)
