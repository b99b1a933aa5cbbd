"""The OpenAI-compatible endpoint of the policy: agents use it over HTTP, and it records token ids.

This module binds its address before anything heavy starts, so that an address in use is reported at once.
"""

import errno
import socket

from hybridrl.config import ConfigError

ADMIN_KEY = "HYBRIDRL_ADMIN_KEY"  # in the environment: who has it starts sessions


def bound(host: str, port: int, place: str = "") -> socket.socket:
    """Return a socket that is bound to the address and does not listen yet: clients are turned away until it does. With
    port 0 it is a free port. Raises ConfigError, with the keys `host` and `port` of the section `place`."""
    listening = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        if listening is not None:
            listening.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            cause, fix = f"{place}host={host} is not an address of this machine", "set 127.0.0.1, or 0.0.0.0 for all"
            raise ConfigError(f"{cause} ({error.strerror})", fix=fix, keys=f"{place}host") from error
        cause, fix = f"{place}port={port}: {host}:{port} cannot be used ({error.strerror})", "set another port"
        raise ConfigError(cause, fix=fix, keys=f"{place}port") from error
    return listening
