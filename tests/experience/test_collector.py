import logging
from concurrent.futures import Future
from dataclasses import fields

import numpy as np
import pytest
import torch

from hybridrl.batch import Batch
from hybridrl.config import ConfigError
from hybridrl.data.order import PromptOrder
from hybridrl.data.prompts import Prompt
from hybridrl.experience.collector import Collected, Experience, NothingToLearnFrom
from hybridrl.experience.dynamic_sampling import GroupFilter, NoSignal
from hybridrl.experience.episodes import Respondent
from hybridrl.rewards.faults import FaultGuard
from hybridrl.rewards.score import Score
from hybridrl.rewards.shaping import OverlongPenalty, Shaping
from hybridrl.rollout import Completion, Sampling, request_seed

SEED = 7
SAMPLING = Sampling(max_tokens=4, stop_ids=(0,), top_p=0.9, top_k=20, min_tokens=1)
GREEDY = "greedy"


def fault() -> Score:
    return Score(None, fault="timeout", detail="no score within 60 s")


def plain(value: float) -> Score:
    return Score(value, {"acc": value})


class Pool:
    """Answers one at a time, the last request first. The first token tells the prompt, the second the sample."""

    def __init__(self, lengths: dict[tuple[int, int], int] | None = None) -> None:
        self.lengths, self.asked = lengths or {}, []

    def generate(self, requests, sampling):
        self.asked.append((list(requests), sampling))
        for request in reversed(requests):
            row, number = request.prompt_ids[0], 99 if sampling.temperature == 0 else request.sample
            length = self.lengths.get((row, number), 3)
            tokens = np.array([row, number, *[5] * (length - 2)], dtype=np.int64)
            log_probs = np.full(length, -0.5, dtype=np.float32)
            cut = length == sampling.max_tokens
            yield [Completion(request.prompt, request.sample, tokens, log_probs, truncated=cut)]


class Tokenizer:
    def batch_decode(self, rows, skip_special_tokens):
        return [f"{row[0]} {GREEDY if row[1] == 99 else row[1]}" for row in rows]


class Scorers:
    """The score of answer `number` to prompt `row` is `table[row][number]`; a greedy answer's is `greedy[row]`."""

    in_one_call = takes_tokens = False

    def __init__(self, table, greedy=None) -> None:
        self.table, self.greedy = table, greedy

    def submit(self, answers):
        return [self._score(*answer.solution.split()) for answer in answers]

    def _score(self, row: str, number: str) -> Future:
        score = self.greedy[int(row)] if number == GREEDY else self.table[int(row)][int(number)]
        future = Future()
        future.set_result(plain(float(score)) if isinstance(score, int | float) else score)
        return future


def build(table, *, greedy=None, guard=None, overlong=None, shuffle=False, step=2, **settings) -> Experience:
    """An experience of as many prompts and answers as the table has; prompt `row` is the tokens [row, 1, 1]."""
    prompts = [Prompt(row, [row, 1, 1], "?", "maths", "42", {}) for row in range(len(table))]
    return Experience(
        prompts,
        PromptOrder(len(prompts), 0, shuffle),
        Respondent(Tokenizer(), Scorers(table, greedy), SEED, Shaping(overlong=overlong)),
        guard or FaultGuard("exclude", 1.0, 99),
        prompts_per_step=step,
        samples_per_prompt=len(table[0]),
        sampling=SAMPLING,
        **settings,
    )


def positions(collected: Collected) -> list[int]:
    return collected.batch.position.tolist()


FLAT, ZERO, GOOD = [1, 1], [0, 0], [0, 1]  # all right, all wrong, with signal


# Without anything switched on.


