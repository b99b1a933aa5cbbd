"""The rules of a run's health, each with the series that it is made for and one that only looks like it."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from hybridrl.config.values import DIAGNOSES
from hybridrl.health import HealthMonitor, Unhealthy
from hybridrl.health.history import History
from hybridrl.health.judgements import overfitting
from hybridrl.health.rules import RULES

HEALTHY = {
    "critic/score/mean": 0.4,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "critic/advantages/max": 2.0,
    "critic/advantages/min": -2.0,
    "response_length/mean": 100.0,
    "response_length/max": 180.0,
    "response_length/clip_ratio": 0.05,
    "response/repeated_ngrams": 0.1,
    "critic/zero_signal_share": 0.3,
    "critic/vf_loss": 0.1,
    "actor/grad_norm": 0.3,
    "actor/entropy": 1.0,
    "actor/ppo_kl": 0.001,
    "actor/pg_clipfrac": 0.02,
    "actor/lr": 1e-3,
    "actor/skipped_updates": 0,
    "critic/skipped_updates": 0,
    "sampling/unknown_tokens": 0,
    "perf/response_tokens": 10_000,
    "actor/kl_loss": 0.01,
    "actor/pg_loss": 0.01,
    "distillation/kl": 0.1,
    "distillation/teacher_log_prob": -1.0,
    "distillation/unreached": 0.001,
    "distillation/without_context": 0.1,
    "perf/host_memory_free_gb": 100.0,
    "perf/device_free_gb": 20.0,
    "timing_s/step": 360.0,
}


def series(steps: int, **changes) -> list[dict[str, float]]:
    """Healthy steps, of which each change replaces one metric: by a value, or by a function of the step."""
    names = {name.replace("/", "_"): name for name in HEALTHY}
    rows = []
    for step in range(1, steps + 1):
        changed = {names[name]: make(step) if callable(make) else make for name, make in changes.items()}
        rows.append({**HEALTHY, "critic/score/mean": 0.4 + 0.01 * (step % 3), **changed})
    return rows


def begun(rows: list[dict[str, float]]) -> list[tuple[int, str]]:
    """Step and code of everything reported, in its order."""
    monitor = HealthMonitor(warn=lambda text, code: None, info=lambda text: None)
    reported = []
    for step, row in enumerate(rows, start=1):
        before = dict(monitor.begun)
        monitor.judge(step, row)
        reported += [(step, code) for code, began in monitor.begun.items() if before.get(code) != began]
    return reported


def warnings_about(rows: list[dict[str, float]]) -> list[str]:
    warned: list[str] = []
    monitor = HealthMonitor(warn=lambda text, code: warned.append(text))
    for step, row in enumerate(rows, start=1):
        monitor.judge(step, row)
    return warned


def diagnosis(rows: list[dict[str, float]]) -> str:
    """The first warning about the rows."""
    return warnings_about(rows)[0]


def collapsing(low: float):
    return lambda step: 1.0 if step <= 10 else low


def noisy(value: float, step: int) -> float:
    """The value, up to 10% more or less."""
    return value * (1 + 0.1 * (step * 7919 % 13 - 6) / 6)


def exploding(value: float, step: int) -> float:
    return noisy(value, step) * 1.3 ** max(step - 20, 0)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (series(30), []),
        (series(5, response_length_clip_ratio=0.5), [(2, "truncation")]),
        (series(5, response_length_clip_ratio=lambda step: 0.5 * (step % 2)), []),
        (series(5, critic_score_max=0.0, critic_score_mean=0.0), [(3, "no-signal")]),
        (series(5, critic_advantages_max=0.0, critic_advantages_min=0.0), [(3, "no-signal")]),
        (series(5, distillation_teacher_log_prob=-7.0), [(2, "teacher-far")]),
        (series(5, distillation_teacher_log_prob=lambda step: -7.0 if step > 1 else -2.0), []),
        (series(12, distillation_unreached=0.05), [(10, "teacher-unreached")]),
        (series(12, distillation_unreached=0.005), []),
        (series(12, distillation_unreached=lambda step: 0.05 * 0.9**step), []),
        (series(5, distillation_without_context=1.0), [(3, "no-context")]),
        (series(5, distillation_without_context=lambda step: 1.0 - 0.1 * (step == 3)), []),
        (series(40, distillation_kl=lambda step: exploding(0.1, step)), [(25, "teacher-diverges")]),
        (series(2, critic_score_max=0.0, critic_score_mean=0.0), []),
        (series(4, actor_ppo_kl=lambda step: 9.2 if step == 3 else 0.01), [(3, "policy-jump")]),
        (series(4, actor_ppo_kl=lambda step: -0.7 if step == 3 else 0.01), [(3, "policy-jump")]),
        (series(4, critic_skipped_updates=lambda step: step == 2), [(2, "not-finite")]),
        (series(5, sampling_unknown_tokens=lambda step: 120 * (step > 2)), [(4, "unknown-tokens")]),
        (series(5, sampling_unknown_tokens=lambda step: 120 * (step % 2) + 9), []),
        (series(8, actor_pg_clipfrac=0.35), [(5, "clipping")]),
        (series(8, actor_kl_loss=lambda step: 7.9 if step == 6 else 0.02), [(6, "kl-jump")]),
        (series(8, actor_kl_loss=1.5), [(1, "kl-jump")]),
        (series(8, actor_kl_loss=lambda step: 0.3 * step), []),
        (series(20, actor_entropy=collapsing(0.02)), [(15, "entropy-collapse")]),
        (series(20, response_length_mean=lambda step: 100.0 * collapsing(0.1)(step)), [(15, "length-collapse")]),
        (series(20, response_repeated_ngrams=lambda step: 0.1 if step <= 10 else 0.9), [(12, "repetition")]),
        (series(130), [(50, "flat-score")]),
        (series(30, perf_host_memory_free_gb=lambda step: 100.0 - step + 0.3 * (step % 2)), [(20, "memory-full")]),
        (series(130, perf_host_memory_free_gb=lambda step: 100.0 - 3 * (step % 5), critic_score_mean=0.95), []),
        (series(49, perf_host_memory_free_gb=lambda step: 100.0 if step < 30 else 40.0), []),
        (series(49, perf_device_free_gb=lambda step: 20.0 - 0.001 * step), []),
        (series(40, critic_score_mean=lambda step: noisy(0.4 if step <= 30 else 0.01, step)), [(32, "score-fall")]),
        (series(40, critic_score_mean=lambda step: noisy(0.4 if step != 30 else 0.01, step)), []),
        (series(99, critic_score_mean=lambda step: noisy(0.4 - 0.004 * step, step)), [(62, "score-fall")]),
        (series(20, actor_kl_loss=lambda step: 0.3 * step), [(12, "kl-drift")]),
        (series(49, actor_kl_loss=lambda step: noisy(0.03 * step, step)), [(38, "kl-drift")]),
        (series(8, actor_ppo_kl=0.15), [(5, "kl-drift")]),
        (series(20, actor_entropy=lambda step: noisy(0.1 if step <= 15 else 1.0, step)), [(17, "entropy-rise")]),
        (series(40, actor_grad_norm=lambda step: exploding(0.3, step)), [(30, "gradient-rise")]),
        (series(40, actor_grad_norm=lambda step: noisy(0.3, step) * (1 + 30 * (step == 20))), []),
        (series(40, actor_grad_norm=lambda step: noisy(0.3, step) * (not 20 < step < 29)), []),
        (series(40, critic_vf_loss=lambda step: exploding(0.1, step)), [(30, "value-loss-rise")]),
        (series(40, response_length_mean=lambda step: 100 + 4 * max(step - 20, 0)), [(34, "length-rise")]),
        (series(12, critic_zero_signal_share=0.95), [(10, "no-signal")]),
        (series(130, critic_score_mean=lambda step: 0.4 + 0.02 * (step % 2) + 0.002 * step), []),
        (series(130, critic_score_mean=lambda step: 0.95 + 0.01 * (step % 2)), []),
    ],
    ids=[
        "healthy", "truncated", "truncated every other step", "constant score", "no advantages",
        "far teacher", "teacher that was near", "out of reach", "within reach", "ever nearer", "no context",
        "hardly a context", "away from the teacher",
        "constant for two steps", "one large update", "one large update downwards",
        "an update that is not finite", "padded embedding",
        "single tokens of a padded embedding", "clipped",
        "away from the reference", "away from the start", "slowly away from the reference", "entropy", "length",
        "repetition", "flat", "leak", "noisy memory", "one large allocation", "a leak that does not matter",
        "score falls at once", "one low score", "score falls slowly", "fast drift", "slow drift",
        "every update moves far", "entropy explodes", "gradient explodes", "one large gradient",
        "some steps without a signal", "critic explodes",
        "length runs away", "hardly a prompt with a signal",
        "slow but rising", "solved",
    ],
)  # fmt: skip
def test_each_series_has_its_code_and_no_other(rows, expected):
    assert begun(rows) == expected


@pytest.mark.parametrize("name", ["actor_entropy", "response_length_mean"])
def test_a_fall_is_no_collapse_while_the_score_rises(name):
    rows = series(20, **{name: lambda step: 1.0 if step <= 10 else 0.02})
    risen = [{**row, "critic/score/mean": 0.4 if step < 10 else 0.9} for step, row in enumerate(rows)]
    assert begun(risen) == []


def test_the_cause_is_reported_and_not_its_consequences():
    dead = {"critic_score_max": 0.0, "critic_score_mean": 0.0}
    assert begun(series(6, response_length_clip_ratio=1.0, **dead)) == [(2, "truncation")]
    after = [{**row, "critic/score/max": 0.0} for row in series(6, actor_ppo_kl=lambda step: 9.2 * (step == 1))]
    assert begun(after) == [(1, "policy-jump")]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.1, 0.3, 0.5, 0.45, 0.39, 0.34, 0.28], [(70, "overfitting")]),
        ([0.1, 0.3, 0.5, 0.47, 0.48, 0.46, 0.47], []),
        ([0.5, 0.53, 0.49, 0.52, 0.47, 0.49, 0.48], []),
    ],
    ids=["falls", "hardly falls", "varies"],
)
def test_validation_that_falls_while_training_rises_is_overfitting(scores, expected):
    rows = series(70, critic_score_mean=lambda step: 0.01 * step)
    for number, score in enumerate(scores, start=1):
        rows[10 * number - 1]["val-core/math/acc/mean@1"] = score
    assert begun(rows) == expected


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.03])
def test_at_most_one_of_a_hundred_validations_that_only_vary_is_overfitting(noise):
    """Noise is what a validation of a policy that stays as it is consists of. One that wanders has become worse."""
    raised = 0
    for seed in range(100):
        draw, history, found = Random(seed), History(), None
        for step in range(1, 201):
            validation = {} if step % 10 else {"val-core/math/acc/mean@1": 0.5 + draw.gauss(0, noise)}
            history.add(step, {"critic/score/mean": 0.4 + draw.gauss(0, 0.02)} | validation)
            found = found or overfitting(history)
        raised += found is not None
    assert raised <= 1


def test_a_validation_without_a_score_of_one_data_source_is_no_fall():
    history = History()
    for step in range(4):
        easy = {} if step % 2 else {"val-core/easy/acc/mean@1": 0.9}
        history.add(step, {"val-core/hard/acc/mean@1": 0.1} | easy)
    assert [(one.step, one.score) for one in history.validations] == [(0, 0.5), (2, 0.5)]


def test_metrics_that_a_run_does_not_have_or_that_are_not_finite_are_no_diagnosis():
    assert begun([{"train/loss": 1.0}] * 120) == []
    assert begun([dict.fromkeys(HEALTHY, float("nan"))] * 120) == []


def test_a_diagnosis_is_reported_when_it_begins_and_when_it_is_over():
    warned, informed = [], []
    monitor = HealthMonitor(warn=lambda *said: warned.append(said), info=informed.append)
    logged = [monitor.judge(step, row) for step, row in enumerate(series(3, response_length_clip_ratio=0.5), start=1)]
    assert logged == [{}, {"health/truncation": 1.0}, {"health/truncation": 1.0}]
    assert warned == [
        (
            "step 2: 50% of the responses are cut off at 180 tokens, before the model ended them; "
            "set data.max_response_length=360, or shape the reward towards shorter responses",
            "truncation",
        )
    ]
    logged = [monitor.judge(step, row) for step, row in enumerate(series(6), start=4)]
    assert [row["health/truncation"] for row in logged] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert informed == ["step 8: truncation of step 2 is over"] and len(warned) == 1


def test_a_resumed_run_reports_nothing_a_second_time():
    rows = dict(enumerate(series(5, response_length_clip_ratio=0.5), start=1))
    warned: list[str] = []
    monitor = HealthMonitor({0: {"val-core/x/acc/mean@1": 0.1}, **rows}, warn=lambda text, code: warned.append(text))
    assert monitor.judge(6, rows[5]) == {"health/truncation": 1.0} and not warned


def test_a_diagnosis_that_began_long_ago_keeps_its_step_in_a_resumed_run():
    logged = {
        step: HEALTHY | {"response_length/clip_ratio": 0.5, "health/truncation": float(step > 1)}
        for step in range(1, 301)
    }
    informed: list[str] = []
    monitor = HealthMonitor(logged, warn=lambda text, code: None, info=informed.append)
    for step in range(301, 306):
        monitor.judge(step, HEALTHY)
    assert informed == ["step 305: truncation of step 2 is over"]


def test_weights_after_a_collapse_are_not_to_be_resumed_from():
    monitor = HealthMonitor(warn=lambda text, code: None)
    monitor.judge(1, HEALTHY | {"response_length/clip_ratio": 0.9})
    monitor.judge(2, HEALTHY | {"response_length/clip_ratio": 0.9})
    assert monitor.active and not monitor.problem()
    monitor.judge(3, HEALTHY | {"actor/ppo_kl": 9.2})
    assert monitor.problem() == "the update changed the log-prob of a sampled token by 9.2 on average"


def test_a_forecast_names_step_and_time_at_which_memory_is_full():
    """99 GiB at step 1 and one less with each step: none is left at step 100, 80 steps of six minutes after step 20."""
    (text,) = warnings_about(series(20, perf_host_memory_free_gb=lambda step: 100.0 - step))
    assert text.startswith(
        "step 20: host memory falls by 1024 MiB per step, 80.0 GiB are left: it is full at step 100, in 8.0 h; "
    )


@pytest.mark.parametrize(
    ("share", "where", "fix"),
    [
        (
            0.9,
            ", most of it in the rollout servers (2.0 to 19.1 GiB), 80.0",
            "set 'trainer.on_diagnosis={memory-full: reb",
        ),
        (0.2, "1024 MiB per step, 80.0 GiB are left", "set trainer.max_restarts=1"),
    ],
)
def test_memory_that_falls_is_reported_with_the_processes_that_took_it(share, where, fix):
    rows = series(20, perf_host_memory_free_gb=lambda step: 100.0 - step)
    rows = [
        row | {"perf/process_memory_gb/train": 4.0, "perf/process_memory_gb/rollout": 2.0 + share * step}
        for step, row in enumerate(rows)
    ]
    assert where in diagnosis(rows) and fix in diagnosis(rows)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"critic/zero_signal_share": 0.7}, "; 70% of the prompts have responses of equal score; raise actor_"),
        ({"response_length/clip_ratio": 0.25}, "; 25% of the responses are cut off; raise data.max_response_length"),
        ({"actor/pg_clipfrac": 0.2}, "; 20% of the tokens are clipped; lower actor_rollout_ref.actor.optim.lr"),
        ({}, "in the last 25; raise actor_rollout_ref.actor.optim.lr or "),
    ],
)
def test_a_flat_score_is_reported_with_what_would_explain_it(measured, words):
    (text,) = warnings_about([row | measured for row in series(50)])
    assert words in text


def test_a_diagnosis_can_end_the_run_or_be_turned_off():
    rows = series(2, response_length_clip_ratio=0.5)
    for action in ("stop", "rollback"):
        monitor = HealthMonitor(warn=lambda text, code: None, actions={"truncation": action})
        for step, row in enumerate(rows, start=1):
            monitor.act()
            monitor.judge(step, row)
        with pytest.raises(Unhealthy, match=f"trainer.on_diagnosis.truncation={action}: 50% of the responses") as error:
            monitor.act()
        assert error.value.rollback == (action == "rollback") == bool(monitor.problem())
    monitor = HealthMonitor(warn=lambda text, code: None, actions={"truncation": "off"})
    assert [monitor.judge(step, row) for step, row in enumerate(rows, start=1)] == [{}, {}]


def test_the_codes_that_can_be_configured_are_those_of_the_rules():
    assert [rule.code for rule in RULES] == list(DIAGNOSES)


def test_the_page_lists_every_code():
    page = (Path(__file__).parents[2] / "docs" / "health.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.M) == [rule.code for rule in RULES]


def walk(draw: Random, start: float, step: float, highest: float = math.inf) -> Iterator[float]:
    """A random walk between 0 and `highest`, where it is reflected."""
    value = start
    while True:
        yield value
        value = abs(value + draw.gauss(0, step))
        value = min(value, 2 * highest - value)


def factors(draw: Random, start: float, step: float) -> Iterator[float]:
    """A random walk of the logarithm."""
    return (start * math.exp(value - 100) for value in walk(draw, 100, step))


WALKS = {
    "score-fall": ("critic/score/mean", walk, 0.4, 0.02, 1),
    "flat-score": ("critic/score/mean", walk, 0.4, 0.01, 1),
    "kl-jump": ("actor/kl_loss", walk, 0.1, 0.05),
    "kl-drift": ("actor/kl_loss", walk, 0.1, 0.05),
    "truncation": ("response_length/clip_ratio", walk, 0.05, 0.003, 1),
    "no-signal": ("critic/zero_signal_share", walk, 0.4, 0.01, 1),
    "clipping": ("actor/pg_clipfrac", walk, 0.02, 0.003, 1),
    "entropy-collapse": ("actor/entropy", walk, 1, 0.03),
    "entropy-rise": ("actor/entropy", walk, 0.3, 0.03),
    "gradient-rise": ("actor/grad_norm", factors, 0.3, 0.1),
    "value-loss-rise": ("critic/vf_loss", factors, 0.3, 0.1),
    "length-collapse": ("response_length/mean", walk, 300, 8),
    "length-rise": ("response_length/mean", walk, 300, 8),
    "repetition": ("response/repeated_ngrams", walk, 0.1, 0.005, 1),
    "teacher-diverges": ("distillation/kl", factors, 0.3, 0.1),
    "memory-full": ("perf/host_memory_free_gb", walk, 50, 0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("code", WALKS)
def test_at_most_one_of_a_hundred_random_walks_of_200_steps_raises_a_rule(code):
    """Of the rule's metric, next to a score that varies around its mean."""
    name, kind, *scale = WALKS[code]
    (rule,) = (rule for rule in RULES if rule.code == code)
    raised = 0
    for seed in range(100):
        draw, history = Random(seed), History()
        for step, value in zip(range(1, 201), kind(draw, *scale), strict=False):
            history.add(step, HEALTHY | {"critic/score/mean": 0.4 + draw.gauss(0, 0.02)} | {name: value})
            if rule.judge(history):
                raised += 1
                break
    assert raised <= 1


