"""`hybridrl report RUN [RUN2 ...]`: write the page of a run, or serve it on this machine only. A served page
has all samples, and is rendered again when a file of the run changes."""

import argparse
import hashlib
import json
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from hybridrl.config import ConfigError
from hybridrl.report.contents import Contents, is_run
from hybridrl.report.markup import SamplePool
from hybridrl.report.page import MOST_RUNS, render_page, write_report
from hybridrl.report.samples import Shown
from hybridrl.runs.directory import UNREADABLE
from hybridrl.runtime import EXIT_FAILED, EXIT_REJECTED
from hybridrl.tracking.console import print_text
from hybridrl.tracking.records import by_group, read_records

PORT, SAMPLES = 8800, 200


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`."""

    def read(argument: str) -> int:
        if not argument.isdecimal() or not least <= int(argument) <= most:
            raise ArgumentTypeError(f"{argument} is not a whole number from {least} to {most}")
        return int(argument)

    return read


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hybridrl report",
        description="Write a page with curves, samples, health, times, configuration and checkpoints of a run; with "
        f"several (at most {MOST_RUNS}), a comparison of them. A directory of verl's rollout files is read too.",
        epilog="exit status: 0 the page is written or was served, 1 it could not be written, 2 the command is rejected",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the run's trainer.default_local_dir")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the (first) directory")
    parser.add_argument(
        "--samples", type=whole(1, 1_000_000), default=SAMPLES, metavar="N", help=f"in the page (default {SAMPLES})"
    )
    help_text = f"serve the page on this machine only, with all samples within reach (default {PORT}; 0: a free one)"
    parser.add_argument("--serve", type=whole(0, 65535), nargs="?", const=PORT, metavar="PORT", help=help_text)
    parser.add_argument("--live", action="store_true", help="serve, and let the page follow what the run writes")
    options = parser.parse_args(argv)
    out = options.out or options.runs[0] / "report.html"
    serves = options.serve is not None or options.live
    try:
        check_pages(options.runs, None if serves else out)
        if serves:
            port = PORT if options.serve is None else options.serve
            return serve(options.runs, port, options.samples, live=options.live)
    except ConfigError as error:
        print_text(f"error: {error}", error=True)
        return EXIT_REJECTED
    try:
        path = write_report(options.runs, out, options.samples)
    except OSError as error:
        cause = f"{out} cannot be written: {error.strerror or error}"
        print_text(f"error: {cause}; make room, or name another file with --out", error=True)
        return EXIT_FAILED
    print(f"{path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


def check_pages(runs: Sequence[Path], out: Path | None) -> None:
    """Raise ConfigError if a page of these runs cannot be made, or not be written to `out`."""
    if missing := [str(run) for run in runs if not run.is_dir()]:
        raise ConfigError(f"{', '.join(missing)}: there is no such directory", fix="name a run's directory")
    if empty := [str(run) for run in runs if not is_run(run)]:
        cause = f"{', '.join(empty)}: there are no metrics, faults, configuration and samples"
        raise ConfigError(cause, fix="name a run's directory")
    if len(runs) > MOST_RUNS:
        fix = f"name at most {MOST_RUNS}"
        raise ConfigError(f"{len(runs)} runs are more than a page can compare", fix=fix)
    if out is None:
        return
    if out.exists() and not out.is_file():
        kind = "a directory" if out.is_dir() else "no regular file"
        raise ConfigError(f"--out={out} is {kind}", fix="name a file")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out={out}: there is no directory {out.parent}", fix="make it, or name another file")


HOST = "127.0.0.1"
WATCHED = ("metrics.jsonl", "faults.jsonl", "config.yaml", "rollouts", "samples", "logs", ".")
MOST_SAMPLES = 2000  # samples per step
HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")


class Site:
    """The page of runs, rendered again only if a file has changed."""

    def __init__(self, runs: Sequence[Path], samples: int, live: bool) -> None:
        self.runs, self.samples, self.live = [Path(run) for run in runs], samples, live
        self._lock, self._version, self._page = Lock(), "", b""

    def version(self) -> str:
        """Return a text that changes with the files of the runs."""
        state = hashlib.sha256()
        for path in (run / name for run in self.runs for name in WATCHED):
            try:
                status = path.stat()
                state.update(f"{path} {status.st_mtime_ns} {status.st_size if path.is_file() else 0}\n".encode())
            except OSError:
                state.update(f"{path} is missing\n".encode())
        return state.hexdigest()[:16]

    def page(self) -> bytes:
        with self._lock:
            if (version := self.version()) != self._version:
                page = render_page(self.runs, self.samples, served=True, live=version if self.live else "")
                self._page, self._version = page.encode("utf-8", "xmlcharrefreplace"), version
            return self._page

    def step(self, run: int, kind: str, step: int) -> dict:
        """Return all samples of a step in the form of the page's data; KeyError or IndexError if there are none."""
        contents = Contents(self.runs[run])
        records = list(read_records((contents.training if kind == "training" else contents.validation)[step]))
        pool = SamplePool()
        shown = [Shown(record, kind, group, ["loaded"]) for group in by_group(records).values() for record in group]
        pool.add(run, shown[:MOST_SAMPLES])
        return pool.data()


def serve(runs: Sequence[Path], port: int, samples: int, *, live: bool) -> int:
    """Serve until interrupted. Raises ConfigError if the port cannot be used."""
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
    """Return a server on this machine's own address; port 0 takes any free port."""

    class PageHandler(BaseHTTPRequestHandler):
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

    return ThreadingHTTPServer((HOST, port), PageHandler)


if __name__ == "__main__":
    sys.exit(main())
