import asyncio
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridrl.config import ConfigError
from hybridrl.core.batch import Batch
from hybridrl.core.experience.batching import GroupFilter, NoSignal
from hybridrl.core.experience.collector import Collected, NothingToLearnFrom, SamplingPlan, SynchronousExperience
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.responses import ResponseStore
from hybridrl.core.experience.trajectory import Episode
from hybridrl.core.pictures import Picture
from hybridrl.core.rollout import Completion, Request, Sampling, request_seed
from hybridrl.core.rollout.engine import RejectedRequest
from hybridrl.data.order import Curriculum, PromptOrder
from hybridrl.data.prompts import Prompt
from hybridrl.required import required
from hybridrl.rewards.score import FaultGuard, OverlongPenalty, Score, Shaping

SEED = 7
SAMPLING = Sampling(max_tokens=4, stop_ids=(0,), top_p=0.9, top_k=20, min_tokens=1)
GREEDY = 99  # in place of a sample's number


def fault() -> Score:
    return Score(None, fault="timeout", detail="no score within 60 s")


def plain(value: float) -> Score:
    return Score(value, {"acc": value})


class Client:
    """Responds to one request at a time, the last one first; the first tokens are the prompt and the sample."""

    def __init__(self, lengths: dict[tuple[int, int], int] | None = None) -> None:
        self.lengths, self.calls = lengths or {}, []
        self.asked: list[tuple[Request, asyncio.Future[Completion]]] = []

    def generate(self, request, begun=None):
        if not self.asked:
            self.task = asyncio.create_task(self._respond())
        self.asked.append((request, future := asyncio.get_running_loop().create_future()))
        return future

    async def _respond(self) -> None:
        asked, self.asked = self.asked, []
        self.calls.append(([request for request, _ in asked], asked[0][0].sampling))
        for request, future in reversed(asked):
            response = self.response(request)
            future.set_result(response) if isinstance(response, Completion) else future.set_exception(response)
            for _ in range(5):  # the caller takes it
                await asyncio.sleep(0)

    def response(self, request: Request) -> Completion | BaseException:
        row, number = request.prompt_ids[0], GREEDY if request.sampling.temperature == 0 else request.sample
        length = self.lengths.get((row, number), 3)
        tokens = np.array([row, number, *[5] * (length - 2)], dtype=np.int64)
        log_probs = np.full(length, -0.5, dtype=np.float32)
        routes = np.full((len(request.prompt_ids) + length - 1, 1, 2), 10 * row + number, dtype=np.int16)
        return Completion(tokens, log_probs, length == request.sampling.max_tokens, 0, carried={"routes": routes})


class Switch:
    """Records the modes that the devices were switched to."""

    weights = "w"

    def __init__(self) -> None:
        self.modes = []

    def to_rollout(self, version):
        self.modes.append(version)

    def to_training(self):
        self.modes.append("training")


class Scorers:
    """Response `number` to prompt `row` has the score `table[row][number]`, a greedy response `greedy[row]`."""

    per = "response"

    def __init__(self, table, greedy=None) -> None:
        self.table, self.greedy = table, greedy

    def score(self, requests, scored):
        for index, request in enumerate(requests):
            scored(index, self._score(int(request.response_ids[0]), int(request.response_ids[1])))

    def _score(self, row: int, number: int) -> Score:
        score = self.greedy[row] if number == GREEDY else self.table[row][number]
        score = plain(float(score)) if isinstance(score, int | float) else score
        return replace(score, text=f"{row} {number}")


def build(table, *, greedy=None, guard=None, overlong=None, shuffle=False, step=2, **settings) -> SynchronousExperience:
    """An experience with as many prompts and responses as the table has; prompt `row` has the tokens [row, 1, 1]."""
    prompts = [Prompt(row, [row, 1, 1], "?", "maths", "42", {}) for row in range(len(table))]
    return SynchronousExperience(
        Switch(),
        prompts,
        PromptOrder(len(prompts), 0, shuffle),
        EpisodeRunner(Client(), Scorers(table, greedy), SEED, Shaping(overlong=overlong)),
        guard or FaultGuard("exclude", 1.0, 99),
        SamplingPlan(step, len(table[0]), SAMPLING, **settings),
        ResponseStore(),
    )