def test_a_step_is_the_next_prompts_with_their_answers_in_order():
    experience = build([[0, 1], [1, 0], [1, 1], [0, 0]])
    experience.collect(Pool())
    pool = Pool({(2, 1): 4})
    found = experience.collect(pool)
    expected = Batch(
        prompt_lengths=torch.tensor([3, 3, 3, 3]),
        response_lengths=torch.tensor([3, 4, 3, 3]),
        prompt_ids=torch.tensor([2, 1, 1, 2, 1, 1, 3, 1, 1, 3, 1, 1], dtype=torch.int32),
        response_ids=torch.tensor([2, 0, 5, 2, 1, 5, 5, 3, 0, 5, 3, 1, 5], dtype=torch.int32),
        group=torch.tensor([0, 0, 1, 1]),
        position=torch.tensor([2, 2, 3, 3]),
        sample=torch.tensor([0, 1, 0, 1]),
        rewards=torch.tensor([1.0, 1.0, 0.0, 0.0]),
        truncated=torch.tensor([False, True, False, False]),
        response_mask=torch.ones(13, dtype=torch.bool),
        rollout_log_probs=torch.full((13,), -0.5),
    )
    for name in (item.name for item in fields(Batch)):
        wanted, value = vars(expected)[name], vars(found.batch)[name]
        assert (value is None) == (wanted is None), name
        assert wanted is None or (value.dtype == wanted.dtype and torch.equal(value, wanted)), name
    assert set(found.metrics) == {
        "timing_s/gen",
        "timing_s/reward",
        "reward/faults",
        "reward/acc/mean",
        "training/epoch",
    }
    assert experience.position == 4
    [(requests, sampling)] = pool.asked
    assert sampling is SAMPLING
    assert [r.seed for r in requests] == [request_seed(SEED, position, n) for position in (2, 3) for n in (0, 1)]


def test_a_step_runs_over_into_the_next_epoch():
    experience = build([GOOD] * 3, step=2)
    found = [experience.collect(Pool()) for _ in range(3)]
    assert [step.batch.prompt_ids[::6].tolist() for step in found] == [[0, 1], [2, 0], [1, 2]]
    assert [step.metrics["training/epoch"] for step in found] == [0, 1, 1]


def test_answers_that_could_not_be_scored_are_no_rows_and_are_counted():
    found = build([[0, fault()], [fault(), fault()], [1, 0]], step=3).collect(Pool())
    assert positions(found) == [0, 2, 2]
    assert found.batch.sample.tolist() == [0, 0, 1]
    assert len(found.samples) == 6
    assert found.metrics["reward/faults"] == found.metrics["reward/faults/timeout"] == 3


def test_a_step_none_of_whose_answers_could_be_scored_says_why():
    with pytest.raises(NothingToLearnFrom, match=r"none of the 4 answers .*'timeout': 4.*no score within 60 s"):
        build([[fault(), fault()]] * 2).collect(Pool())


# Dynamic sampling.


def sampled(table, limit=0, metric="score", **settings) -> Experience:
    draw = settings.pop("draw", None)
    return build(table, group_filter=GroupFilter(metric, limit, draw), **settings)


def drawn(pool: Pool) -> list[int]:
    """Prompts of each draw."""
    return [len({request.prompt for request in requests}) for requests, _ in pool.asked]


def test_groups_without_signal_are_replaced_by_further_prompts_and_what_was_kept_stays():
    experience, pool = sampled([FLAT, GOOD, ZERO, GOOD, GOOD]), Pool()
    found = experience.collect(pool)
    assert positions(found) == [1, 1, 3, 3]
    assert found.batch.prompt_ids.tolist() == [1, 1, 1, 1, 1, 1, 3, 1, 1, 3, 1, 1]
    assert found.batch.group.tolist() == [0, 0, 1, 1]
    assert drawn(pool) == [2, 2]
    assert experience.position == 4
    assert [sample.prompt.row for sample in found.samples] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_a_refilled_step_did_is_told():
    found = sampled([FLAT, GOOD, ZERO, GOOD]).collect(Pool())
    told = {name: found.metrics[name] for name in found.metrics if name.startswith(("train/", "sampling/"))}
    assert told == {
        "train/num_gen_batches": 2,
        "sampling/groups_drawn": 4,
        "sampling/groups_without_signal": 2,
        "sampling/groups_left_out": 0,
    }


def test_faults_and_seconds_of_a_step_are_summed_over_its_draws():
    class Slow(Respondent):
        def respond(self, *asked):
            return super().respond(*asked)[0], {"timing_s/gen": 2.0, "timing_s/reward": 0.5}

    table = [[1, 1, 1], [fault(), 1, 0], [0, 1, fault()], [0, 1, 1]]
    experience = sampled(table)
    experience.respondent = Slow(Tokenizer(), Scorers(table), SEED)
    found = experience.collect(Pool())
    assert found.metrics["reward/faults"] == found.metrics["reward/faults/timeout"] == 2
    assert (found.metrics["timing_s/gen"], found.metrics["timing_s/reward"]) == (4.0, 1.0)


