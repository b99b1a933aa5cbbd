"""The page from a small server on this machine only: read again when a run's files have changed, with all samples."""

import hashlib
import json
import re
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from hybridrl.config import ConfigError
from hybridrl.report.contents import Contents
from hybridrl.report.page import render
from hybridrl.report.samples import Shown, grouped
from hybridrl.report.texts import Pool
from hybridrl.runs.directory import UNREADABLE
from hybridrl.tracking.records import read_records

HOST = "127.0.0.1"
WATCHED = ("metrics.jsonl", "faults.jsonl", "config.yaml", "rollouts", "samples", "logs", ".")
MOST_SAMPLES = 2000  # of one step
HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")


class Site:
    """The page of some runs, rendered again only if a file has changed."""

    def __init__(self, runs: Sequence[Path], samples: int, live: bool) -> None:
        self.runs, self.samples, self.live = [Path(run) for run in runs], samples, live
        self._lock, self._version, self._page = Lock(), "", b""

    def version(self) -> str:
        """Return a text that changes with the files of the runs."""
        state = hashlib.sha256()
        for path in (run / name for run in self.runs for name in WATCHED):
            try:
                found = path.stat()
                state.update(f"{path} {found.st_mtime_ns} {found.st_size if path.is_file() else 0}\n".encode())
            except OSError:
                state.update(f"{path} is missing\n".encode())
        return state.hexdigest()[:16]

    def page(self) -> bytes:
        with self._lock:
            if (version := self.version()) != self._version:
                page = render(self.runs, self.samples, served=True, live=version if self.live else "")
                self._page, self._version = page.encode("utf-8", "xmlcharrefreplace"), version
            return self._page

    def step(self, run: int, kind: str, step: int) -> dict:
        """Return all samples of a step, as the page's data has them; KeyError or IndexError if there are none."""
        contents = Contents(self.runs[run])
        records = list(read_records((contents.training if kind == "training" else contents.validation)[step]))
        pool = Pool()
        shown = [Shown(record, kind, group, ["loaded"]) for group in grouped(records) for record in group]
        pool.add(run, shown[:MOST_SAMPLES])
        return pool.data()


def serve(runs: Sequence[Path], port: int, samples: int, *, live: bool) -> int:
    """Serve until it is interrupted. Raises ConfigError if the port cannot be used."""
    try:
        server = make_server(Site(runs, samples, live), port)
    except OSError as error:
        cause = f"--serve={port}: {HOST}:{port} cannot be used ({error.strerror})"
        raise ConfigError(cause, fix="name another port, or 0 for a free one") from error
    print(f"http://{HOST}:{server.server_port}  (ctrl-c ends it)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0


def make_server(site: Site, port: int) -> ThreadingHTTPServer:
    """Return a server on this machine's own address; port 0 takes any that is free."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site may name this address; only requests that were meant for it are answered.
            if not HOSTS.fullmatch(self.headers.get("Host", "")):
                return self.send_error(403, "this server answers requests to 127.0.0.1 only")
            url = urlsplit(self.path)
            if url.path == "/":
                return self.respond(site.page(), "text/html; charset=utf-8")
            if url.path == "/version":
                return self.respond(site.version().encode(), "text/plain")
            if url.path == "/samples":
                return self.respond_samples(parse_qs(url.query))
            return self.send_error(404)

        def respond_samples(self, query: dict[str, list[str]]) -> None:
            try:
                run, step = int(query["run"][0]), int(query["step"][0])
                if run < 0:
                    raise IndexError(run)
                data = site.step(run, query["kind"][0], step)
            except (*UNREADABLE, IndexError):
                return self.send_error(404, "there are no such samples")
            self.respond(json.dumps(data, allow_nan=False).encode(), "application/json")

        def respond(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            return

    return ThreadingHTTPServer((HOST, port), Handler)