class Rejecting(Client):
    """Rejects the first response to each prompt."""

    def response(self, request):
        return super().response(request) if request.sample else RejectedRequest("no such token id")


def collect(experience: SynchronousExperience, client: Client | None = None) -> Collected:
    experience.runner.client = client or Client()
    return experience.collect(1)


def positions(collected: Collected) -> list[int]:
    return collected.batch.position.tolist()


FLAT, ZERO, GOOD = [1, 1], [0, 0], [0, 1]  # all correct, all incorrect, with signal


def assert_same(left: Batch, right: Batch) -> None:
    """Both have the same fields with the same values, of the same types."""
    for (name, _, value), (other, _, expected) in zip(left.filled(), right.filled(), strict=True):
        assert name == other and value.dtype == expected.dtype and torch.equal(value, expected), (name, other)


# Without options.


def test_a_step_has_the_next_prompts_with_their_responses_in_order():
    experience = build([[0, 1], [1, 0], [1, 1], [0, 0]])
    collect(experience)
    client = Client({(2, 1): 4})
    collected = collect(experience, client)
    # Those of a row are of its prompt and sample; the engine does not compute its last token.
    experts = [*[20] * 5, -1, *[21] * 6, -1, *[30] * 5, -1, *[31] * 5, -1]
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
        sampled=torch.ones(13, dtype=torch.bool),
        rollout_log_probs=torch.full((13,), -0.5),
        carried={"routes": torch.tensor(experts, dtype=torch.int16).view(-1, 1, 1).expand(-1, 1, 2)},
    )
    assert_same(collected.batch, expected)
    timings, others = {"timing_s/gen", "timing_s/reward"}, {"reward/faults", "reward/acc/mean", "training/epoch"}
    assert set(collected.metrics) == timings | others
    assert experience.position == 4
    [(requests, sampling)] = client.calls
    assert sampling is SAMPLING
    assert [r.seed for r in requests] == [request_seed(SEED, position, n) for position in (2, 3) for n in (0, 1)]


def test_a_step_samples_with_the_weights_of_the_step_before_and_returns_the_devices():
    experience = build([[0, 1], [1, 0]])
    experience.collect(7)
    assert vars(experience.engine)["modes"] == [6, "training"]


def test_the_state_is_the_position_and_the_steps_with_too_many_faults():
    experience = build([[fault(), 1]] * 4, guard=FaultGuard("exclude", 0.1, 99))
    assert experience.problem() == ""
    collect(experience)
    assert experience.state_dict() == {"prompts": 2, "fault_steps": 1}
    assert "too many of the step's responses could not be scored" in experience.problem()
    resumed = build([[fault(), 1]] * 4)
    resumed.load_state_dict({"prompts": 2, "fault_steps": 1, "kl_weight": 0.1})
    assert resumed.state_dict() == experience.state_dict()


def test_a_step_runs_over_into_the_next_epoch():
    experience = build([GOOD] * 3, step=2)
    collected = [collect(experience) for _ in range(3)]
    assert [step.batch.prompt_ids[::6].tolist() for step in collected] == [[0, 1], [2, 0], [1, 2]]
    assert [step.metrics["training/epoch"] for step in collected] == [0, 1, 1]
    assert not experience.finished, "a run without a limit never is"


def test_responses_that_could_not_be_scored_are_not_rows_and_are_counted():
    collected = collect(build([[0, fault()], [fault(), fault()], [1, 0]], step=3))
    assert positions(collected) == [0, 2, 2]
    assert collected.batch.sample.tolist() == [0, 0, 1]
    assert len(collected.samples) == 6
    assert collected.metrics["reward/faults"] == collected.metrics["reward/faults/timeout"] == 3


def test_a_step_without_any_scored_response_reports_why():
    with pytest.raises(NothingToLearnFrom, match=r"4 of 4 responses .*'timeout': 4.*no score within 60 s"):
        collect(build([[fault(), fault()]] * 2))


# Dynamic sampling.


def sampled(table, limit=0, metric="score", draw=None, least=1, **settings) -> SynchronousExperience:
    return build(table, group_filter=GroupFilter(metric, limit, draw, least), **settings)


def drawn(client: Client) -> list[int]:
    """Prompts of each draw."""
    return [len({request.prompt for request in requests}) for requests, _ in client.calls]