def test_the_next_step_begins_after_all_prompts_drawn():
    experience = sampled([FLAT, GOOD, GOOD, GOOD, GOOD, GOOD])
    assert positions(experience.collect(Pool())) == [1, 1, 2, 2]
    assert positions(experience.collect(Pool())) == [4, 4, 5, 5]


def test_seeds_derive_from_the_prompts_position_in_every_draw():
    pool = Pool()
    sampled([FLAT, GOOD, ZERO, GOOD]).collect(pool)
    seeds = [request.seed for requests, _ in pool.asked for request in requests]
    assert seeds == [request_seed(SEED, position, number) for position in range(4) for number in range(2)]


def test_a_steps_samples_are_a_function_of_the_position_alone():
    table = [[FLAT, GOOD, ZERO][row % 3] for row in range(10)]
    first = sampled(table, shuffle=True)
    first.collect(Pool())
    resumed = sampled(table, shuffle=True)
    resumed.position = first.position
    ours, theirs = first.collect(Pool()).batch, resumed.collect(Pool()).batch
    assert torch.equal(ours.response_ids, theirs.response_ids)
    assert torch.equal(ours.position, theirs.position)


def test_the_earliest_drawn_stay_where_there_are_too_many():
    experience = sampled([GOOD, FLAT, GOOD, GOOD, GOOD, GOOD], draw=5)
    found = experience.collect(Pool())
    assert positions(found) == [0, 0, 2, 2]
    assert experience.position == 5
    assert found.metrics["sampling/groups_without_signal"] == 1


def test_with_a_draw_size_every_draw_has_it():
    pool = Pool()
    sampled([FLAT, FLAT, FLAT, GOOD, GOOD, GOOD, GOOD, GOOD], draw=3).collect(pool)
    assert drawn(pool) == [3, 3]


def test_a_further_draw_has_as_many_prompts_as_will_probably_do():
    # 3 of 4 kept: the 1 missing is expected within 4 / 3, so 2; none kept: as many as a step has.
    pool = Pool()
    sampled([GOOD, GOOD, GOOD, FLAT, FLAT, GOOD, GOOD], step=4).collect(pool)
    assert drawn(pool) == [4, 2]
    pool = Pool()
    sampled([FLAT] * 4 + [GOOD] * 4, step=4).collect(pool)
    assert drawn(pool) == [4, 4]


def test_a_further_draw_is_never_larger_than_a_step():
    # 1 of 4 kept: the 3 missing are expected within 12.
    pool = Pool()
    sampled([GOOD, FLAT, FLAT, FLAT] + [GOOD] * 9, step=4).collect(pool)
    assert drawn(pool) == [4, 4]


def test_a_group_of_which_one_answer_is_left_has_no_signal():
    assert positions(sampled([[0, fault()], GOOD, GOOD]).collect(Pool())) == [1, 1, 2, 2]


def test_faults_are_left_out_of_the_group_before_it_is_judged():
    # Prompt 0 has equal answers once its fault is out; prompt 1 has one answer left; prompt 2 is no group at all.
    table = [[1, 1, fault()], [fault(), fault(), 0], [fault()] * 3, [0, 1, fault()], [0, 1, 1]]
    found = sampled(table, step=2).collect(Pool())
    assert positions(found) == [3, 3, 4, 4, 4]
    assert found.metrics["sampling/groups_drawn"] == 4
    assert found.metrics["sampling/groups_without_signal"] == 2


def test_the_metric_may_be_a_key_of_the_reward():
    def judged(score: float, acc: bool) -> Score:
        return Score(score, {"score": score, "acc": acc})

    table = [[judged(0.2, True), judged(0.7, True)], [judged(0.5, True), judged(0.5, False)]]
    assert positions(sampled(table, metric="acc", step=1).collect(Pool())) == [1, 1]
    for name in ("score", "seq_reward", "seq_final_reward"):
        assert positions(sampled(table, metric=name, step=1).collect(Pool())) == [0, 0]


def test_the_score_as_metric_is_the_one_after_the_penalty():
    # Lengths 3 and 4 of 4 at most: the second loses the whole of 0.5, so that the answers differ.
    penalty = OverlongPenalty(4, 1, 0.5, log=False)
    found = sampled([FLAT, GOOD], step=1, overlong=penalty).collect(Pool({(0, 1): 4}))
    assert positions(found) == [0, 0]
    assert found.batch.rewards.tolist() == [1.0, 0.5]


