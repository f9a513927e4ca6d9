"""Socket files without a listener."""

import socket
from pathlib import Path

from tokserve.base.sockets import remove_stale


def test_only_a_socket_without_a_listener_is_removed(tmp_path: Path) -> None:
    socket_file, other, link = tmp_path / "s", tmp_path / "notes", tmp_path / "link"
    other.write_text("mine")
    link.symlink_to(other)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(socket_file))
        listening.listen()
        for path in (socket_file, other, link, tmp_path, tmp_path / "absent", tmp_path / ("x" * 200)):
            remove_stale(str(path))
        assert socket_file.exists() and other.read_text() == "mine" and link.is_symlink()
    remove_stale(str(socket_file))
    assert not socket_file.exists()
