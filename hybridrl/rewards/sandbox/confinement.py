"""Confine this process for good: resource limits, no files, no capabilities, and only the system calls of computing.
It opens no file, and so imports the standard library's modules from memory. `become_bash` replaces it by a bash that
evaluates and forks only.

Imports the standard library only: it is loaded into the process that runs a model's program. The filter for system
calls (seccomp) holds every guarantee of docs/rewards.md by itself; Landlock and the rest are a second barrier.
"""

import contextlib
import ctypes
import errno
import json
import marshal
import mmap
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence
from importlib import machinery
from types import ModuleType

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 4, 38
_CAPABILITIES_VERSION = 0x20080522

# Landlock: system calls (the same on every architecture) and, by version, the file rights that a kernel knows.
_CREATE_RULESET, _RESTRICT_SELF, _ASK_VERSION = 444, 446, 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_NEWEST_FILE_RIGHTS, _NETWORK_RIGHTS, _SCOPES = 16, 0b11, 0b11  # TCP; abstract sockets and signals
_KNOWS_SCOPES = 6

# Allowed system calls with their numbers on x86_64 and on aarch64; a dash: that architecture has no such call. Every
# other one fails with "Operation not permitted": opening a file, sockets, new processes, signals to others.
ALLOWED = """
    read 0 63  readv 19 65  pread64 17 67  write 1 64  writev 20 66  lseek 8 62  close 3 57
    close_range 436 436  dup 32 23  dup2 33 -  dup3 292 24  fstat 5 80  getcwd 79 17
    pipe 22 -  pipe2 293 59  poll 7 -  ppoll 271 73  select 23 -
    pselect6 270 72  epoll_create1 291 20  epoll_ctl 233 21  epoll_wait 232 -  epoll_pwait 281 22
    eventfd2 290 19  mmap 9 222  munmap 11 215  mprotect 10 226  mremap 25 216  madvise 28 233  brk 12 214
    membarrier 324 283  rt_sigaction 13 134  rt_sigprocmask 14 135  rt_sigreturn 15 139  sigaltstack 131 132
    futex 202 98  set_robust_list 273 99  rseq 334 293
    sched_yield 24 124  sched_getaffinity 204 123  exit 60 93  exit_group 231 94  restart_syscall 219 128
    getpid 39 172  gettid 186 178  getppid 110 173  getuid 102 174  geteuid 107 175  getgid 104 176
    getegid 108 177  getrandom 318 278  getrusage 98 165  times 100 153  clock_gettime 228 113
    clock_getres 229 114  clock_nanosleep 230 115  nanosleep 35 101  gettimeofday 96 169  time 201 -
    uname 63 160  sysinfo 99 179  getrlimit 97 163
"""
# Those that bash needs in addition: its own processes, and whether a file exists.
_OF_BASH = """
    fork 57 -  wait4 61 260  getpgrp 111 -  getpgid 121 155  getgroups 115 158  umask 95 166  set_tid_address 218 96
    arch_prctl 158 -  rt_sigsuspend 130 133  stat 4 -  lstat 6 -  newfstatat 262 79  statx 332 291  access 21 -
    faccessat 269 48  faccessat2 439 439  readlink 89 -  readlinkat 267 78
"""
_CLONE, _CLONE3, _FCNTL, _NEWFSTATAT = (56, 220), (435, 435), (72, 25), (262, 79)
_OPENAT, _EXECVE = (257, 56), (59, 221)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, and audit architecture

_LOAD, _JUMP_EQUAL, _JUMP_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _DENY, _ABSENT = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in the data that the filter reads
_NO_THREAD = 0xFFFFFFFF ^ 0x007D0F00  # every flag of clone except those with which C libraries start a thread
_THREAD = 0x00010000  # CLONE_THREAD
_NO_FORK = 0xFFFFFFFF ^ 0x012000FF  # every flag of clone except those with which C libraries fork
_BASH, _BASH_AT = b"/bin/bash", 0x10000  # an address below every program's, which no other path can have after execve
_MAP_NEW = 0x100022  # MAP_FIXED_NOREPLACE | MAP_ANONYMOUS | MAP_PRIVATE
_EMPTY_PATH = 0x1000  # AT_EMPTY_PATH: newer C libraries query a descriptor with it
_DUP, _GETFD, _SETFD, _GETFL, _SETFL, _DUP_CLOEXEC = 0, 1, 2, 3, 4, 1030
_ASYNC = 0x2000  # O_ASYNC: a signal whenever the descriptor is ready
_OTHER_ABI = 0x40000000  # x86_64's 32-bit numbers
_SET_SECCOMP, _FILTER = 22, 2

