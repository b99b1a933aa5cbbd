"""A local retriever in Search-R1's protocol: BM25 over a file of passages, ready in seconds.

    hybridrl retriever corpus.jsonl --port 8000

A line of the file is {"contents": "title\\ntext", ...}, or {"title", "text"}; .gz is read too.
"""

import argparse
import gzip
import json
import re
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

WORD = re.compile(r"\w+")
SATURATION, LENGTH_SHARE = 1.2, 0.75  # BM25's k1 and b
MAX_TOPK, MAX_QUERIES, MAX_BYTES = 100, 1000, 4 << 20  # limits of a request
MAX_WORDS = 1000  # limit of a query


class Index:
    """The passages that contain a word, with its weight in each; all weights are computed once."""

    def __init__(self, texts: Iterable[str]) -> None:
        numbers: defaultdict[str, int] = defaultdict()
        numbers.default_factory = numbers.__len__  # a new word gets the next number
        words, lengths = array("q"), array("q")
        for text in texts:
            found = WORD.findall(text.lower())
            words.extend(map(numbers.__getitem__, found))
            lengths.append(len(found))
        self._words, self._size = dict(numbers), len(lengths)

        length = np.frombuffer(lengths, np.int64)
        pairs = np.frombuffer(words, np.int64) * self._size + np.repeat(np.arange(self._size), length)
        pairs, count = np.unique(pairs, return_counts=True)  # sorted by word, then by passage
        word, passage = np.divmod(pairs, self._size)
        frequency = np.bincount(word, minlength=len(self._words))
        self._ends = np.concatenate([[0], np.cumsum(frequency)])
        self._passages = passage.astype(np.int32)
        norm = SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * length / max(length.mean(), 1))
        rarity = np.log1p((self._size - frequency + 0.5) / (frequency + 0.5))
        self._weights = (rarity[word] * count * (SATURATION + 1) / (count + norm[passage])).astype(np.float32)

    def search(self, query: str, topk: int) -> list[tuple[int, float]]:
        """Return the best passages and their scores; for equal scores the earlier passage comes first."""
        scores = np.zeros(self._size, np.float32)
        for word in WORD.findall(query.lower())[:MAX_WORDS]:
            if word in self._words:
                number = self._words[word]
                span = slice(self._ends[number], self._ends[number + 1])
                scores[self._passages[span]] += self._weights[span]
        least = np.partition(scores, -topk)[-topk] if topk < self._size else 0.0
        found = np.flatnonzero((scores >= least) & (scores > 0))
        best = found[np.argsort(-scores[found], kind="stable")[:topk]]
        return [(int(number), float(scores[number])) for number in best]


def read_passages(path: str) -> list[dict[str, Any]]:
    """Read a file of passages; ValueError names the first invalid line."""
    passages = []
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                passage = json.loads(line)
                if "contents" not in passage:
                    passage["contents"] = f"{passage.get('title', '')}\n{passage['text']}"
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(f'{path}:{number}: not {{"contents": "title\\ntext"}}: {line[:80]!r}') from None
            passages.append(passage)
    return passages


def answer(index: Index, passages: Sequence[dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    """Return the response to a request of the protocol."""
    topk = min(max(int(request.get("topk") or 3), 1), MAX_TOPK)
    queries = request["queries"] if "queries" in request else [request["query"]]  # SkyRL's client sends one
    if not isinstance(queries, list) or len(queries) > MAX_QUERIES:
        raise ValueError(f"queries is not a list of at most {MAX_QUERIES}")
    found = [index.search(str(query), topk) for query in queries]
    if not request.get("return_scores"):
        return {"result": [[passages[number] for number, _ in best] for best in found]}
    return {"result": [[{"document": passages[number], "score": score} for number, score in best] for best in found]}


def serve(index: Index, passages: Sequence[dict[str, Any]], host: str, port: int) -> ThreadingHTTPServer:
    """Return a server for POST /retrieve, not yet running; port 0: any free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, body = 200, b""
            try:
                length = int(self.headers["Content-Length"])
                if not 0 <= length <= MAX_BYTES:
                    self.close_connection = True  # the unread rest would count as the next request
                    raise ValueError(f"the request has {length} bytes, more than {MAX_BYTES}")
                request = json.loads(self.rfile.read(length))
                body = json.dumps(answer(index, passages, request)).encode()
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                form = '{"queries": [...], "topk": 3, "return_scores": true}'
                status, body = 400, json.dumps({"error": f"send {form}; {type(error).__name__}: {error}"}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log no requests."""

    class SearchServer(ThreadingHTTPServer):
        request_queue_size, daemon_threads = 1024, True

    return SearchServer((host, port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(prog="hybridrl retriever", description="Search passages.")
    parser.add_argument("corpus", type=Path, help="a .jsonl file of passages")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached from other machines, by anyone")
    options = parser.parse_args()
    begin = time.monotonic()
    try:
        passages = read_passages(str(options.corpus))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not passages:
        parser.error(f"{options.corpus} has no passages")
    index = Index(passage["contents"] for passage in passages)
    server = serve(index, passages, options.host, options.port)
    url = f"http://{options.host}:{server.server_port}/retrieve"
    print(f"{len(passages):,} passages, ready in {time.monotonic() - begin:.1f} s at {url}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
