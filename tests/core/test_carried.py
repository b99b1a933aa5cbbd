"""Fields that travel, declared by another distribution: an engine returns one, which a custom loss and an estimator
read, and prompts have items with places."""

import asyncio
import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from hybridrl import plugins
from hybridrl.agents.endpoint.sessions import Session
from hybridrl.agents.environments.dialogue import Delta, Dialogue
from hybridrl.agents.environments.episode_loop import EpisodeRun, EpisodeTools
from hybridrl.checkpoint.saver import read_arrays, write_arrays
from hybridrl.config import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.algorithm import find_estimator, find_policy_loss
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.batch import Batch
from hybridrl.core.carried import Encoded, Fields, declared, superseded
from hybridrl.core.experience.batching import to_batch
from hybridrl.core.experience.collector import SynchronousExperience
from hybridrl.core.experience.responses import ResponseStore
from hybridrl.core.experience.trajectory import Episode, Trajectory, Turn
from hybridrl.core.rollout import Completion, Request, Sampling
from hybridrl.core.training.losses import policy_loss
from hybridrl.core.training.token_outputs import TokenOutputs
from hybridrl.data.prompts import Prompt, load_prompts
from hybridrl.required import required
from hybridrl.rewards.score import Score
from hybridrl.runs.trials import try_estimator, try_policy_loss
from tests.agents.environments import conftest as environments
from tests.agents.environments.test_episode_loop import LIMITS, QUESTION, Echo, Policy
from tests.core.experience.test_collector import Client
from tests.core.experience.test_responses import Dying, Killed, experience, spool
from tests.core.training.test_worker_group import Ranks, workers_of
from tests.sections import section_of

ENTRIES = """[hybridrl.plugins]
carried.doubt = carried_of_others:DOUBT
carried.mark = carried_of_others:MARK
carried.place = carried_of_others:PLACE
carried.marks = carried_of_others:MARKS
"""
FIELDS = """
from hybridrl.core.carried import Carried

DOUBT = Carried("response", join="concatenate", absent=-1.0)
MARK = Carried("items", "marks", join="concatenate", identity=True, filled_by="prompt")
PLACE = Carried("items", "marks", join="places", filled_by="prompt")
MARKS = Carried("row", filled_by="prompt")
"""
ALGORITHMS = """
def weighted(log_probs, rows):
    doubt = rows.carried["doubt"]
    return -log_probs * rows.advantages * doubt, {"doubt": doubt}

def least(rows):
    doubt = rows.carried["doubt"]
    return rows.token_rewards - doubt, rows.token_rewards

def wrong(log_probs, rows):
    return -log_probs, {}

weighted.reads = least.reads = ("doubt",)
wrong.reads = ("doubts",)
"""
tokenizer, tokenizer_of = environments.tokenizer, environments.tokenizer_of

GIVEN = {"mark": np.array([40]), "place": np.array([1])}
LATER = {"mark": np.array([41, 42]), "place": np.array([0, 1])}


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """Install a distribution with carried fields, and return a file of algorithms."""
    about = tmp_path / "site" / "carried_of_others-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: carried_of_others\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    (about.parent / "carried_of_others.py").write_text(FIELDS)
    (tmp_path / "algorithms.py").write_text(ALGORITHMS)
    monkeypatch.syspath_prepend(str(about.parent))
    monkeypatch.delitem(sys.modules, "carried_of_others", raising=False)
    for cached in (plugins.installed, declared):
        cached.cache_clear()
    yield tmp_path / "algorithms.py"
    monkeypatch.undo()
    for cached in (plugins.installed, declared):
        cached.cache_clear()


def sampled(tokens: list[int], **carried: np.ndarray) -> Completion:
    return Completion(np.array(tokens), np.full(len(tokens), -0.5, np.float32), False, 0, carried=carried)


def as_lists(carried: Fields) -> dict[str, list]:
    return {name: value.tolist() for name, value in carried.items()}


def turn(observed: list[int], completion: Completion, **carried: np.ndarray) -> Turn:
    return Turn.of(Encoded(observed, carried), completion)


def batch_of(*turns: list[Turn]) -> Batch:
    """One episode for each list of turns, of one prompt, with the rewards 1, 2, ..."""
    prompt = Prompt(0, [1, 2, 3], "?", "", "", {})
    rewards = enumerate(map(float, range(1, len(turns) + 1)))
    episodes = [Episode(prompt, 0, n, Trajectory(turns[n]), "", Score(reward)) for n, reward in rewards]
    return to_batch([episodes])