@pytest.mark.parametrize(
    ("stop", "fix"),
    [
        ("max_tokens", "raise data.max_response_length, or the max_tokens of an agent's requests"),
        ("max_turn_tokens", "raise actor_rollout_ref.rollout.multi_turn.max_assistant_response_length"),
        ("context_overflow", "lower actor_rollout_ref.rollout.multi_turn.max_tool_response_length, or raise data."),
    ],
)
def test_episodes_that_are_cut_off_are_reported_with_the_limit_that_cuts_most(stop, fix):
    stops = {"stop/completed": 0.5, "stop/max_tokens": 0.01, f"stop/{stop}": 0.4}
    rows = [row | stops for row in series(2, response_length_clip_ratio=0.41)]
    text = diagnosis(rows)
    assert "step 2: 41% of the episodes are cut off by a limit of tokens, 40% by that of " in text and fix in text
    flat = diagnosis([row | stops for row in series(50, response_length_clip_ratio=0.25)])
    assert "25% of the responses are cut off" in flat and fix in flat


@pytest.mark.parametrize(("clipped", "narrower"), [(0.01, True), (0.2, False)])
@pytest.mark.parametrize("change", [{"actor_kl_loss": 7.9}, {"actor_ppo_kl": 0.2}, {"actor_ppo_kl": 0.6}])
def test_a_policy_that_moves_far_with_hardly_a_token_clipped_wants_a_narrower_clip_range(change, clipped, narrower):
    text = diagnosis(series(6, actor_pg_clipfrac=clipped, **change))
    assert ("set actor_rollout_ref.actor.clip_ratio=0.1 and actor_rollout_ref.actor.optim.lr=" in text) == narrower


