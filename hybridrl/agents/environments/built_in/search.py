"""Search: a client of Search-R1's retrieval protocol, as a tool and as the environment `search`."""

import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.agents.environments.environment import (
    Environment,
    Response,
    Schema,
    Step,
    column,
    ground_truth,
    schema_of_texts,
)
from hybridrl.agents.environments.tools import Tool
from hybridrl.agents.environments.user_code import finished
from hybridrl.rewards.scorers.short_answers import score_search_qa, tagged

SCHEMA = schema_of_texts("search", "Search passages of text.", query="What to search for.")
URL = "http://127.0.0.1:8000/retrieve"
MAX_BYTES = 8 << 20  # of a retriever's answer


class Searcher:
    """A retriever at a URL: POST {queries, topk, return_scores} -> {result: for each query [{document, score}]}."""

    def __init__(self, url: str = URL, topk: int = 3, seconds: float = 30) -> None:
        self._url, self._topk, self._seconds = url, int(topk), float(seconds)

    def texts(self, queries: Sequence[str]) -> list[str]:
        """Return the passages for each query as one text; an exception of urllib if there is no retriever."""
        body = {"queries": list(queries), "topk": self._topk, "return_scores": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self._seconds) as answer:
            content = answer.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConnectionError(f"the retriever at {self._url} returned more than {MAX_BYTES >> 20} MiB")
        found = json.loads(content)["result"]
        return [_as_text(passages) for passages in found]


class Search(Tool):
    """The tool `search`; its configuration may have `search_url`, `topk` (3) and `timeout` in seconds (30)."""

    network = True

    def __init__(self, config: Mapping[str, Any], schema: Schema = SCHEMA) -> None:
        super().__init__(schema)
        self._searcher = searcher(config)

    def call(self, state: None, arguments: dict[str, Any]) -> str:
        return self._searcher.texts([arguments["query"]])[0]


class SearchQuestions(Environment):
    """SkyRL's environment: text in <search> tags is searched, and <answer> ends the episode.

    Reward 1 if the last answer is one of `ground_truth.target` up to case, articles and punctuation, else 0.
    `max_turns` (2) of the row or of the configuration; the latter is otherwise that of the tool.
    """

    def __init__(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        super().__init__(config, row)
        self._searcher = searcher(config)
        self._most = int(column(row, "max_turns", 2, config))
        self._texts: list[str] = []

    async def step(self, response: Response) -> Step:
        self._texts.append(response.text)
        if len(self._texts) >= self._most or tagged(response.text, "answer"):
            return Step(reward=score_search_qa("".join(self._texts), ground_truth(self.row)), done=True)
        queries = tagged(response.text, "search")
        if not queries:
            found = "Nothing was searched: write a query in <search> tags, or the answer in <answer> tags."
        else:
            found = (await finished(self._searcher.texts, [queries[0].strip()]))[0]
        return Step([{"role": "user", "content": f"\n<information>{found}</information>\n"}], reward=0.0)


def searcher(config: Mapping[str, Any]) -> Searcher:
    """The retriever that a configuration names."""
    return Searcher(config.get("search_url", URL), config.get("topk", 3), config.get("timeout", 30))


def _as_text(passages: list[Mapping[str, Any]]) -> str:
    """Number the passages; the first line of a passage's contents is its title."""
    lines = []
    for number, passage in enumerate(passages, start=1):
        title, _, text = passage["document"]["contents"].partition("\n")
        lines.append(f"Doc {number}(Title: {title.strip()}) {text.strip()}")
    return "\n".join(lines) or "Nothing was found."
