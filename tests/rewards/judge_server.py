"""A server of chat completions that responds as a test says, and records the requests."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """A response: a verdict's text, or a whole `body`. `fails`: the connection is reset, or nothing comes."""

    text: str | None = "VERDICT: yes"
    finish: str = "stop"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    fails: str = ""  # reset or stall

    @property
    def content(self) -> bytes:
        choice = {"message": {"role": "assistant", "content": self.text}, "finish_reason": self.finish}
        body = {"choices": [choice], "usage": {"prompt_tokens": 11, "completion_tokens": 7}}
        return (json.dumps(body) if self.body is None else self.body).encode()


@dataclass
class JudgeServer:
    """`replies` gets the number of the request, from 0, and its body."""

    replies: Callable[[int, dict[str, Any]], Reply]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    url: str = ""

    def users(self) -> list[str]:
        return [request["messages"][-1]["content"] for request in self.requests]


@contextmanager
def serving(replies: Callable[[int, dict[str, Any]], Reply] | Reply) -> Iterator[JudgeServer]:
    """Run a server with these replies, or with one for all."""
    respond = replies if callable(replies) else lambda number, body: replies
    recorded, lock, ended = JudgeServer(respond), threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(recorded.requests)
                recorded.requests.append(body | {"path": self.path})
                recorded.headers.append(dict(self.headers))
                recorded.times.append(time.monotonic())
            reply = recorded.replies(number, body)
            if reply.fails == "stall":
                ended.wait(30)
            if reply.fails:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                return
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.content)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.content)

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 256

        def handle_error(self, *_: Any) -> None: ...

    server = Server(("127.0.0.1", 0), Handler)
    recorded.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    try:
        yield recorded
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