def with_doubt() -> Batch:
    """Responses of 2, 1 and 2 sampled tokens; the second has no doubt, and the third is of two turns."""
    first = turn([1, 2, 3], sampled([7, 8], doubt=np.array([0.5, 0.25])))
    third = [
        turn([1, 2, 3], sampled([7], doubt=np.array([2.0]))),
        turn([4], sampled([9], doubt=np.array([4.0]))),
    ]
    return batch_of([first], [turn([1, 2, 3], sampled([7]))], third)


def with_marks() -> Batch:
    """A row of two turns with three marks, and one without any."""
    turns = [turn([1, 2, 3], sampled([7, 8]), **GIVEN), turn([4, 5], sampled([9]), **LATER)]
    return batch_of(turns, [turn([1, 2, 3], sampled([7]))])


def test_a_name_that_is_not_declared_is_an_error_which_lists_those_that_are(distribution):
    unknown = Trajectory([turn([1], sampled([7], doubts=np.zeros(1)))])
    with pytest.raises(
        ValueError,
        match=r"no carried field is named 'doubts'; declared are .*routes, pictures, .*, doubt, mark, place",
    ):
        _ = unknown.rows()[0].carried
    with pytest.raises(
        ConfigError, match=r"wrong: its attribute reads names 'doubts'.*routes, pictures, .*, doubt, mark"
    ):
        find_policy_loss(f"{distribution}:wrong")
    with pytest.raises(ValueError, match="carried field values: a batch has another field"):
        replace(with_doubt(), carried={"values": torch.zeros(3)})


def test_values_of_sampled_tokens_are_concatenated_and_absent_elsewhere(distribution):
    batch = with_doubt()
    assert batch.carried["doubt"].tolist() == [0.5, 0.25, -1.0, 2.0, -1.0, 4.0]
    assert batch.select([2, 0]).carried["doubt"].tolist() == [2.0, -1.0, 4.0, 0.5, 0.25]
    assert batch.select([]).carried["doubt"].tolist() == []
    assert batch_of([turn([1, 2, 3], sampled([7]))]).carried == {}


def test_a_response_in_two_parts_has_the_values_of_both(distribution):
    whole = sampled([7, 8], doubt=np.array([0.5, 0.25])).then(sampled([9])).then(sampled([5], doubt=np.array([3.0])))
    assert whole.carried["doubt"].tolist() == [0.5, 0.25, -1.0, 3.0]
    assert turn([1], whole).without_last(3).carried["doubt"].tolist() == [0.5]


def test_a_custom_loss_is_sent_what_it_reads(distribution):
    class Recording(Ranks):
        def share(self, batch: Batch) -> Batch:
            self.sent = batch
            return batch

    ranks = Recording(([{"pg_loss": 1.0}], None))
    workers = workers_of(ranks, policy_loss=f"{distribution}:weighted")
    batch = replace(with_doubt(), advantages=torch.tensor([1.0, 1.0, 2.0, 3.0, 0.0, 3.0]))
    batch = replace(batch, old_log_probs=batch.rollout_log_probs)
    workers.update_mini_batches(batch, [[0, 1, 2]], workers.policy.loss, step=1)
    assert ranks.sent.carried.keys() == {"doubt"} and ranks.sent.rewards is None
    outputs = TokenOutputs(torch.tensor([-1.0, -2.0, -1.0, -1.0, -9.0, -0.5]), *[None] * 3)
    loss, shares = policy_loss(outputs, ranks.sent, Divisors(5, 3), workers.policy.loss)
    # 0.5 + 2 * 0.25 - 2 + 3 * 2 + 0.5 * 3 * 4 over the five tokens that the policy wrote; the mean doubt of these.
    assert float(loss) == pytest.approx(11.0 / 5)
    assert float(shares["doubt"]) == pytest.approx(5.75 / 5)
    plain = workers_of(ranks)
    plain.update_mini_batches(batch, [[0, 1, 2]], plain.policy.loss, step=1)
    assert ranks.sent.carried == {}


def test_a_custom_estimator_gets_what_it_reads(distribution):
    entry, function = find_estimator(f"{distribution}:least")
    batch, _ = Algorithm(function, entry).advantages(with_doubt())
    assert required(batch.advantages).tolist() == [-0.5, 0.75, 3.0, -2.0, 1.0, -1.0]


def test_both_are_tried_before_a_run_with_rows_that_have_no_value(distribution):
    advantages, *_ = try_estimator(f"{distribution}:least", find_estimator(f"{distribution}:least")[1], 1, 0)
    assert advantages.tolist() == [1.0, 1.0, 2.0, 1.0]
    per_token, _ = try_policy_loss(f"{distribution}:weighted", {})
    assert len(per_token) == 9


