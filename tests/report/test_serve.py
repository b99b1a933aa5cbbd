"""The server: on this machine only, with a page that follows the files."""

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from hybridrl.report.__main__ import Site, make_server
from tests.report.synthetic import write_run


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    run = write_run(tmp_path / "run")
    server = make_server(Site([run], 50, live=True), 0)
    thread = Thread(target=server.serve_forever, args=(0.01,))  # seconds until it notices its end
    thread.start()
    yield server.server_port, run
    server.shutdown()
    server.server_close()
    thread.join()


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": host})
    response = connection.getresponse()
    return response.status, response.read()


def test_the_page_is_made_again_when_a_file_has_changed(served):
    port, run = served
    first = get(port, "/")[1]
    assert b"over 12 steps" in first and get(port, "/")[1] == first
    before = get(port, "/version")[1]
    assert before.decode() in first.decode()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "critic/rewards/mean": 1.0}\n')
    os.utime(run / "metrics.jsonl")
    assert get(port, "/version")[1] != before
    assert b"over 13 steps" in get(port, "/")[1]


def test_all_samples_of_a_step_can_be_loaded(served):
    port, _ = served
    status, body = get(port, "/samples?run=0&kind=training&step=5")
    data = json.loads(body)
    assert status == 200 and len(data["samples"]) == 16 and len(data["groups"]) == 4


@pytest.mark.parametrize(
    "query", ["", "run=0&kind=training&step=99", "run=7&kind=training&step=1", "run=x&kind=a&step=1"]
)
def test_a_request_for_samples_that_are_not_there_is_answered(served, query):
    assert get(served[0], f"/samples?{query}")[0] == 404


def test_other_paths_and_other_hosts_get_nothing(served):
    port, _ = served
    assert get(port, "/../../etc/passwd")[0] == 404
    assert get(port, "/", host="evil.example")[0] == 403
    assert get(port, "/", host=f"localhost:{port}")[0] == 200