def test_groups_without_signal_are_replaced_by_further_prompts_and_what_was_kept_stays():
    experience, client = sampled([FLAT, GOOD, ZERO, GOOD, GOOD, GOOD]), Client()
    collected = collect(experience, client)
    assert experience.position == 4
    assert positions(collected) == [1, 1, 3, 3]
    assert positions(collect(experience)) == [4, 4, 5, 5], "the next step begins after all prompts drawn"
    assert collected.batch.prompt_ids.tolist() == [1, 1, 1, 1, 1, 1, 3, 1, 1, 3, 1, 1]
    assert collected.batch.group.tolist() == [0, 0, 1, 1]
    assert drawn(client) == [2, 2]
    assert [sample.prompt.row for sample in collected.samples] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_refilled_step_reports_its_draws_and_seeds_derive_from_the_prompts_position_in_each():
    client = Client()
    collected = collect(sampled([FLAT, GOOD, ZERO, GOOD]), client)
    seeds = [request.seed for requests, _ in client.calls for request in requests]
    assert seeds == [request_seed(SEED, position, number) for position in range(4) for number in range(2)]
    reported = {name: collected.metrics[name] for name in collected.metrics if name.startswith(("train/", "sampling/"))}
    assert reported == {
        "train/num_gen_batches": 2,
        "sampling/groups_drawn": 4,
        "sampling/groups_without_signal": 2,
        "sampling/groups_left_out": 0,
    }


def test_faults_and_seconds_of_a_step_are_summed_over_its_draws():
    class Slow(EpisodeRunner):
        def run(self, *arguments):
            return super().run(*arguments)[0], {"timing_s/gen": 2.0, "timing_s/reward": 0.5}

    table = [[1, 1, 1], [fault(), 1, 0], [0, 1, fault()], [0, 1, 1]]
    experience = sampled(table)
    experience.runner = Slow(Client(), Scorers(table), SEED)
    collected = collect(experience)
    assert collected.metrics["reward/faults"] == collected.metrics["reward/faults/timeout"] == 2
    assert (collected.metrics["timing_s/gen"], collected.metrics["timing_s/reward"]) == (4.0, 1.0)


def test_a_steps_samples_depend_only_on_the_position():
    table = [[FLAT, GOOD, ZERO][row % 3] for row in range(10)]
    first = sampled(table, shuffle=True)
    collect(first)
    resumed = sampled(table, shuffle=True)
    resumed.position = first.position
    ours, theirs = collect(first).batch, collect(resumed).batch
    assert torch.equal(ours.response_ids, theirs.response_ids)
    assert torch.equal(ours.position, theirs.position)


def test_the_earliest_groups_are_kept_if_there_are_too_many():
    experience = sampled([GOOD, FLAT, GOOD, GOOD, GOOD, GOOD], draw=5)
    collected = collect(experience)
    assert positions(collected) == [0, 0, 2, 2]
    assert experience.position == 5
    assert collected.metrics["sampling/groups_without_signal"] == 1


@pytest.mark.parametrize(
    ("table", "settings", "draws"),
    [
        ([FLAT] * 3 + [GOOD] * 5, {"draw": 3}, [3, 3]),
        ([GOOD] * 3 + [FLAT] * 2 + [GOOD] * 2, {"step": 4}, [4, 2]),  # 3 of 4 kept: 1 is expected within 4 / 3
        ([FLAT] * 4 + [GOOD] * 4, {"step": 4}, [4, 4]),
        ([GOOD] + [FLAT] * 3 + [GOOD] * 9, {"step": 4}, [4, 4]),  # 1 of 4 kept: 3 are expected within 12
        ([GOOD] * 3, {"draw": 5, "prompts_in_all": 3}, [3]),
    ],
    ids=[
        "of the draw size",
        "what will suffice",
        "as a step after none",
        "never more than a step",
        "to the last prompt",
    ],
)
def test_a_draw_has_the_size_that_is_set_or_as_many_prompts_as_will_probably_suffice(table, settings, draws):
    client = Client()
    collected = collect(sampled(table, **settings), client)
    assert drawn(client) == draws
    assert len(set(positions(collected))) == settings.get("step", 2)