def test_a_metric_that_the_reward_lacks_is_named_with_the_keys_there_are():
    table = [[Score(1.0, {"score": 1.0, "format": 0.5}), Score(0.0, {"score": 0.0, "format": 0.5})]]
    with pytest.raises(ConfigError, match=r"algorithm\.filter_groups\.metric.*\"acc\".*score, format.*return"):
        sampled(table, metric="acc", step=1).collect(Pool())


def test_a_fault_that_counts_as_zero_has_that_metric_too():
    guard = FaultGuard("zero", 1.0, 99)
    found = sampled([[fault(), 0], [fault(), 1]], metric="acc", step=1, guard=guard).collect(Pool())
    assert positions(found) == [1, 1]


def test_at_the_limit_the_run_stops_and_says_what_had_no_signal():
    table = [GOOD] + [FLAT] * 2 + [ZERO] * 3 + [GOOD] * 4
    with pytest.raises(NoSignal) as stopped:
        sampled(table, limit=2, step=3, metric="acc").collect(Pool())
    said = str(stopped.value)
    assert "1 of 3 groups in 2 draws (algorithm.filter_groups.max_num_gen_batches=2)" in said
    assert "5 of the 6 groups drawn had no signal" in said
    assert "2 with every answer at the best acc seen (1), 3 with every answer at the worst (0)" in said
    for way_out in (
        "difficulty",
        "actor_rollout_ref.rollout.n",
        "raise algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.enable=false",
    ):
        assert way_out in said


def test_where_all_answers_score_the_same_no_best_and_worst_are_told_apart():
    with pytest.raises(NoSignal, match=r"2 of the 2 groups drawn had no signal, 2 with .* the best score seen \(0\);"):
        sampled([ZERO] * 5, limit=1).collect(Pool())


def test_a_step_that_is_full_at_the_last_draw_allowed_goes_on():
    assert positions(sampled([FLAT, GOOD, ZERO, GOOD], limit=2).collect(Pool())) == [1, 1, 3, 3]


def test_without_a_limit_a_step_draws_no_more_than_a_pass_over_the_data():
    pool = Pool()
    with pytest.raises(NoSignal, match=r"in 3 draws \(a pass over the data\): 5 of the 5 groups") as stopped:
        sampled([FLAT] * 5).collect(pool)
    assert drawn(pool) == [2, 2, 1]
    assert "max_num_gen_batches" not in str(stopped.value)


def test_each_further_draw_is_a_line_in_the_log(caplog):
    caplog.set_level(logging.INFO, logger="hybridrl.experience.dynamic_sampling")
    sampled([FLAT, GOOD, ZERO, ZERO, GOOD, GOOD]).collect(Pool())
    assert caplog.messages == [
        "dynamic sampling: 1 of 2 groups after 2 prompts; drawing 2 more",
        "dynamic sampling: 1 of 2 groups after 4 prompts; drawing 2 more",
    ]


def test_the_guard_counts_a_steps_scores_once_over_all_its_draws():
    class Watching(FaultGuard):
        def check(self, scores):
            seen.append([score.value for score in scores])
            return super().check(scores)

    seen = []
    sampled([FLAT, GOOD, ZERO, GOOD], guard=Watching("exclude", 1.0, 99)).collect(Pool())
    assert seen == [[1, 1, 0, 1, 0, 0, 0, 1]]


def test_a_further_draw_without_any_score_does_not_end_the_run():
    table = [FLAT, GOOD, [fault(), fault()], [fault(), fault()], GOOD]
    assert positions(sampled(table).collect(Pool())) == [1, 1, 4, 4]


# ReMax.


def test_every_row_has_the_score_of_its_prompts_greedy_answer():
    pool = Pool()
    found = build([[0, 1], [1, 0]], greedy=[0.25, 0.75], greedy_baseline=True).collect(pool)
    assert found.batch.greedy_rewards.tolist() == [0.25, 0.25, 0.75, 0.75]
    assert found.batch.rewards.tolist() == [0, 1, 1, 0]
    assert found.metrics["timing_s/gen_max"] >= 0
    requests, sampling = pool.asked[1]
    assert [(request.prompt_ids[0], request.sample) for request in requests] == [(0, 0), (1, 0)]
    assert sampling == Sampling(max_tokens=4, stop_ids=(0,), temperature=0.0, top_p=1.0, top_k=-1, min_tokens=1)
    assert len(found.samples) == 4


