"""Run tests against one program: each test in a confined process, and the program in another.

Started by `run.py` in place of `inside.py`. It writes a JSON line for each test: "" if the program passed it, or null.
What a test calls is a stand-in for the program's object, and only plain values come back. A test computes and compares
with plain values only: a program cannot find the values it is compared with, skip the comparison, or return an object
that decides it. Imports the standard library and this package only.
"""

import ast
import builtins
import collections
import contextlib
import decimal
import fractions
import functools
import importlib
import json
import operator
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from hybridrl.rewards.sandbox.inside import end_with_parent, execute, finish, prepare, start

# Plain values that JSON does not have: their type, the parts sent, and whether these are its separate arguments.
_KINDS: dict[str, tuple[type, Callable[[Any], Any], bool]] = {
    "dict": (dict, dict.items, False),
    "complex": (complex, lambda value: (value.real, value.imag), True),
    "range": (range, lambda value: (value.start, value.stop, value.step), True),
    "Fraction": (fractions.Fraction, lambda value: (value.numerator, value.denominator), True),
    "Decimal": (decimal.Decimal, lambda value: (str(value),), True),
} | {kind.__name__: (kind, iter, False) for kind in (tuple, set, frozenset, collections.deque, bytes, bytearray)}

# What a test may do with an object of the program, besides passing it on. Done in the program's process.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "__call__": lambda function, *arguments, **named: function(*arguments, **named),
    "__getattr__": getattr,
    "__setattr__": setattr,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__str__": str,
    "__repr__": repr,
    "__len__": len,
    "__bool__": bool,
    "__iter__": iter,
    "__next__": next,
}
# What a test may compute from two objects of the program; with a plain value in place of one, it is a TypeError.
_COMPUTATIONS: dict[str, Callable[..., Any]] = {
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge")},
    **{f"__{name}__": getattr(operator, name) for name in ("add", "sub", "mul", "truediv")},
}
# Names that a test may use without an import, and their modules: a test that compares with them does so by itself.
_LIBRARY_NAMES = {
    name: module
    for module, names in {
        "collections": "Counter OrderedDict defaultdict deque",
        "copy": "deepcopy",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "math": "fabs inf isclose isinf isnan nan",
        "numpy": "np numpy",
        "pytest": "approx pytest",
    }.items()
    for name in names.split()
}


def main(library: int, tests: int) -> None:
    job = prepare(library)
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork() == 0:
        end_with_parent(parent)
        ours.close()
        os.close(tests)
        _serve_programs(job, theirs)
    theirs.close()
    with open(tests, encoding="utf-8") as file:
        texts = json.load(file)
    for text in texts:
        ours.send(b"r")
        (connection,) = socket.recv_fds(ours, 1, 1)[1]
        run = start(job, functools.partial(try_test, text, connection), descriptor=connection)
        os.close(connection)
        print(json.dumps(None if finish(run, job["wall_seconds"]) is None else ""), flush=True)