def test_a_group_with_a_single_response_left_has_no_signal():
    assert positions(collect(sampled([[0, fault()], GOOD, GOOD]))) == [1, 1, 2, 2]


def test_faults_are_excluded_from_the_group_before_its_signal_is_checked():
    # Prompt 0 has equal responses without its fault; prompt 1 has one response left; prompt 2 is not a group at all.
    table = [[1, 1, fault()], [fault(), fault(), 0], [fault()] * 3, [0, 1, fault()], [0, 1, 1]]
    collected = collect(sampled(table, step=2))
    assert positions(collected) == [3, 3, 4, 4, 4]
    assert collected.metrics["sampling/groups_drawn"] == 4
    assert collected.metrics["sampling/groups_without_signal"] == 2


def test_the_metric_may_be_a_key_of_the_reward():
    def scored(score: float, acc: bool) -> Score:
        return Score(score, {"score": score, "acc": acc})

    table = [[scored(0.2, True), scored(0.7, True)], [scored(0.5, True), scored(0.5, False)]]
    assert positions(collect(sampled(table, metric="acc", step=1))) == [1, 1]
    for name in ("score", "seq_reward", "seq_final_reward"):
        assert positions(collect(sampled(table, metric=name, step=1))) == [0, 0]


def test_the_score_as_metric_is_the_one_after_the_penalty():
    # Lengths 3 and 4 of 4 at most: the second loses all of 0.5, so that the responses differ.
    penalty = OverlongPenalty(4, 1, 0.5, log=False)
    collected = collect(sampled([FLAT, GOOD], step=1, overlong=penalty), Client({(0, 1): 4}))
    assert positions(collected) == [0, 0]
    assert required(collected.batch.rewards).tolist() == [1.0, 0.5]


def test_a_metric_that_the_reward_lacks_is_named_with_the_existing_keys():
    table = [[Score(1.0, {"score": 1.0, "format": 0.5}), Score(0.0, {"score": 0.0, "format": 0.5})]]
    with pytest.raises(ConfigError, match=r"algorithm\.filter_groups\.metric.*\"acc\".*score, format.*return"):
        collect(sampled(table, metric="acc", step=1))


def test_a_fault_that_counts_as_zero_has_that_metric_too():
    guard = FaultGuard("zero", 1.0, 99)
    collected = collect(sampled([[fault(), 0], [fault(), 1]], metric="acc", step=1, guard=guard))
    assert positions(collected) == [1, 1]


def test_at_the_limit_the_run_stops_and_reports_what_had_no_signal():
    table = [GOOD] + [FLAT] * 2 + [ZERO] * 3 + [GOOD] * 4
    with pytest.raises(NoSignal) as stopped:
        collect(sampled(table, limit=2, step=3, metric="acc", least=2))
    message = str(stopped.value)
    assert "1 of 3 groups in 2 draws (algorithm.filter_groups.max_num_gen_batches=2)" in message
    assert "5 of the 6 groups drawn had no signal" in message
    assert "2 with every response at the best acc seen (1), 3 with every response at the worst (0)" in message
    filters = ("raise algorithm.filter_groups.max_num_gen_batches", "algorithm.filter_groups.enable=false")
    assert all(fix in message for fix in ("difficulty", "actor_rollout_ref.rollout.n", *filters))


def test_at_the_limit_a_step_with_a_mini_batch_of_groups_is_trained_on_them(caplog):
    table = [GOOD, FLAT, ZERO, GOOD, FLAT, FLAT, GOOD]
    experience = sampled(table, limit=2, step=3, least=2)
    assert positions(collect(experience)) == [0, 0, 3, 3]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "found 2 of 3 groups in 2 draws" in warning and warning.endswith("This step is trained on the groups found")
    assert experience.position == 6


def test_if_all_responses_score_the_same_only_the_best_is_reported():
    with pytest.raises(NoSignal, match=r"2 of the 2 groups drawn had no signal, 2 with .* the best score seen \(0\);"):
        collect(sampled([ZERO] * 5, limit=1))


def test_a_step_that_is_full_at_the_last_allowed_draw_continues():
    assert positions(collect(sampled([FLAT, GOOD, ZERO, GOOD], limit=2))) == [1, 1, 3, 3]


