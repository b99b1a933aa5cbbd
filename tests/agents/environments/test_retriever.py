"""The local retriever: BM25's order and scores, and its protocol."""

import json
import math
import re
import threading
import urllib.error
import urllib.request
from collections import Counter

import pytest

from hybridrl.agents.environments.built_in.tools import Searcher
from hybridrl.environments.retriever import Index, read_passages, serve

TEXTS = [
    "Paris\nParis is the capital of France. France!",
    "Rome\nThe capital of Italy is Rome",
    "Bread\nBread is baked from flour and water",
    "Cheese\nFrance has a thousand kinds of cheese, and a thousand kinds of bread",
]


def bm25(query: str, k1: float = 1.2, b: float = 0.75) -> list[float]:
    """The scores by the formula, passage by passage."""
    words = [Counter(re.findall(r"\w+", text.lower())) for text in TEXTS]
    mean = sum(map(Counter.total, words)) / len(words)
    scores = []
    for passage in words:
        score = 0.0
        for word in re.findall(r"\w+", query.lower()):
            among = sum(word in other for other in words)
            rarity = math.log(1 + (len(words) - among + 0.5) / (among + 0.5))
            count = passage[word]
            score += rarity * count * (k1 + 1) / (count + k1 * (1 - b + b * passage.total() / mean))
        scores.append(score)
    return scores


@pytest.mark.parametrize("query", ["capital of France", "bread bread flour", "thousand", "nothing here", ""])
def test_scores_are_those_of_the_formula_and_the_best_come_first(query) -> None:
    expected = sorted((-score, number) for number, score in enumerate(bm25(query)) if score)
    found = Index(TEXTS).search(query, 3)
    assert [number for number, _ in found] == [number for _, number in expected[:3]]
    assert [score for _, score in found] == pytest.approx([-score for score, _ in expected[:3]], rel=1e-5)


@pytest.fixture
def url():
    passages = [{"contents": text} for text in TEXTS]
    server = serve(Index(TEXTS), passages, "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


def post(url: str, body: bytes):
    return urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=10)


def test_requests_of_search_r1_are_answered_in_its_form(url) -> None:
    body = {"queries": ["capital of Italy", "xyzzy"], "topk": 1, "return_scores": True}
    result = json.load(post(url, json.dumps(body).encode()))["result"]
    assert result[0][0]["document"] == {"contents": TEXTS[1]}
    assert result[0][0]["score"] > 0
    assert result[1] == []
    body = {"query": "flour"}
    assert json.load(post(url, json.dumps(body).encode()))["result"] == [[{"contents": TEXTS[2]}]]
    assert len(json.load(post(url, b'{"query": "rome capital", "topk": -5}'))["result"][0]) == 1
    assert Searcher(url, topk=2).texts(["rome", "xyzzy"]) == [
        "Doc 1(Title: Rome) The capital of Italy is Rome",
        "Nothing was found.",
    ]


@pytest.mark.parametrize(
    "body",
    [
        b'{"question": "x"}',
        b'{"query": "x", "topk": Infinity}',
        b'{"queries": "rome"}',
        json.dumps({"queries": ["rome"] * 1001}).encode(),
        b'{"query": ' + b"[" * 100_000,
    ],
)
def test_a_request_in_another_form_is_answered_with_the_right_one(url, body) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        post(url, body)
    assert raised.value.code == 400
    assert '{"queries": [...]' in json.load(raised.value)["error"]


def test_passages_are_read_with_their_title_and_a_bad_line_is_named(tmp_path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"title": "A", "text": "b"}\n{"contents": "C\\nd"}\n')
    assert [passage["contents"] for passage in read_passages(str(file))] == ["A\nb", "C\nd"]
    file.write_text('{"contents": "C"}\n{"name": "x"}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl:2: not"):
        read_passages(str(file))