def test_a_prompt_whose_greedy_answer_has_no_score_is_left_out_as_a_whole():
    found = build([GOOD, GOOD], greedy=[fault(), 1], greedy_baseline=True).collect(Pool())
    assert positions(found) == [1, 1]
    assert found.batch.greedy_rewards.tolist() == [1, 1]
    assert found.metrics["reward/faults"] == found.metrics["reward/faults/timeout"] == 1


def test_without_any_greedy_score_there_is_nothing_to_learn_from():
    with pytest.raises(NothingToLearnFrom, match="none of the 2 answers"):
        build([GOOD, GOOD], greedy=[fault(), fault()], greedy_baseline=True).collect(Pool())


def test_only_the_groups_of_the_batch_are_answered_greedily():
    pool = Pool()
    experience = sampled([FLAT, GOOD, GOOD, GOOD], draw=4, greedy=[9, 0.5, 1, 9], greedy_baseline=True)
    found = experience.collect(pool)
    assert [request.prompt_ids[0] for request in pool.asked[-1][0]] == [1, 2]
    assert found.batch.greedy_rewards.tolist() == [0.5, 0.5, 1, 1]


def test_faults_of_greedy_answers_count_among_the_steps():
    experience = build([[0, 1]] * 2, greedy=[fault(), 1], greedy_baseline=True)
    assert experience.collect(Pool()).metrics["reward/faults"] == 1


# Parts of the reward, and answers that were cut.


def in_parts(score: float, **parts: object) -> Score:
    return Score(score, {"score": score, **parts})