# The standard library in memory.
_DIRECTORY = os.path.dirname(os.__file__)
_LENGTH = 8  # bytes of the number in front of the index
_EXTENSIONS = os.path.join(_DIRECTORY, "lib-dynload")
_OMITTED_EXTENSIONS = ("_test", "_ctypes_test", "xx", "_xx", "_tkinter", "_curses", "_dbm", "_gdbm", "nis", "readline")
_OMITTED = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "distutils", "venv"),
    *("tkinter", "turtledemo", "turtle.py", "pydoc_data", "sitecustomize.py", "usercustomize.py", "__pycache__"),
}


def hide() -> None:
    """Make the memory of this process and its children unreadable to the user's other processes; no core dumps."""
    _LIBC.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def confine(limits: dict[str, int], *, for_bash: bool = False) -> None:
    """Apply `limits` (of `resource`, by name) and give up all access, except what bash needs to start if `for_bash`.
    OSError: the kernel has no such filters."""
    for name, limit in limits.items():
        resource.setrlimit(vars(resource)[f"RLIMIT_{name}"], (limit, limit))
    if _LIBC.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs was denied")
    if not for_bash:  # the dynamic linker reads libraries
        give_up_files()
    # Root keeps access to its own files, and no right beyond that.
    if _LIBC.capset(struct.pack("Ii", _CAPABILITIES_VERSION, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), "capabilities could not be given up")
    filter_system_calls(for_bash)


def become_bash(arguments: Sequence[str], limits: dict[str, int]) -> None:
    """Replace this process by a confined bash, which writes, reads and lists no file, starts no program, and reaches no
    other process and no network. It may fork within its process group."""
    _LIBC.mmap.restype = ctypes.c_void_p
    size, readable_and_writable = ctypes.c_size_t(mmap.PAGESIZE), 3
    if _LIBC.mmap(ctypes.c_void_p(_BASH_AT), size, readable_and_writable, _MAP_NEW, -1, 0) != _BASH_AT:
        raise OSError(ctypes.get_errno(), "no memory for the path of bash")
    ctypes.memmove(_BASH_AT, _BASH, len(_BASH))
    lists = [[_BASH, *map(os.fsencode, arguments)], [b"=".join(item) for item in os.environb.items()]]
    vectors = [(ctypes.c_char_p * (len(texts) + 1))(*texts, None) for texts in lists]
    confine(limits, for_bash=True)
    _LIBC.execve(ctypes.c_void_p(_BASH_AT), *vectors)
    raise OSError(ctypes.get_errno(), f"{_BASH.decode()} cannot be started")