def _serve_programs(job: dict[str, Any], control: socket.socket) -> NoReturn:
    """Run the program for each byte received, until the next byte. This process has never read the tests."""
    while control.recv(1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            run = start(job, lambda ours=ours: serve(execute(job), ours.fileno()), descriptor=ours.fileno())
            socket.send_fds(control, [b"r"], [theirs.fileno()])
        finish(run, job["wall_seconds"], until=control.fileno())
    os._exit(0)


def serve(space: dict[str, Any], descriptor: int) -> None:
    """Serve the names in `space` to a test until it ends: the program's side."""
    program = _Program(space, _Channel(descriptor))
    program.channel.send(None)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            program.channel.send(program.reply(*program.channel.receive()))


def try_test(text: str, descriptor: int) -> None:
    """Run a test: the tests' side. Raises if the program does not pass, or has ended."""
    channel = _Channel(descriptor)
    channel.receive()
    exec(compile(text, "<tests>", "exec"), _Names(_Test(channel), text))


class _Channel:
    """Lines of JSON over a socket. A list is a request and a dictionary a reply."""

    def __init__(self, descriptor: int) -> None:
        self._reader, self._writer = os.fdopen(descriptor, "rb", closefd=False), os.fdopen(descriptor, "wb")
        sys.set_int_max_str_digits(0)

    def send(self, message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def receive(self) -> Any:
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the other side has ended")
        return json.loads(line)

    def ask(self, request: list[Any], handle: Callable[..., Any]) -> Any:
        """Return the reply to a request, first handling what the other side requests before it replies."""
        self.send(request)
        while isinstance(message := self.receive(), list):
            self.send(handle(*message))
        return message


class _Test:
    """The tests' side: requests to the program, and the tests' own functions, which the program may call."""

    def __init__(self, channel: _Channel) -> None:
        self._channel, self._functions = channel, []

    def ask(self, operation: str, of: Any, arguments: tuple, named: dict[str, Any]) -> Any:
        """Do an operation in the program's process and return its result; mutable arguments are updated in place."""
        request = [operation, *(_encoded(value, self._refer) for value in (of, list(arguments), named))]
        reply = _decoded(self._channel.ask(request, self._call), self._object)
        if reply.get("raised") == "StopIteration" and operation != "__next__":  # it would end a loop of the test
            raise RuntimeError("the program raised StopIteration")
        value = _value(reply)
        for argument, after in zip(arguments, reply["after"], strict=True):
            if isinstance(argument, list | bytearray) and type(argument) is type(after):
                argument[:] = after
            elif isinstance(argument, dict | set) and type(argument) is type(after):
                argument.clear()
                argument.update(after)
        return value

    def _call(self, number: int, *sent: Any) -> Any:
        """Return the reply to a program that calls a function of the tests."""
        try:
            arguments, named = (_decoded(value, self._object) for value in sent)
            return _encoded({"value": self._functions[number](*arguments, **named)}, self._refer)
        except Exception as error:
            return _raised(error)

    def _refer(self, value: Any) -> dict[str, int]:
        if isinstance(value, _Stub):
            return {"object": value._number}
        if not callable(value):
            kind = type(value).__name__
            raise TypeError(f"a test passes a {kind} to the program; plain values and functions can be passed")
        self._functions.append(value)
        return {"function": len(self._functions) - 1}

    def _object(self, _: str, number: int) -> "_Stub":
        return _Stub(self, number)


class _Stub:
    """An object of the program, known to the tests' process by its number only."""

    _test: _Test
    _number: int

    def __init__(self, test: _Test, number: int) -> None:
        vars(self).update(_test=test, _number=number)

    def __hash__(self) -> int:
        return hash((_Stub, self._number))


def _forwarded(operation: str) -> Callable[..., Any]:
    return lambda self, *arguments, **named: self._test.ask(operation, self, arguments, named)


def _computed(operation: str) -> Callable[..., Any]:
    def compute(self: _Stub, other: object) -> Any:
        if isinstance(other, _Stub):
            return self._test.ask(operation, self, (other,), {})
        if operation == "__instancecheck__" or (operation == "__eq__" and other is None):
            return False
        raise TypeError(f"the program returned an object: {operation} of it and a {type(other).__name__}")

    return compute


for _name in _OPERATIONS:
    setattr(_Stub, _name, _forwarded(_name))
for _name in _COMPUTATIONS:
    setattr(_Stub, _name, _computed(_name))


class _Names(dict):
    """The tests' names; one that they do not define is the program's, except builtins and names of libraries."""

    def __init__(self, test: _Test, text: str) -> None:
        nodes = list(ast.walk(ast.parse(text)))
        bases = {node.value for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
        modules = {base.id for base in bases} & sys.stdlib_module_names
        super().__init__({name: importlib.import_module(name) for name in modules})
        # If nothing else is left to the program, the tested function has the name of a builtin or of a library.
        undefined = _undefined(nodes) - modules
        self._builtins_first = not undefined <= vars(builtins).keys()
        self._library_first = not undefined <= vars(builtins).keys() | _LIBRARY_NAMES.keys()
        self._test = test

    def __missing__(self, name: str) -> Any:
        if self._builtins_first and hasattr(builtins, name):
            raise KeyError(name)
        try:
            if self._library_first and name in _LIBRARY_NAMES:
                module = importlib.import_module(_LIBRARY_NAMES[name])
                self[name] = getattr(module, name, module)
            else:
                self[name] = self._test.ask("name", name, (), {})
        except NameError:
            raise KeyError(name) from None
        return self[name]


def _undefined(nodes: list[ast.AST]) -> set[str]:
    """Return the names that a test uses and does not define."""
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - defined


class _Program:
    """The program's side: its names, and the objects that the tests refer to by number."""

    def __init__(self, space: dict[str, Any], channel: _Channel) -> None:
        self.channel, self._space, self._objects = channel, space, []

    def reply(self, operation: str, *sent: Any) -> Any:
        """Return the reply to `_Test.ask`. Whatever the program raises is raised in the test."""
        try:
            of, arguments, named = (_decoded(value, self._object) for value in sent)
            if operation == "name":
                if of not in self._space:
                    raise NameError(of)
                value = self._space[of]
            else:
                value = (_OPERATIONS.get(operation) or _COMPUTATIONS[operation])(of, *arguments, **named)
            return _encoded({"value": value, "after": arguments}, self._refer)
        except BaseException as error:
            return _raised(error)

    def _refer(self, value: Any) -> dict[str, int]:
        self._objects.append(value)
        return {"object": len(self._objects) - 1}

    def _object(self, kind: str, number: int) -> Any:
        return self._objects[number] if kind == "object" else functools.partial(self._call, number)

    def _call(self, number: int, *arguments: Any, **named: Any) -> Any:
        """Call a function of the tests."""
        request = [number, *(_encoded(value, self._refer) for value in (list(arguments), named))]
        return _value(_decoded(self.channel.ask(request, self.reply), self._object))


def _raised(error: BaseException) -> dict[str, Any]:
    return {"dict": [["raised", type(error).__name__], ["message", str(error)]]}


def _value(reply: dict[str, Any]) -> Any:
    """Return the value of a reply, or raise the exception in it."""
    if "raised" in reply:
        kind = vars(builtins).get(reply["raised"])
        is_exception = isinstance(kind, type) and issubclass(kind, Exception)
        raise (kind if is_exception else RuntimeError)(reply["message"])
    return reply["value"]


def _encoded(value: Any, refer: Callable[[Any], dict[str, int]]) -> Any:
    """Return a value as JSON data; `refer` returns the reference to an object or function."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, list):
        return [_encoded(item, refer) for item in value]
    for name, (kind, parts, _) in _KINDS.items():
        if isinstance(value, kind):
            return {name: [_encoded(list(part) if name == "dict" else part, refer) for part in parts(value)]}
    if isinstance(value, type) and vars(builtins).get(value.__name__) is value:
        return {"type": value.__name__}
    return refer(value)


def _decoded(data: Any, object_of: Callable[[str, int], Any]) -> Any:
    if isinstance(data, list):
        return [_decoded(item, object_of) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    if name in ("object", "function"):
        return object_of(name, content)
    if name == "type":
        return {value.__name__: value for value in vars(builtins).values() if isinstance(value, type)}[content]
    kind, _, spread = _KINDS[name]
    parts = _decoded(content, object_of)
    return kind(*parts) if spread else kind(parts)
