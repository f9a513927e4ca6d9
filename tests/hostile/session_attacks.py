"""Attacks with sessions: very many, very large, and readers that do not read."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from urllib.parse import urlsplit

from tests.hostile.attack import Answer

THREADS = 4
LONG = "a" * (1 << 20)
CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "Once upon a time"}
Call = tuple[str, str, object, dict[str, str]]  # method, path, body, headers


def send(url: str, calls: Iterable[Call]) -> list[Answer]:
    """Send these, one after the other, on one connection for as long as that is kept."""
    address = urlsplit(url)
    answers: list[Answer] = []
    connection = HTTPConnection(str(address.hostname), address.port, timeout=120)
    for method, path, body, headers in calls:
        sent = {"content-type": "application/json", **headers}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            response = connection.getresponse()
            content = response.read()
        except ConnectionError:
            answers.append(Answer(0))
            connection.close()
            continue
        is_error = response.status >= 400 and content.startswith(b"{")
        error = json.loads(content)["error"] if is_error else {}
        retry_after = response.getheader("retry-after") is not None
        answers.append(Answer(response.status, error.get("code"), error.get("param"), len(content), retry_after))
        if response.will_close:
            connection.close()
    connection.close()
    return answers


def from_threads(url: str, calls: Callable[[int], Call], count: int) -> list[Answer]:
    """Send `calls(0)` to `calls(count - 1)` from some threads."""
    with ThreadPoolExecutor(THREADS) as threads:
        parts = threads.map(lambda first: send(url, map(calls, range(first, count, THREADS))), range(THREADS))
        return [answer for part in parts for answer in part]


def many_sessions(url: str, rng: random.Random) -> list[Answer]:
    """100,000 sessions."""
    return from_threads(url, lambda index: ("POST", "/sessions", {"session_id": f"many-{index}"}, {}), 100_000)


def delete_all(url: str, rng: random.Random) -> list[Answer]:
    """All sessions that there are go."""
    listed = json.loads(read(url, "/sessions?limit=100000"))["sessions"]
    names = [session["session_id"] for session in listed]
    return from_threads(url, lambda index: ("DELETE", f"/sessions/{names[index]}", None, {}), len(names))


def many_turns(url: str, rng: random.Random) -> list[Answer]:
    """A session of 10,000 turns, which are choices."""
    body = {"messages": [QUESTION], "max_tokens": 1, "n": 50}
    return from_threads(url, lambda index: ("POST", f"/sessions/turns{CHAT}", {**body, "seed": index}, {}), 200)


def many_branches(url: str, rng: random.Random) -> list[Answer]:
    """1,000 conversations that continue the same answer."""
    path = f"/sessions/branches{CHAT}"
    first = send(url, [("POST", path, {"messages": [QUESTION], "max_tokens": 4, "seed": 1}, {})])
    tree = json.loads(read(url, "/sessions/branches/tree?messages=1"))
    answer = tree["turns"][0]["message"]

    def call(index: int) -> Call:
        messages = [QUESTION, answer, {"role": "user", "content": str(index)}]
        return "POST", path, {"messages": messages, "max_tokens": 1}, {}

    return first + from_threads(url, call, 1000)


def long_ids(url: str, rng: random.Random) -> list[Answer]:
    """Ids of a megabyte, wherever one can be."""
    body = {"messages": [QUESTION], "max_tokens": 1}
    return send(
        url,
        [
            ("POST", CHAT, {**body, "session_id": LONG}, {}),
            ("POST", "/sessions", {"session_id": LONG}, {}),
            ("POST", "/sessions/turns/metadata", {"metadata": {}, "turn_id": LONG}, {}),
            ("POST", CHAT, body, {"X-Session-ID": LONG}),
            ("POST", f"/sessions/{LONG}{CHAT}", body, {}),
            ("GET", f"/sessions?after={LONG}", None, {}),
        ],
    )


def large_metadata(url: str, rng: random.Random) -> list[Answer]:
    """Nearly a megabyte of metadata for each of 200 sessions, then a reward for one without, and all are deleted."""
    large = {"x": "y" * ((1 << 20) - 100)}
    calls: list[Call] = [
        ("POST", "/sessions", {"session_id": f"large-{index}", "metadata": large}, {}) for index in range(200)
    ]
    small: Call = ("POST", "/sessions", {"session_id": "small"}, {})
    reward: Call = ("POST", "/sessions/small/metadata", {"reward": 1.0}, {})
    deleted: list[Call] = [("DELETE", f"/sessions/large-{index}", None, {}) for index in range(200)]
    return send(url, [small, *calls, reward, *deleted])


def slow_readers(url: str, rng: random.Random) -> list[Answer]:
    """Clients that request the tree of 10,000 turns, and read none of it for some seconds."""
    address = urlsplit(url)
    sockets = []
    for _ in range(8):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((address.hostname, address.port))
        sock.sendall(b"GET /sessions/turns/tree HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        sockets.append(sock)
    time.sleep(5)
    for sock in sockets:
        sock.close()
    return []


def trainers_that_hang_up(url: str, rng: random.Random) -> list[Answer]:
    """300 trainers wait for a session while others are answered, and hang up before one is closed."""
    address = urlsplit(url)
    sockets = []
    for index in range(300):
        sock = socket.create_connection((address.hostname, address.port))
        path = "/sessions/next?wait=300" if index % 2 else "/sessions?state=closed&wait=300"
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        sockets.append(sock)
    body = {"messages": [QUESTION], "max_tokens": 2}
    answers = from_threads(
        url, lambda index: ("POST", f"/sessions/waited-{index}{CHAT}", {**body, "seed": index}, {}), 100
    )
    for sock in sockets:
        sock.close()
    seen: list[Call] = [("GET", "/sessions/waited-0", None, {})] * 10  # meanwhile the server learns that they have gone
    return answers + send(url, [*seen, ("POST", "/sessions/waited-0/close", {}, {})])


def read(url: str, path: str) -> bytes:
    """What a GET answers."""
    address = urlsplit(url)
    connection = HTTPConnection(str(address.hostname), address.port, timeout=120)
    connection.request("GET", path)
    content = connection.getresponse().read()
    connection.close()
    return content