def test_the_parts_of_the_reward_are_columns_in_the_order_named():
    table = [[in_parts(1.5, acc=True, form=0.5), in_parts(0.0, acc=False, form=0)]]
    found = build(table, step=1, reward_keys=("form", "acc")).collect(Pool())
    assert found.batch.reward_parts.dtype == torch.float32
    assert found.batch.reward_parts.tolist() == [[0.5, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("parts", "said"),
    [({}, "gave nothing"), ({"form": "fine"}, "gave 'fine'"), ({"form": float("nan")}, "gave nan")],
)
def test_a_part_that_is_no_number_is_named_with_the_keys_there_are(parts, said):
    table = [[in_parts(1.0, acc=1, form=1), in_parts(1.0, acc=1, **parts)]]
    with pytest.raises(ConfigError, match=rf'algorithm\.gdpo_reward_keys: the reward {said} under "form".* acc'):
        build(table, step=1, reward_keys=("acc", "form")).collect(Pool())


def test_the_parts_of_a_fault_that_counts_as_zero_are_zero():
    guard = FaultGuard("zero", 1.0, 99)
    found = build([[in_parts(1.0, acc=1), fault()]], step=1, guard=guard, reward_keys=("acc",)).collect(Pool())
    assert found.batch.reward_parts.tolist() == [[1.0], [0.0]]


def test_cut_answers_are_not_learnt_from_but_stay_in_their_group():
    found = build([GOOD, GOOD], mask_truncated=True).collect(Pool({(0, 1): 4, (1, 0): 2}))
    assert found.batch.response_mask.tolist() == [True] * 3 + [False] * 4 + [True] * 5
    assert found.batch.rewards.tolist() == [0, 1, 0, 1]
    assert found.metrics["sampling/masked_truncated"] == 1


def test_a_step_of_cut_answers_only_names_the_ways_out():
    every = {(row, number): 4 for row in range(2) for number in range(2)}
    with pytest.raises(NothingToLearnFrom, match=r"4 answers.*data\.max_response_length.*algorithm\.mask_truncated"):
        build([GOOD, GOOD], mask_truncated=True).collect(Pool(every))


# The end of a run by epochs.


def test_the_last_step_draws_what_is_left_and_then_the_run_is_finished():
    experience = build([GOOD] * 5, prompts_in_all=5)
    sizes = []
    while not experience.finished:
        sizes.append(len(experience.collect(Pool()).batch))
    assert sizes == [4, 4, 2]
    assert experience.position == 5


def test_a_run_without_end_is_never_finished():
    experience = build([GOOD] * 2)
    experience.collect(Pool())
    assert not experience.finished


def test_a_last_step_that_cannot_be_filled_trains_on_what_it_has():
    experience, pool = sampled([GOOD, GOOD, GOOD, FLAT, FLAT], limit=9, step=3, prompts_in_all=5), Pool()
    experience.collect(Pool())
    assert experience.position == 3
    experience = sampled([GOOD, GOOD, FLAT, FLAT, GOOD], limit=9, step=2, prompts_in_all=5)
    experience.collect(Pool())
    assert positions(experience.collect(pool)) == [4, 4]
    assert drawn(pool) == [2, 1]
    assert experience.finished


def test_a_draw_never_goes_beyond_the_last_prompt_of_the_run():
    experience, pool = sampled([GOOD] * 3, draw=5, prompts_in_all=3), Pool()
    assert positions(experience.collect(pool)) == [0, 0, 1, 1]
    assert drawn(pool) == [3]


def test_the_last_prompts_without_any_signal_are_an_error():
    experience = sampled([GOOD, GOOD, FLAT], limit=9, prompts_in_all=3)
    experience.collect(Pool())
    with pytest.raises(NoSignal, match=r"0 of 1 groups in 1 draws \(the last prompts of the run\): 1 of the 1 groups"):
        experience.collect(Pool())


# Rewards token by token.


def test_a_reward_of_tokens_is_carried_beside_those_of_the_last_token_alone():
    own = Score(0.75, {"score": 0.75}, token_rewards=[0.25, 0.0, 0.5])
    batch = build([[own, 1]], step=1).collect(Pool({(0, 1): 2})).batch
    assert batch.rewards.tolist() == [0.75, 1.0]
    assert batch.token_rewards.tolist() == [0.25, 0.0, 0.5, 0.0, 1.0]


def test_without_any_there_is_no_such_field():
    assert build([[0, 1]], step=1).collect(Pool()).batch.token_rewards is None


def test_as_many_rewards_as_tokens_or_the_grader_is_at_fault():
    scores = [Score(0.5, token_rewards=[0.5, 0.0, 0.0]), Score(0.5, token_rewards=[0.5, 0.0])]
    found = build([scores], step=1).collect(Pool())
    assert [sample.score.fault for sample in found.samples] == [None, "type"]
    assert "2 token_rewards for an answer of 3 tokens" in found.samples[1].score.detail


class Listening(Scorers):
    """Keeps what it was asked, and asks for tokens or for one call."""

    def __init__(self, table, *, takes_tokens=False, in_one_call=False) -> None:
        super().__init__(table)
        self.takes_tokens, self.in_one_call, self.asked = takes_tokens, in_one_call, []

    def submit(self, answers):
        self.asked.append(answers)
        return super().submit(answers)


@pytest.mark.parametrize("takes_tokens", [True, False])
def test_tokens_go_to_the_reward_that_asks_for_them(takes_tokens):
    scorers = Listening([[0, 1]], takes_tokens=takes_tokens)
    prompts = [Prompt(0, [0, 1, 1], "?", "maths", "42", {})]
    Respondent(Tokenizer(), scorers, SEED).respond(Pool(), prompts, 2, SAMPLING, [0])
    wanted = [[0, 1, 5], [0, 0, 5]] if takes_tokens else [None, None]
    assert [answer.response_ids for [answer] in scorers.asked] == wanted


def test_in_one_call_all_answers_are_asked_for_together_and_in_order():
    scorers = Listening([[0, 1], [1, 0]], in_one_call=True)
    prompts = [Prompt(row, [row, 1, 1], "?", "maths", "42", {}) for row in range(2)]
    samples, _ = Respondent(Tokenizer(), scorers, SEED).respond(Pool(), prompts, 2, SAMPLING, [0, 1])
    assert [[answer.solution for answer in answers] for answers in scorers.asked] == [["0 0", "0 1", "1 0", "1 1"]]
    assert [sample.score.value for sample in samples] == [0, 1, 1, 0]


# Answers near the length limit.


def test_the_penalty_is_taken_off_every_score_and_told_among_its_values():
    penalty = OverlongPenalty(4, 2, 1.0, log=True)
    found = build([[1, fault()]], step=1, overlong=penalty).collect(Pool())
    assert found.batch.rewards.tolist() == [0.5]
    assert found.samples[0].score.extras == {"acc": 1, "overlong_reward": -0.5, "overlong": True}
    assert found.samples[1].score == fault()