def test_scores_that_are_all_equal_are_reported_with_the_share_that_could_not_be_read():
    rows = [row | {"reward/unparsed": 0.97} for row in series(3, critic_score_max=0.0, critic_score_mean=0.0)]
    assert "has the score 0, so there is nothing to learn from, and in 97% the reward function found" in diagnosis(rows)


def test_scores_that_have_all_become_the_best_are_no_reason_to_doubt_the_reward():
    rows = series(6, critic_score_min=lambda step: float(step > 3), critic_score_mean=1.0)
    assert "has the score 1, so there is nothing to learn from; use harder data: these prompts are" in diagnosis(rows)


def test_the_kl_coefficient_that_applies_is_named():
    assert "raise actor_rollout_ref.actor.kl_loss_coef, or" in diagnosis(series(1, actor_kl_loss=2.0))
    rows = [HEALTHY | {"actor/reward_kl_penalty": 2.0}]
    assert "raise algorithm.kl_ctrl.kl_coef, or" in diagnosis(rows)


@pytest.mark.parametrize("steps", [1, 10, 50, 100])
@pytest.mark.parametrize("seed", range(3))
def test_a_score_that_varies_as_that_of_256_responses_is_reported_before_its_fall_ends(steps, seed):
    draw = Random(seed)
    rows = series(31 + steps, critic_score_mean=lambda step: 0.4 - 0.39 * min(max((step - 30) / steps, 0), 1))
    noise = [row | {"critic/score/mean": row["critic/score/mean"] + draw.gauss(0, 0.03)} for row in rows]
    assert "score-fall" in [code for step, code in begun([*noise, *noise[-15:]]) if step > 30]