def test_without_a_limit_a_step_draws_no_more_than_a_pass_over_the_data():
    client = Client()
    with pytest.raises(NoSignal, match=r"in 3 draws \(a pass over the data\): 5 of the 5 groups") as stopped:
        collect(sampled([FLAT] * 5), client)
    assert drawn(client) == [2, 2, 1]
    assert "max_num_gen_batches" not in str(stopped.value)


def test_each_further_draw_is_a_line_in_the_log(caplog):
    caplog.set_level(logging.INFO, logger="hybridrl.core.experience.batching")
    collect(sampled([FLAT, GOOD, ZERO, ZERO, GOOD, GOOD]))
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
    collect(sampled([FLAT, GOOD, ZERO, GOOD], guard=Watching("exclude", 1.0, 99)))
    assert seen == [[1, 1, 0, 1, 0, 0, 0, 1]]


def test_a_further_draw_without_any_score_does_not_end_the_run():
    table = [FLAT, GOOD, [fault(), fault()], [fault(), fault()], GOOD]
    assert positions(collect(sampled(table))) == [1, 1, 4, 4]


# ReMax.


def test_every_row_has_the_score_of_its_prompts_greedy_response():
    client = Client()
    collected = collect(build([[0, 1], [1, 0]], greedy=[0.25, 0.75], greedy_baseline=True), client)
    assert required(collected.batch.greedy_rewards).tolist() == [0.25, 0.25, 0.75, 0.75]
    assert required(collected.batch.rewards).tolist() == [0, 1, 1, 0]
    assert collected.metrics["timing_s/gen_max"] >= 0
    requests, sampling = client.calls[1]
    assert [(request.prompt_ids[0], request.sample) for request in requests] == [(0, 0), (1, 0)]
    assert sampling == Sampling(max_tokens=4, stop_ids=(0,), temperature=0.0, top_p=1.0, top_k=-1, min_tokens=1)
    assert len(collected.samples) == 4


def test_a_prompt_whose_greedy_response_has_no_score_is_left_out():
    collected = collect(build([GOOD, GOOD], greedy=[fault(), 1], greedy_baseline=True))
    assert positions(collected) == [1, 1]
    assert required(collected.batch.greedy_rewards).tolist() == [1, 1]
    assert collected.metrics["reward/faults"] == collected.metrics["reward/faults/timeout"] == 1


def test_without_any_greedy_score_there_is_nothing_to_learn_from():
    with pytest.raises(NothingToLearnFrom, match="2 of 2 responses"):
        collect(build([GOOD, GOOD], greedy=[fault(), fault()], greedy_baseline=True))


def test_only_the_groups_of_the_batch_get_greedy_responses():
    client = Client()
    experience = sampled([FLAT, GOOD, GOOD, GOOD], draw=4, greedy=[9, 0.5, 1, 9], greedy_baseline=True)
    collected = collect(experience, client)
    assert [request.prompt_ids[0] for request in client.calls[-1][0]] == [1, 2]
    assert required(collected.batch.greedy_rewards).tolist() == [0.5, 0.5, 1, 1]


# Reward components, and truncated responses.


def in_parts(score: float, **parts: object) -> Score:
    return Score(score, {"score": score, **parts})


