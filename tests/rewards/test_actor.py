import os
import pickle
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hybridrl.config import ConfigError
from hybridrl.core.cluster import RaySession, WorkerDied
from hybridrl.core.cluster.failures import Cause
from hybridrl.data.tokenizer import ResponseDecoder
from hybridrl.rewards.actors import DecodingScorer, RemoteScorer, open_scorer_pool, unpacked
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.process import CallerScorer
from hybridrl.rewards.score import Score, ScoringRequest
from tests.rewards.test_pool import OBEDIENT, exists, results, values, wait_until

WORDS = ["<end>", "loop", "exit", "fine", "four", "two", "<tag>", "kill"]
SHOWS = """
import os
def compute_score(solution_str, ground_truth, response_ids=None):
    return {"score": float(ground_truth), "text": solution_str, "ids": response_ids, "home": os.environ.get("MY_KEY")}
"""
WRITTEN = """
def compute_score(extra_info):
    return {"score": 1.0, "found": str({name: extra_info[name] for name in ("index", "written")})}
"""


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}))
    tokenizer.decoder = Fuse()
    special = {"eos_token": "<end>", "extra_special_tokens": ["<tag>"]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    return path


def load_decoder(path: Path) -> ResponseDecoder:
    return ResponseDecoder(PreTrainedTokenizerFast.from_pretrained(path), [0])


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    """Two groups of devices on this machine, as if they were on two."""
    session = RaySession("cpu", 2, 1, {}, 60)
    session.nodes = ["one", "another"]
    yield session
    session.close()


def encoded(*texts: str) -> list[ScoringRequest]:
    """Return one request per text, as token ids with the end token; the n-th one's score is n."""
    ids = [[WORDS.index(text), 0] for text in texts]
    return [ScoringRequest("test", None, str(position), {}, tokens) for position, tokens in enumerate(ids)]


def test_a_decoding_scorer_returns_the_text_with_the_score(reward_config, tokenizer_path):
    scorer = DecodingScorer(CallerScorer(reward_config(SHOWS), ()), load_decoder(tokenizer_path))
    assert scorer.start() is True
    first, second = scorer.score([*encoded("four"), ScoringRequest("test", "as text", "1", {})])
    assert (first.text, first.extras["text"], first.extras["ids"]) == ("four", "four", [4.0, 0.0])
    assert (second.text, second.extras["text"], second.extras["ids"]) == (None, "as text", None)


def test_what_the_policy_wrote_is_decoded_a_turn_per_line(reward_config, tokenizer_path):
    scorer = DecodingScorer(CallerScorer(reward_config(WRITTEN), ()), load_decoder(tokenizer_path))
    turns = [[WORDS.index(text), 0] for text in ("four", "<tag>")]
    (score,) = scorer.score([ScoringRequest("test", "all", "1", {"written_ids": turns, "index": 3})])
    assert score.extras["found"] == "{'index': 3, 'written': 'four\\n<tag>'}"


def test_scoring_in_the_caller_needs_no_actor(reward_config, tokenizer_path, tmp_path):
    load = partial(load_decoder, tokenizer_path)
    with open_scorer_pool(None, reward_config(OBEDIENT, num_workers=0), tmp_path, (), load) as pool:
        assert results(pool.submit(encoded("fine")))[0].text == "fine"


@pytest.mark.slow
def test_actors_on_every_machine_score_with_the_limits_of_a_local_process(
    session, reward_config, tokenizer_path, tmp_path, monkeypatch
):
    """One pool proves it all, since actors take seconds to start."""
    monkeypatch.setenv("MY_KEY", "from the driver")
    load = partial(load_decoder, tokenizer_path)
    config = reward_config(OBEDIENT, num_workers=3, timeout=1)
    with open_scorer_pool(session, config, tmp_path, (), load) as pool:
        pool.wait_until_loaded()
        assert not pool.takes_tokens
        scores: list[Score] = [future.result(60) for future in pool.submit(encoded(*["fine"] * 200))]
        assert values(scores) == list(range(200)) and {score.text for score in scores} == {"fine"}
        processes = {int(score.extras["pid"]) for score in scores}
        assert len(processes) == 3 and os.getpid() not in processes

        scores = [future.result(60) for future in pool.submit(encoded("fine", "loop", "exit", "fine"))]
        assert values(scores) == [0, None, None, 3]
        assert [score.fault for score in scores] == [None, "timeout", "died", None]
        assert [score.text for score in scores] == ["fine", "loop", "exit", "fine"]

        texts = ["kill" if number == 5 else "fine" for number in range(12)]
        scores = [future.result(300) for future in pool.submit(encoded(*texts))]  # its actor dies with it
        assert values(scores) == [*range(5), None, *range(6, 12)]
        assert scores[5].fault == "died" and "died twice while" in scores[5].detail

        scores = [future.result(60) for future in pool.submit(encoded(*["fine"] * 50))]
        actor = parent(int(scores[0].extras["pid"]))
        os.kill(actor, signal.SIGKILL)  # Ray starts another one, which starts its processes
        scores = [future.result(60) for future in pool.submit(encoded(*["fine"] * 50))]
        assert values(scores) == list(range(50)), {score.detail for score in scores}
        left = {int(score.extras["pid"]) for score in scores}
        hung = pool.submit(encoded("loop"))
    assert hung[0].result(10).fault == "died"
    assert wait_until(lambda: not any(exists(pid) for pid in left | processes), 10)
    logs = {"reward.log", "reward-1.log", "scoring-0.log", "scoring-1.log"}
    assert {path.name for path in tmp_path.glob("*.log")} == logs

    config = reward_config(SHOWS, num_workers=1)
    with open_scorer_pool(session, config, tmp_path, (), load) as pool:
        (score,) = [future.result(60) for future in pool.submit(encoded("two"))]
        assert pool.takes_tokens and score.extras["ids"] == [5.0, 0.0]
        assert score.extras["home"] == "from the driver"

    source = f"import os\nif os.getppid() != {os.getpid()}: raise OSError('no licence')\ndef compute_score(): ..."
    config = reward_config(source)
    with pytest.raises(ConfigError, match="OSError: no licence"):
        open_scorer_pool(session, config, tmp_path, (), load).wait_until_loaded()


class Machine:
    """Stands in for a ReplacedActor, which is lost during calls with one of the `fatal` texts."""

    def __init__(self, *fatal: str) -> None:
        self.fatal, self.lost, self.calls, self.stop = fatal, WorkerDied("lost"), [], lambda: None

    def call(self, method: str, index: int, content: bytes = b"", *, alone: bool = False, **limits: object):
        texts = [request.solution for request in unpacked(content)] if method == "score" else []
        self.calls.append((method, alone, len(texts)))
        if set(texts) & set(self.fatal):
            self.lost.cause = Cause("scorer", "RayActorError", "it ended without a message")
            return None
        return False if method == "start" else pickle.dumps(([Score(float(text)) for text in texts], None))


@pytest.fixture
def scored(reward_config):
    """Scores `count` responses, of which the machine dies of some; also returns its calls."""

    def run(count: int, *fatal: str, manager: str = "naive") -> tuple[list[Score], list[tuple[str, bool, int]]]:
        config = reward_config("def compute_score(): ...", manager=manager)
        with ScorerPool(config, scorers=[RemoteScorer(machine := Machine(*fatal), 0, config)]) as pool:
            return results(pool.submit([ScoringRequest("", str(n), None, {}) for n in range(count)])), machine.calls

    return run


def test_the_response_of_which_the_supervisor_dies_is_found_alone_and_the_others_keep_their_scores(scored):
    scores, calls = scored(32, "3", "4")
    assert values(scores) == [0, 1, 2, None, None, *range(5, 32)]
    assert "ended without a message" in scores[3].detail
    assert all(method == "start" or alone for method, alone, _ in calls[2:8])  # until both are found
    assert max(count for _, alone, count in calls if not alone) > 1  # what follows runs together again
    assert len(calls) < 40


def test_one_call_for_all_responses_is_not_divided_and_a_second_death_is_a_fault_of_all(scored):
    scores, calls = scored(4, "1", manager="batch")
    assert [score.fault for score in scores] == ["died"] * 4
    assert [call for call in calls if call[0] == "score"] == [("score", False, 4), ("score", True, 4)]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
