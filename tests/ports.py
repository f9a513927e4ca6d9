"""A port for a server or a process group that cannot choose one itself."""

import socket


def free_port() -> int:
    """A TCP port that nothing uses."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