def test_items_of_turns_are_those_of_their_row_with_places_that_count_its_tokens(distribution):
    batch = with_marks()
    # The second turn begins after three tokens of the prompt and two that were sampled.
    assert batch.carried["mark"].tolist() == [40, 41, 42] and batch.carried["place"].tolist() == [1, 5, 6]
    assert batch.carried["marks"].tolist() == [3, 0]
    swapped = batch.select([1, 0, 1])
    assert (swapped.carried["marks"].tolist(), swapped.carried["place"].tolist()) == ([0, 3, 0], [1, 5, 6])
    assert batch.select([1]).carried["mark"].tolist() == []
    assert batch.only("mark").carried.keys() == {"mark", "marks"}


def test_a_batch_has_the_same_fields_in_another_process_and_as_a_tensordict(distribution):
    batch = with_marks()
    content = batch.to_tensordict()
    assert [row.tolist() for row in content["place"].unbind()] == [[1, 5, 6], []]
    for other in (pickle.loads(pickle.dumps(batch)), Batch.from_tensordict(content)):
        assert other.carried.keys() == batch.carried.keys()
        assert all(torch.equal(value, batch.carried[name]) for name, value in other.carried.items())


def test_a_later_turn_replaces_what_is_of_the_whole_row_only(distribution):
    routes = {"routes": np.zeros((3, 1, 1), np.int16)}
    assert superseded({**GIVEN, **routes}, routes).keys() == GIVEN.keys()
    assert superseded(routes, LATER).keys() == routes.keys()


def test_rows_bring_fields_in_columns_of_their_names(distribution, tokenizer, tmp_path):
    def loaded(**columns: object) -> list[Prompt]:
        row = {"prompt": QUESTION, "reward_model": {"ground_truth": "7"}}
        lines = [row | {f"carried.{name}": value for name, value in columns.items()}, row]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
        options = {"max_samples": -1, "shuffle": False, "key": "data.train_files"}
        config = section_of(DataConfig, "data", train_batch_size=2)
        return [*load_prompts([str(tmp_path / "rows.jsonl")], config, tokenizer, **options)]

    first, second = loaded(mark=[40], place=[1])
    assert as_lists(first.carried) == {"mark": [40], "place": [1]}
    assert second.carried == {}
    with pytest.raises(
        ConfigError,
        match=r"no carried field is named 'marc'; declared are .*routes, pictures, .*, doubt, mark",
    ):
        loaded(marc=[40])
    for name, value in (("mark", "x"), ("mark", 3), ("mark", [[1], [2, 3]]), ("doubt", [0.5])):
        with pytest.raises(ConfigError, match=r"rows.jsonl.*(carried\.|inhomogeneous)"):
            loaded(**{name: value})


def test_what_a_row_brings_reaches_the_engine_and_the_batch_also_where_responses_were_spooled(distribution, tmp_path):
    def marked(client: Client) -> SynchronousExperience:
        built = experience(spool(tmp_path), client=client)
        built.prompts = [replace(prompt, carried=GIVEN) for prompt in built.prompts]
        return built

    with pytest.raises(Killed):
        marked(Dying(4)).collect(1)
    client = Client()
    batch = marked(client).collect(1).batch
    [(requests, _)] = client.calls
    assert [as_lists(request.carried) for request in requests] == [as_lists(GIVEN)] * 2  # the others were spooled
    fields = {name: batch.carried[name].tolist() for name in ("mark", "place", "marks")}
    assert fields == {"mark": [40] * 6, "place": [1] * 6, "marks": [1] * 6}
    assert len(batch.carried["routes"]) == int(batch.lengths.sum())


class Marking(Dialogue):
    """Its first messages have one mark, on the second token, and each delta has two, on its first two tokens."""

    def start(self, *arguments, **options) -> Encoded:
        return replace(super().start(*arguments, **options), carried=GIVEN)

    def delta(self, *arguments, **options) -> Delta:
        return replace(super().delta(*arguments, **options), carried=LATER)


def kit_of(tokenizer, kind: type[Dialogue]) -> EpisodeTools:
    kit = EpisodeTools.of(tokenizer, [tokenizer.eos_token_id], LIMITS, format="hermes")
    return replace(kit, dialogue=kind(tokenizer, [tokenizer.eos_token_id]))


