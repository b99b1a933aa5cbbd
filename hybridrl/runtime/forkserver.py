"""A process that has imported the libraries of a run and forks its workers: they start in a second.

    python forkserver.py serve LISTENER MODULE...            LISTENER: the file descriptor of a socket
    python forkserver.py launch SOCKET WORKER ARGUMENT...

Ray starts a worker by a command, for which runs give `launch`: it has the server fork a child that becomes the worker,
with the environment, directory and output of `launch`, which then waits. If one of the two ends, the other is ended.
Where there is no server, `launch` becomes the worker itself. Apart from the modules both import the standard
library only; the server never imports Ray, which reads the environment when it is imported.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PATIENCE = 40.0  # seconds for the server's imports: Ray gives up a worker that has not registered within 60
LENGTH = 4  # bytes in which the size of a request is sent, and the status of an end
STREAMS = (0, 1, 2)
PASSED = len(STREAMS) + 1  # descriptors in a request: the streams, and the directory, whose path may be gone


def serve(descriptor: str, modules: list[str]) -> None:
    """Import the modules, then fork workers until standard input is closed; early requests wait for the imports."""
    sys.modules["ray"] = None  # vLLM imports it if it can
    for module in modules:
        importlib.import_module(module)
    del sys.modules["ray"]
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit(f"not forking, as the imports have started threads: {threading.enumerate()}")
    gc.collect()
    gc.freeze()  # collections in the workers would copy the pages of what they have in common
    Server(socket.socket(fileno=int(descriptor))).run()


class Server:
    """Workers by process id, each with the connection of its `launch`."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener, self.launches = listener, dict[int, socket.socket]()
        self.ended, wakeup = socket.socketpair()
        self.sockets = [listener, self.ended, wakeup]
        for item in self.sockets:
            item.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.fileno())
        self.selector = selectors.DefaultSelector()
        for source in (listener, self.ended, sys.stdin):
            self.selector.register(source, selectors.EVENT_READ, source)

    def run(self) -> None:
        while True:
            for source in [key.data for key, _ in self.selector.select()]:
                if source is self.listener:
                    with contextlib.suppress(OSError, ValueError):  # a `launch` that has ended
                        self.fork(self.listener.accept()[0])
                elif source is self.ended:
                    self.ended.recv(4096)
                    self.reap()
                elif source is sys.stdin:  # the driver has ended, or is done
                    return
                elif source in self.launches:  # its `launch` has ended
                    os.kill(source, signal.SIGKILL)
                    self.selector.unregister(self.launches[source])

    def fork(self, launch: socket.socket) -> None:
        launch.settimeout(PATIENCE)
        size, passed, _, _ = socket.recv_fds(launch, LENGTH, PASSED)
        try:
            request = json.loads(launch.makefile("rb").read(int.from_bytes(size)))
            server, child = os.getpid(), os.fork()
            if child == 0:
                become(server, passed, request, [self.selector, *self.sockets, *self.launches.values(), launch])
        finally:
            for descriptor in passed:
                os.close(descriptor)
        self.launches[child] = launch
        self.selector.register(launch, selectors.EVENT_READ, child)
        launch.sendall(b"+")

    def reap(self) -> None:
        """Pass on to each `launch` how its worker has ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if (launch := self.launches.pop(ended[0], None)) is None:
                    continue  # a process that an import has left
                with contextlib.suppress(KeyError, OSError):
                    self.selector.unregister(launch)
                    launch.sendall((os.waitstatus_to_exitcode(ended[1]) % 256).to_bytes(LENGTH))
                launch.close()


def become(server: int, passed: list[int], request: dict[str, Any], unused: list[Any]) -> NoReturn:
    """Be what `python COMMAND` would be in the directory and with the environment of a request; ends with the server.
    Whatever fails, also before the command starts, ends this process: nothing may return into the server's loop."""
    status = 1
    try:
        set_up(server, passed, request["environment"], unused)
        sys.argv = request["command"]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)  # what the server would do at its end is not the worker's


def set_up(server: int, passed: list[int], environment: dict[str, str], unused: list[Any]) -> None:
    """Replace the server's streams, directory and environment in this process by those of a request."""
    end_with_parent()
    if os.getppid() != server:
        raise ProcessLookupError("the fork server has ended")
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, directory = passed
    for number, stream in zip(STREAMS, streams, strict=True):
        os.dup2(stream, number)
    os.fchdir(directory)
    for descriptor in passed:
        os.close(descriptor)
    for item in unused:
        item.close()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # computed again from TMPDIR
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # or all workers would draw the same numbers


def launch(path: str, command: list[str]) -> NoReturn:
    """Request the worker from the server, and end with it."""
    end_with_parent()  # Ray, with which the worker ends
    content = json.dumps({"command": command, "environment": dict(os.environ)}).encode()
    server = socket.socket(socket.AF_UNIX)
    try:
        server.settimeout(PATIENCE)
        server.connect(path)
        socket.send_fds(server, [len(content).to_bytes(LENGTH)], [*STREAMS, os.open(".", os.O_PATH)])
        server.sendall(content)
        forked = server.recv(1)
    except OSError:
        forked = b""
    if not forked:
        server.close()
        os.execv(sys.executable, [sys.executable, *command])
    server.settimeout(None)
    sys.exit(int.from_bytes(server.recv(LENGTH) or b"\1"))


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    {"serve": serve, "launch": launch}[sys.argv[1]](sys.argv[2], sys.argv[3:])