def test_a_single_very_low_score_does_not_hide_a_fall():
    rows = series(40, critic_score_mean=lambda step: noisy(0.4 if step <= 30 else 0.01, step))
    rows[12]["critic/score/min"] = -100.0
    assert begun(rows) == [(32, "score-fall")]


def test_a_score_that_stays_low_after_its_fall_is_reported_once():
    rows = series(60, critic_score_mean=lambda step: min(0.3 + 0.05 * step, 0.9) if step <= 15 else 0.02)
    assert [code for _, code in begun(rows)] == ["score-fall"]


# Metrics of real runs: recipes/quickstart on two cores, with --seed as written; the others with a reward that scores
# only responses without an answer from step 13 on, with 100 times the learning rate, with actor.entropy_coeff=0.3 and
# ten times the learning rate, with a reward of a response's characters and 128 tokens, with one of a sixteenth of the
# answers, with 10 MiB that the engine keeps at every weight sync until it is rebuilt in step 21, and with gae and a
# reward of 30 instead of 1 from step 10 on.
RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("quickstart, seed 2", []),
        ("asynchronous, seed 2", []),
        ("agents, seed 2", []),
        ("reward turns after step 12", [(14, "score-fall"), (21, "no-signal")]),
        (
            "learning rate x 100",
            [(1, "policy-jump"), (8, "truncation"), (15, "repetition"), (16, "length-rise"), (17, "kl-drift")],
        ),
        ("entropy bonus", [(5, "policy-jump"), (7, "truncation"), (12, "score-fall"), (14, "entropy-rise")]),
        ("paid for length", [(8, "truncation"), (21, "length-rise")]),
        ("one prompt in sixteen can be solved", [(10, "no-signal")]),
        ("an engine that leaks", [(20, "memory-full")]),
        ("rewards of a critic become thirty times as large", [(12, "gradient-rise"), (12, "value-loss-rise")]),
    ],
)
def test_recorded_runs_have_the_diagnoses_of_their_faults_and_no_other(run, expected):
    names, columns = RECORDED[run].keys(), RECORDED[run].values()
    assert begun([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]) == expected


@pytest.mark.parametrize("learned", [1, 20])  # solved from the first step, or after twenty
def test_a_solved_task_with_a_few_wrong_responses_has_not_lost_its_score(learned):
    """As with a pretrained model after 164 steps: every response was right, and then one of sixteen was not."""
    score = [min(1.0, (step + 1) / learned) if step < 60 else 0.97 for step in range(63)]
    rows = series(63, critic_score_mean=lambda step: score[step - 1], critic_score_min=lambda step: score[step - 1])
    assert "score-fall" not in [code for _, code in begun(rows)]
    lost = series(63, critic_score_mean=lambda step: score[step - 1] if step <= 60 else 0.4)
    assert "score-fall" in [code for _, code in begun(lost)]