@pytest.mark.parametrize(("kind", "brought"), [(Marking, {}), (Dialogue, GIVEN)])
def test_the_policy_of_an_environment_gets_the_fields_of_the_whole_context(distribution, tokenizer, kind, brought):
    class Recording(Policy):
        seen: ClassVar[list[Encoded]] = []

        async def generate(self, prompt: Encoded, **options) -> Completion:
            self.seen.append(replace(prompt, ids=[*prompt.ids]))
            completion = await super().generate(prompt, **options)
            return replace(completion, carried={"doubt": np.full(len(completion.token_ids), 0.5)})

    policy = Recording(tokenizer, ["7", "stop"])
    episode = EpisodeRun(kit_of(tokenizer, kind), policy, Echo({}, {}), carried=brought)
    trajectory = asyncio.run(episode.run(QUESTION))
    first, second = policy.seen[-2:]
    assert as_lists(first.carried) == {"mark": [40], "place": [1]}
    after = len(first.ids) + len(trajectory.turns[0].sampled)
    marks = {"mark": [40, 41, 42], "place": [1, after, after + 1]} if kind is Marking else as_lists(GIVEN)
    assert as_lists(second.carried) == marks
    (row,) = trajectory.rows()
    assert {name: value.tolist() for name, value in row.carried.items() if name != "doubt"} == marks
    assert row.carried["doubt"].tolist() == [0.5 if sampled else -1.0 for sampled in row.mask]


def test_branches_of_a_session_have_the_fields_of_their_prompts(distribution, tokenizer):
    session = Session(kit_of(tokenizer, Marking))
    messages, prompts, first = [QUESTION[0]], [], {}
    for said in ("7", "left", "right"):
        prompts.append(session.prompt_for(messages))
        response = {"role": "assistant", "content": said}
        session.record(prompts[-1], sampled([*tokenizer(said)["input_ids"], tokenizer.eos_token_id]), response)
        first = response if said == "7" else first
        messages = [QUESTION[0], first, {"role": "user", "content": said}]
    after = len(prompts[0].ids) + len(session.turns[0].completion.token_ids)
    marks = {"mark": [40, 41, 42], "place": [1, after, after + 1]}
    assert [as_lists(prompt.carried) for prompt in prompts] == [as_lists(GIVEN), marks, marks]
    assert [as_lists(row.carried) for row in session.trajectory().rows()] == [marks, marks]


def test_prompts_that_differ_in_a_field_with_identity_are_different(distribution, tmp_path):
    store, kept = ResponseStore(tmp_path / "spool"), ResponseStore(carries=True)
    request = Request(0, 0, [1, 2], 7, Sampling(3, (0,)), carried=GIVEN)
    for one in (store, kept):
        one.open(1, "w")
        one.add(request, sampled([7]))
    again = ResponseStore(tmp_path / "spool")
    again.open(1, "w")
    others = [{}, {**GIVEN, "mark": np.array([41])}, {**GIVEN, "mark": np.array([40], np.int32)}]
    for one in (again, kept):
        assert one.find(request) is not None
        assert one.find(replace(request, carried={**GIVEN, "place": np.array([0])})) is not None
        assert [one.find(replace(request, carried=other)) for other in others] == [None] * 3


def test_spool_and_checkpoint_have_the_fields_of_a_response(distribution, tmp_path):
    requests = [Request(0, sample, [1, 2], sample, Sampling(3, (0,))) for sample in (0, 1, 2)]
    completions = [sampled([7], **GIVEN), sampled([8]), sampled([9, 5], **LATER, doubt=np.array([0.5, 0.25]))]
    first, second = ResponseStore(tmp_path / "spool"), ResponseStore(tmp_path / "spool")
    kept, loaded = ResponseStore(carries=True), ResponseStore(carries=True)
    first.open(1, "w")
    for request, completion in zip(requests, completions, strict=True):
        first.add(request, completion)
        kept.add(request, completion)
    second.open(1, "w")
    state = json.loads(json.dumps(write_arrays(tmp_path, kept.state_dict([]))))
    loaded.load_state_dict({**state, **read_arrays(tmp_path)})
    for store in (second, loaded):
        for request, completion in zip(requests, completions, strict=True):
            found = required(store.find(request)).completion.carried
            assert found.keys() == completion.carried.keys()
            for name, value in completion.carried.items():
                assert np.array_equal(found[name], value) and found[name].dtype == value.dtype


def test_a_distribution_that_is_installed_and_not_named_is_not_loaded(distribution):
    batch = batch_of([turn([1, 2, 3], sampled([7]))], [turn([1, 2, 3], sampled([7, 8]))])
    entry, function = find_estimator("grpo")
    Algorithm(lambda rows: function(rows, norm_adv_by_std_in_grpo=True), entry).advantages(batch)
    find_policy_loss("vanilla")
    assert batch.carried == {} and "carried_of_others" not in sys.modules