def give_up_files() -> None:
    """Deny files, TCP ports, abstract sockets and outside processes, if the kernel has Landlock: no rule allows any."""
    version = _LIBC.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)
    if version < 1:
        return
    rights = [(1 << _FILE_RIGHTS.get(version, _NEWEST_FILE_RIGHTS)) - 1]
    rights += [_NETWORK_RIGHTS, _SCOPES] if version >= _KNOWS_SCOPES else []
    attributes = struct.pack(f"{len(rights)}Q", *rights)
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0 or _LIBC.syscall(_RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock was denied")
    os.close(ruleset)


def supported() -> bool:
    """Whether programs can be confined on this machine."""
    return platform.system() == "Linux" and platform.machine() in _MACHINES


def filter_system_calls(for_bash: bool = False) -> None:
    """Install the filter in a process with no_new_privs. OSError: the kernel has no such filters.

    An instruction: operation, instructions to skip if true, if false, operand.
    """
    column, architecture = _MACHINES[platform.machine()]
    filter_ = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    filter_ += [(_LOAD, 0, 0, _NUMBER), (_JUMP_LEAST, 0, 1, _OTHER_ABI), (_RETURN, 0, 0, _DENY)]
    for number in f"{ALLOWED} {_OF_BASH if for_bash else ''}".split()[1 + column :: 3]:
        filter_ += _where(None if number == "-" else int(number), (_RETURN, 0, 0, _ALLOW))
    filter_ += _to_start_bash(column) if for_bash else _to_start_threads(column)
    # Copies of descriptors and their flags; other commands of fcntl name a process and the signal that it gets.
    fcntl = [(_LOAD, 0, 0, _ARGUMENTS + 8)]
    for command in (_DUP, _GETFD, _SETFD, _GETFL, _DUP_CLOEXEC):
        fcntl += _where(command, (_RETURN, 0, 0, _ALLOW))
    fcntl += [*_where(_SETFL, *_if_any_bit(2, _ASYNC, _DENY, _ALLOW)), (_RETURN, 0, 0, _DENY)]
    filter_ += _where(_FCNTL[column], *fcntl)
    filter_ += _where(_CLONE3[column], (_RETURN, 0, 0, _ABSENT))  # the C library then falls back to clone
    filter_ += [(_RETURN, 0, 0, _DENY)]

    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in filter_))
    program = struct.pack("HxxxxxxP", len(filter_), ctypes.addressof(code))
    if _LIBC.prctl(_SET_SECCOMP, _FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter for system calls (seccomp)")


def _to_start_threads(column: int) -> list[tuple[int, int, int, int]]:
    thread = [*_if_any_bit(0, _NO_THREAD, _DENY), *_if_any_bit(0, _THREAD, _ALLOW, _DENY)]
    return [*_where(_NEWFSTATAT[column], *_if_any_bit(3, _EMPTY_PATH, _ALLOW, _DENY)), *_where(_CLONE[column], *thread)]


def _to_start_bash(column: int) -> list[tuple[int, int, int, int]]:
    """Allow to fork, to execute the one path, and to open files as the C library does: to be closed on execve. Files
    of a script are opened without that flag."""
    not_reading = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECTORY
    half, other_half = ((_LOAD, 0, 0, _ARGUMENTS + offset) for offset in (0, 4))
    path = [half, (_JUMP_EQUAL, 0, 3, _BASH_AT), other_half, (_JUMP_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW)]
    return [
        *_where(_CLONE[column], *_if_any_bit(0, _NO_FORK, _DENY, _ALLOW)),
        *_where(_EXECVE[column], *path, (_RETURN, 0, 0, _DENY)),
        *_where(_OPENAT[column], *_if_any_bit(2, not_reading, _DENY), *_if_any_bit(2, os.O_CLOEXEC, _ALLOW, _DENY)),
    ]


def _where(number: int | None, *then: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    return [] if number is None else [(_JUMP_EQUAL, 0, len(then), number), *then]


def _if_any_bit(argument: int, bits: int, then: int, otherwise: int | None = None) -> list[tuple[int, int, int, int]]:
    """Test bits of the lower half of an argument, which both architectures store first."""
    load = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
    test = [load, (_JUMP_ANY_BIT, 0, 1, bits), (_RETURN, 0, 0, then)]
    return test if otherwise is None else [*test, (_RETURN, 0, 0, otherwise)]


def pack_modules() -> int:
    """Return the descriptor of a file in memory with the code of every module, compiled now."""
    modules: dict[str, tuple[str, bool, int, int]] = {}
    codes: list[bytes] = []
    end = 0
    for directory, directories, files in os.walk(_DIRECTORY):
        directories[:] = sorted(name for name in directories if name not in _OMITTED and name.isidentifier())
        package = os.path.relpath(directory, _DIRECTORY).replace(os.sep, ".").lstrip(".")
        for file in sorted(file for file in files if file.endswith(".py") and file not in _OMITTED):
            is_package, path = file == "__init__.py", os.path.join(directory, file)
            name = package if is_package else f"{package}.{file[:-3]}".lstrip(".")
            codes.append(marshal.dumps(machinery.SourceFileLoader(name, path).get_code(name)))
            modules[name] = (path, is_package, end, end + len(codes[-1]))
            end += len(codes[-1])
    index = json.dumps(modules).encode()
    descriptor = os.memfd_create("library")
    with open(descriptor, "wb", closefd=False) as packed:
        packed.writelines([len(index).to_bytes(_LENGTH), index, *codes])
    return descriptor


class Library:
    """Finds and loads the modules in a descriptor from `pack`, and extension modules, which it maps in advance."""

    def __init__(self, descriptor: int) -> None:
        self._data = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._start = _LENGTH + int.from_bytes(self._data[:_LENGTH])
        self._modules = json.loads(self._data[_LENGTH : self._start])
        suffix = machinery.EXTENSION_SUFFIXES[0]
        files = os.listdir(_EXTENSIONS) if os.path.isdir(_EXTENSIONS) else []
        names = [name for name in files if name.endswith(suffix) and not name.startswith(_OMITTED_EXTENSIONS)]
        self._extensions = {name.removesuffix(suffix): os.path.join(_EXTENSIONS, name) for name in names}
        for path in self._extensions.values():
            with contextlib.suppress(OSError):  # a dependency of it is not installed: its import fails, as elsewhere
                ctypes.CDLL(path)

    def install(self) -> None:
        """Import only from here from now on."""
        sys.meta_path[:] = [machinery.BuiltinImporter, machinery.FrozenImporter, self]

    def find_spec(self, name: str, path: object = None, target: object = None) -> machinery.ModuleSpec | None:
        if name in self._extensions:
            path = self._extensions[name]
            return machinery.ModuleSpec(name, machinery.ExtensionFileLoader(name, path), origin=path)
        if name not in self._modules:
            return None
        origin, is_package, _, _ = self._modules[name]
        spec = machinery.ModuleSpec(name, self, origin=origin, is_package=is_package)
        spec.has_location = True
        if is_package:
            spec.submodule_search_locations = [os.path.dirname(origin)]
        return spec

    def create_module(self, spec: machinery.ModuleSpec) -> None:
        """Use the default."""

    def exec_module(self, module: ModuleType) -> None:
        _, _, begin, end = self._modules[module.__name__]
        exec(marshal.loads(self._data[self._start + begin : self._start + end]), vars(module))
