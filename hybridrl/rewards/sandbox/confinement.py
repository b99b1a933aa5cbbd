"""Limits this process and gives up, for good, its files, capabilities and system calls.

Imports the standard library alone: it is loaded into the process that runs a model's program. The filter for system
calls holds every promise of docs/rewards.md by itself; Landlock and the rest are a second barrier.
"""

import ctypes
import os
import resource
import struct

from hybridrl.rewards.sandbox.system_calls import filter_system_calls

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 4, 38
_CAPABILITIES_VERSION = 0x20080522

# Landlock: system calls (the same on every machine) and, by version, the rights over files that a kernel knows.
_CREATE_RULESET, _RESTRICT_SELF, _ASK_VERSION = 444, 446, 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_NEWEST_FILE_RIGHTS, _NETWORK_RIGHTS, _SCOPES = 16, 0b11, 0b11  # TCP; abstract sockets and signals
_KNOWS_SCOPES = 6


def hide() -> None:
    """Make the memory of this process and its children unreadable to the user's other processes; no core dumps."""
    _LIBC.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def confine(limits: dict[str, int]) -> None:
    """Keep `limits` (of `resource`, by name) and run what cannot do harm. OSError where the kernel cannot filter."""
    for name, limit in limits.items():
        resource.setrlimit(vars(resource)[f"RLIMIT_{name}"], (limit, limit))
    if _LIBC.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs was refused")
    give_up_files()
    _give_up_capabilities()
    filter_system_calls(_LIBC)


def give_up_files() -> None:
    """No file, TCP port, abstract socket or process outside, where the kernel has Landlock: no rule, so nothing."""
    version = _LIBC.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)
    if version < 1:
        return
    rights = [(1 << _FILE_RIGHTS.get(version, _NEWEST_FILE_RIGHTS)) - 1]
    rights += [_NETWORK_RIGHTS, _SCOPES] if version >= _KNOWS_SCOPES else []
    attributes = struct.pack(f"{len(rights)}Q", *rights)
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0 or _LIBC.syscall(_RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock was refused")
    os.close(ruleset)


def _give_up_capabilities() -> None:
    """Root keeps the files that are its own, and no right beyond that."""
    if _LIBC.capset(struct.pack("Ii", _CAPABILITIES_VERSION, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), "capabilities could not be given up")