def test_the_reward_components_are_columns_in_the_order_named():
    table = [[in_parts(1.5, acc=True, form=0.5), in_parts(0.0, acc=False, form=0)]]
    collected = collect(build(table, step=1, reward_keys=("form", "acc")))
    assert required(collected.batch.reward_parts).dtype == torch.float32
    assert required(collected.batch.reward_parts).tolist() == [[0.5, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("parts", "message"),
    [({}, "gave nothing"), ({"form": "fine"}, "gave 'fine'"), ({"form": float("nan")}, "gave nan")],
)
def test_a_component_that_is_not_a_number_is_named_with_the_existing_keys(parts, message):
    table = [[in_parts(1.0, acc=1, form=1), in_parts(1.0, acc=1, **parts)]]
    with pytest.raises(ConfigError, match=rf'algorithm\.gdpo_reward_keys: the reward {message} under "form".* acc'):
        collect(build(table, step=1, reward_keys=("acc", "form")))


def test_the_components_of_a_fault_that_counts_as_zero_are_zero():
    guard = FaultGuard("zero", 1.0, 99)
    collected = collect(build([[in_parts(1.0, acc=1), fault()]], step=1, guard=guard, reward_keys=("acc",)))
    assert required(collected.batch.reward_parts).tolist() == [[1.0], [0.0]]


def test_truncated_responses_are_not_trained_on_but_stay_in_their_group():
    collected = collect(build([GOOD, GOOD], mask_truncated=True), Client({(0, 1): 4, (1, 0): 2}))
    assert required(collected.batch.response_mask).tolist() == [True] * 3 + [False] * 4 + [True] * 5
    assert required(collected.batch.rewards).tolist() == [0, 1, 0, 1]
    assert collected.metrics["sampling/masked_truncated"] == 1


def test_a_step_of_only_truncated_responses_names_the_fixes():
    every = {(row, number): 4 for row in range(2) for number in range(2)}
    with pytest.raises(NothingToLearnFrom, match=r"4 responses.*data\.max_response_length.*algorithm\.mask_truncated"):
        collect(build([GOOD, GOOD], mask_truncated=True), Client(every))


# The end of a run by epochs.


def test_the_last_step_draws_what_is_left_and_then_the_run_is_finished():
    experience = build([GOOD] * 5, prompts_in_all=5)
    sizes = []
    while not experience.finished:
        sizes.append(len(collect(experience).batch))
    assert sizes == [4, 4, 2]
    assert experience.position == 5


def test_a_last_step_that_cannot_be_filled_trains_on_what_it_has():
    experience, client = sampled([GOOD, GOOD, GOOD, FLAT, FLAT], limit=9, step=3, prompts_in_all=5), Client()
    collect(experience)
    assert experience.position == 3
    experience = sampled([GOOD, GOOD, FLAT, FLAT, GOOD], limit=9, step=2, prompts_in_all=5)
    collect(experience)
    assert positions(collect(experience, client)) == [4, 4]
    assert drawn(client) == [2, 1]
    assert experience.finished


def test_the_last_prompts_without_any_signal_are_an_error():
    experience = sampled([GOOD, GOOD, FLAT], limit=9, prompts_in_all=3)
    collect(experience)
    with pytest.raises(NoSignal, match=r"0 of 1 groups in 1 draws \(the last prompts of the run\): 1 of the 1 groups"):
        collect(experience)


# Rewards per token.


# Curriculum.


def by_rates(experience: SynchronousExperience, size: int, kind: str = "easy_first") -> SynchronousExperience:
    experience.order = Curriculum(kind, size, 0, shuffle=False)
    return experience


def test_prompts_that_were_dropped_without_signal_have_rates_too_and_faults_have_none():
    table = [ZERO, [0, 1], [fault(), fault()], [1, fault()], FLAT, [1, 0]]
    experience = by_rates(sampled(table, step=2), 6)
    collect(experience)
    assert experience.position == 6
    assert experience.order.rates["now"].tolist() == [0, 0.5, 0.5, 1, 1, 0.5]
    assert experience.order.rows(6, 6) == [3, 4, 1, 2, 5, 0]


def test_an_epoch_that_begins_within_a_step_has_the_rates_before_it_and_the_last_partial_step_counts():
    experience, steps = by_rates(build([ZERO, [1, 1], [0, 1]], step=2, prompts_in_all=7), 3), []
    while not experience.finished:
        steps.append(collect(experience))
    rows = [list(dict.fromkeys(step.batch.prompt_ids[::3].tolist())) for step in steps]
    # The second step begins the second epoch with the rates of rows 0 and 1 alone; the fourth step has one prompt.
    assert rows == [[0, 1], [2, 1], [2, 0], [1]]
    assert [step.metrics["data/curriculum_rate"] for step in steps] == [0.5, 0.75, 0.25, 1.0]


def test_a_killed_run_with_a_curriculum_samples_what_it_would_have():
    table = [[0, row % 2, 1, row % 3 == 0] for row in range(7)]
    whole, killed = (by_rates(build(table, step=3), 7, "medium") for _ in range(2))
    for number in range(9):
        if number == 4:
            state = killed.state_dict()
            killed = by_rates(build(table, step=3), 7, "medium")
            killed.load_state_dict(state)
        actual, expected = collect(killed), collect(whole)
        assert_same(actual.batch, expected.batch)
        assert actual.metrics["data/curriculum_rate"] == expected.metrics["data/curriculum_rate"]
        assert killed.state_dict() == whole.state_dict()


def test_token_rewards_are_carried_and_other_scores_are_on_the_last_token():
    own = Score(0.75, {"score": 0.75}, token_rewards=[0.25, 0.0, 0.5])
    batch = collect(build([[own, 1]], step=1), Client({(0, 1): 2})).batch
    assert required(batch.rewards).tolist() == [0.75, 1.0]
    assert required(batch.token_rewards).tolist() == [0.25, 0.0, 0.5, 0.0, 1.0]


def test_another_number_of_rewards_than_tokens_is_a_fault_of_the_grader():
    scores = [Score(0.5, token_rewards=[0.5, 0.0, 0.0]), Score(0.5, token_rewards=[0.5, 0.0])]
    collected = collect(build([scores], step=1))
    assert [sample.score.fault for sample in collected.samples] == [None, "type"]
    assert "2 token_rewards for a response of 3 tokens" in collected.samples[1].score.detail


class RecordingScorers(Scorers):
    """Records its calls."""

    def __init__(self, table, per="response") -> None:
        super().__init__(table)
        self.per, self.calls = per, []

    def score(self, requests, scored):
        self.calls.append(requests)
        super().score(requests, scored)


CALLS = {
    "response": [[[1, 1, 5]], [[1, 0, 5]], [[0, 1, 5]], [[0, 0, 5]]],  # as they finish
    "group": [[[1, 0, 5], [1, 1, 5]], [[0, 0, 5], [0, 1, 5]]],
    "step": [[[0, 0, 5], [0, 1, 5], [1, 0, 5], [1, 1, 5]]],
}


@pytest.mark.parametrize("per", CALLS)
def test_responses_are_scored_as_they_finish_or_together_and_in_order(per):
    scorers = RecordingScorers([[0, 1], [1, 0]], per)
    prompts = [Prompt(row, [row, 1, 1], "?", "maths", "42", {}) for row in range(2)]
    samples, _ = EpisodeRunner(Client(), scorers, SEED).run(prompts, 2, SAMPLING, [0, 1])
    ids = [[[int(token) for token in request.response_ids] for request in requests] for requests in scorers.calls]
    assert ids == CALLS[per]
    assert [(sample.score.value, sample.text) for sample in samples] == [(0, "0 0"), (1, "0 1"), (1, "1 0"), (0, "1 1")]


# Responses near the length limit.


def test_the_penalty_is_subtracted_from_every_score_and_reported_in_its_extras():
    penalty = OverlongPenalty(4, 2, 1.0, log=True)
    collected = collect(build([[1, fault()]], step=1, overlong=penalty))
    assert required(collected.batch.rewards).tolist() == [0.5]
    assert collected.samples[0].score.extras == {"acc": 1, "overlong_reward": -0.5, "overlong": True}
    assert collected.samples[1].score == replace(fault(), text="0 1")


def test_sampled_tokens_that_no_tokenizer_has_are_counted():
    assert collect(build([GOOD, GOOD], vocabulary=5)).metrics["sampling/unknown_tokens"] == 4  # a 5 in each response
    assert "sampling/unknown_tokens" not in collect(build([GOOD, GOOD], vocabulary=6)).metrics


def test_a_response_whose_request_is_rejected_is_excluded_and_counted():
    collected = collect(build([[1, 0, 1], [0, 1, 0]]), Rejecting())
    assert collected.metrics["reward/faults/rejected"] == collected.metrics["reward/faults"] == 2
    assert positions(collected) == [0, 0, 1, 1]
    assert required(collected.batch.rewards).tolist() == [0.0, 1.0, 1.0, 0.0]


def test_the_key_of_an_episode_is_its_stream_position_and_sample():
    prompts = [Prompt(row, [row, 1], "?", "maths", "42", {}) for row in range(2)]
    runner = EpisodeRunner(Client(), Scorers([[1, 0], [0, 1]]), SEED)
    for stream, positions in (("", [7, 9]), ("validation", [0, 1])):
        episodes, _ = runner.run(prompts, 2, SAMPLING, positions, stream=stream)
        assert [one.key for one in episodes] == [
            (stream, position, sample) for position in positions for sample in (0, 1)
        ]


# A reward model, whose scores come once the trainers have the devices.


def rated(episodes: list[Episode]) -> list[Episode]:
    """Add 10 to every score; a response without one, as no function has scored it, has 10."""
    scores = [replace(one.score, value=10 + (one.score.value or 0), fault=None) for one in episodes]
    return [replace(one, score=score) for one, score in zip(episodes, scores, strict=True)]


def test_a_reward_model_scores_on_the_trainers_devices_before_the_batch_is_made():
    experience, modes = build([[0, 1], [1, 0]], guard=FaultGuard("stop", 0.0, 1)), []

    def rate(episodes: list[Episode]) -> list[Episode]:
        modes.extend(vars(experience.engine)["modes"])
        return rated(episodes)

    experience.rate = rate
    collected = collect(experience)
    assert modes == [0, "training"]
    assert required(collected.batch.rewards).tolist() == [10.0, 11.0, 11.0, 10.0]
    assert [one.score.value for one in collected.samples] == [10.0, 11.0, 11.0, 10.0]


def test_responses_without_a_function_are_faults_only_if_the_reward_model_gives_no_score_either():
    none = Score(None, fault="none", detail="returned None")
    experience = build([[none, none], [none, none]], guard=FaultGuard("stop", 0.0, 1))
    experience.rate = rated
    assert required(collect(experience).batch.rewards).tolist() == [10.0] * 4
    too_long = Score(None, fault="reward_model:length", detail="the conversation has 99 tokens")
    experience = build([[0, 1], [1, 0]])
    experience.rate = lambda episodes: [rated(episodes)[0], *(replace(one, score=too_long) for one in episodes[1:])]
    collected = collect(experience)
    assert positions(collected) == [0] and collected.metrics["reward/faults/reward_model:length"] == 3
    experience = build([[0, 1], [1, 0]], guard=FaultGuard("exclude", 0.5, 1))
    experience.rate = lambda episodes: [replace(one, score=too_long) for one in episodes]
    with pytest.raises(NothingToLearnFrom, match="the conversation has 99 tokens"):
        collect(experience)


# Pictures.


def test_a_prompt_whose_pictures_cannot_be_read_is_a_fault_that_costs_no_other():
    experience = build([[0, 1], [1, 0], [0, 1]], step=3)
    experience.prompts[1] = replace(experience.prompts[1], fault="row 2: there is no file 'a.png'")
    client = Client()
    collected = collect(experience, client)
    assert positions(collected) == [0, 0, 2, 2] and required(collected.batch.rewards).tolist() == [0.0, 1.0, 0.0, 1.0]
    assert collected.metrics["reward/faults/picture"] == 2
    assert collected.samples[2].score.detail == "row 2: there is no file 'a.png'"
    assert [request.prompt_ids[0] for request in client.calls[0][0]] == [0, 0, 2, 2]


def test_a_step_in_which_no_picture_can_be_read_says_so():
    experience = build([[0, 1], [1, 0]])
    experience.prompts = [replace(prompt, fault="row 1: there is no file") for prompt in experience.prompts]
    with pytest.raises(NothingToLearnFrom, match="there is no file"):
        collect(experience)


def test_pictures_are_read_in_the_order_of_the_step_and_then_those_of_the_next():
    experience, asked = build([GOOD] * 5, step=2), []
    experience.read_ahead = lambda rows, limit: asked.append((list(rows), limit))
    for _ in range(3):
        collect(experience)
    whole, ahead = float("inf"), 2**30
    # The third step runs over into the next epoch, whose order may depend on this step.
    expected = [[0, 1], [2, 3], [2, 3], [4], [4, 0], [1, 2]]
    assert asked == [(rows, ahead if number % 2 else whole) for number, rows in enumerate(expected)]


def test_a_step_reports_how_long_it_waited_for_pictures():
    experience = build([GOOD] * 2)
    assert "timing_s/pictures" not in collect(experience).metrics
    experience.prompts = [replace(prompt, pictures=(Picture(1, 1, {}),)) for prompt in experience.prompts]
    metrics = collect(experience).metrics
    assert 0 <= metrics["timing_s/pictures"] < 1
    assert metrics["pictures/per_prompt"] == 1.0
