"""A port for a server or a process group that cannot choose one itself."""

import socket


def free_port() -> int:
    """A TCP port that nothing uses, and no connection has used lately: not all who listen there may reuse it then."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
