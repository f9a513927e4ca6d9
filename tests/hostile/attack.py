"""Attacks of hostile clients, a function each, and a scene with a good client that they must not affect.

An attack is called with the server's URL and a random generator, blocks until it is over, and returns the answers that
it got; it holds nothing afterwards, so a soak can draw attacks at random from `ATTACKS`.  `Scene` compares a seeded
request of a bystander bit by bit meanwhile, and reads the server's own metrics of stalls and its memory: no clock of
this process decides anything.
"""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from tests.e2e.server import NO_TLS, Server

COMPLETIONS, CHAT, GENERATE, TOKENIZE = (
    "/v1/completions",
    "/v1/chat/completions",
    "/inference/v1/generate",
    "/tokenize",
)
MIB = 1 << 20
STARVED = 0.05  # seconds that a process waits for a processor on a machine too busy for measurements
PATIENT = httpx.Timeout(180.0)
NO_RETRY_AFTER = "without Retry-After"


class Answer(NamedTuple):
    """A reply; status 0: the connection ended without one."""

    status: int
    code: str | None = None
    field: str | None = None
    size: int = 0
    retry_after: bool = False

    @property
    def outcome(self) -> str:
        """Status and error code, and whether a 503 does not say when to come again."""
        words = [str(self.status) if self.status else "no answer", self.code or ""]
        if self.status == 503 and not self.retry_after:
            words.append(NO_RETRY_AFTER)
        return " ".join(filter(None, words))


Attack = Callable[[str, random.Random], list[Answer]]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    """Register an attack under its name."""
    ATTACKS[function.__name__] = function
    return function


# --- sending ---


def answer_of(status: int, content: bytes, retry_after: bool = False) -> Answer:
    """An answer, with the error's code and field if it is one."""
    error: dict[str, Any] = {}
    if status >= 400:
        error = json.loads(content).get("error", {})
    code = error.get("code")
    named = code if isinstance(code, str) else None  # SGLang repeats the status there
    return Answer(status, named, error.get("param"), len(content), retry_after)


def post(url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
    """Send JSON; the body may be encoded already."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        reply = httpx.post(
            url + path,
            content=raw,
            headers={"Content-Type": "application/json", **(headers or {})},
            timeout=PATIENT,
            verify=NO_TLS,
        )
    except httpx.TransportError:
        return Answer(0)
    return answer_of(reply.status_code, reply.content, "retry-after" in reply.headers)


def together(count: int, call: Callable[[], Answer]) -> list[Answer]:
    """The same from several clients at once."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(call) for _ in range(count)]]


def connect(url: str) -> socket.socket:
    """A connection."""
    address = httpx.URL(url)
    sock = socket.create_connection((address.host, address.port), timeout=180)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def head(path: str, *lines: str) -> bytes:
    """The head of a POST."""
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines, "", ""]
    ).encode()


def read(sock: socket.socket) -> Answer:
    """The answer on a connection, if one comes."""
    reply = b""
    try:
        while b"\r\n\r\n" not in reply or len(reply) < _not_streamed(reply):
            piece = sock.recv(1 << 16)
            if not piece:
                break
            reply += piece
    except OSError:
        return Answer(0)
    if b"\r\n\r\n" not in reply:
        return Answer(0)
    head, _, content = reply.partition(b"\r\n\r\n")
    return answer_of(int(head[9:12]), content, b"\r\nretry-after:" in head.lower())


def _not_streamed(reply: bytes) -> int:
    length = re.search(rb"(?i)content-length: (\d+)", reply)
    return reply.index(b"\r\n\r\n") + 4 + int(length[1]) if length else 1 << 62


# --- row 1: texts ---


def words(size: int) -> str:
    """A text of so many bytes."""
    return ("hello world, this is a text " * (size // 28 + 1))[:size]


@attack
def long_text(url: str, rng: random.Random) -> list[Answer]:
    """10 MB of text to each route that tokenizes."""
    text = words(10_000_000)
    bodies: list[tuple[str, Any]] = [
        (COMPLETIONS, {"prompt": text}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (TOKENIZE, {"prompt": text}),
        ("/v1/responses", {"input": text}),
        (COMPLETIONS, {"prompt": ["a", text]}),
        ("/v1/completions/render", {"prompt": text}),
        ("/v1/messages", {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": text}]}),
    ]
    return [post(url, path, body) for path, body in bodies]


@attack
def longest_text(url: str, rng: random.Random) -> list[Answer]:
    """A prompt with as much text as a body may have."""
    return [post(url, COMPLETIONS, {"prompt": words(60 * MIB)})]


@attack
def many_texts(url: str, rng: random.Random) -> list[Answer]:
    """24 clients with 250 kB of text each."""
    raw = json.dumps({"prompt": words(250_000)}).encode()
    return together(24, lambda: post(url, COMPLETIONS, raw))


@attack
def text_to_count(url: str, rng: random.Random) -> list[Answer]:
    """Texts as long as may be tokenized: they are."""
    raw = json.dumps({"prompt": words(MIB - 100)}).encode()
    return together(3, lambda: post(url, TOKENIZE, raw))


# --- rows 2 and 5: stop strings and bad words ---


@attack
def many_stops(url: str, rng: random.Random) -> list[Answer]:
    """10,000 and 100,000 stop strings for 16 choices."""
    return [
        post(url, COMPLETIONS, {"prompt": "a", "stop": [f"stop {i}" for i in range(count)], "n": 16, "max_tokens": 200})
        for count in (10_000, 100_000)
    ]


@attack
def as_many_stops_as_allowed(url: str, rng: random.Random) -> list[Answer]:
    """1,024 stop strings for 16 choices, from clients that wait and clients that leave."""
    stops = [f"stop {i} {rng.random()}" for i in range(1024)]
    body = {"prompt": "a", "stop": stops, "n": 16, "max_tokens": 200, "seed": 1, "ignore_eos": True}
    leave(url, COMPLETIONS, body, 4)
    return [post(url, COMPLETIONS, body)]


@attack
def many_bad_words(url: str, rng: random.Random) -> list[Answer]:
    """100,000 bad words, and as many as are allowed."""
    return [
        post(url, COMPLETIONS, {"prompt": "a", "max_tokens": 8, "bad_words": [f"w{i}" for i in range(count)]})
        for count in (100_000, 1024)
    ]


def leave(url: str, path: str, body: Any, count: int) -> None:
    """Clients that send a request and are gone after 20 ms."""
    raw = json.dumps(body).encode()
    for _ in range(count):
        with connect(url) as sock:
            sock.sendall(head(path, f"Content-Length: {len(raw)}") + raw)
            time.sleep(0.02)


# --- rows 6 and 12: how bodies arrive ---


@attack
def endless_bodies(url: str, rng: random.Random) -> list[Answer]:
    """25 bodies of 60 MiB whose last byte never comes."""
    size, piece = 60 * MIB, b" " * MIB
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(url)) for _ in range(25)]
        for sock in socks:
            sock.sendall(head(COMPLETIONS, f"Content-Length: {size}"))
        for _ in range(size // len(piece) - 1):
            for sock in list(socks):
                try:
                    sock.sendall(piece)
                except OSError:  # refused: it may not be read any more
                    socks.remove(sock)
        with ThreadPoolExecutor(25) as pool:
            return list(pool.map(read, socks))


@attack
def tiny_chunks(url: str, rng: random.Random) -> list[Answer]:
    """Ten clients with bodies in chunks of one byte."""
    body = b"1\r\n \r\n" * 100_000

    def send() -> Answer:
        with connect(url) as sock:
            with suppress(OSError):  # it is refused before its end
                sock.sendall(head(COMPLETIONS, "Transfer-Encoding: chunked") + body)
            return read(sock)

    return together(10, send)


@attack
def tiny_segments(url: str, rng: random.Random) -> list[Answer]:
    """Ten clients with bodies that arrive byte by byte."""
    raw = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 2000}).encode()

    def send() -> Answer:
        with connect(url) as sock:
            sock.sendall(head(COMPLETIONS, f"Content-Length: {len(raw)}"))
            for byte in raw:
                sock.sendall(bytes([byte]))
            return read(sock)

    return together(10, send)


@attack
def pipelined_requests(url: str, rng: random.Random) -> list[Answer]:
    """Pipelined requests on ten connections, as many as these take, whose answers no client reads."""
    requests = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50_000
    with ExitStack() as stack:
        for sock in [stack.enter_context(connect(url)) for _ in range(10)]:
            sock.settimeout(0.5)
            with suppress(TimeoutError):
                sock.sendall(requests)
    return []


# --- row 10: replies ---


@attack
def large_replies(url: str, rng: random.Random) -> list[Answer]:
    """A prompt echoed 64 times with 20 logprobs per token, whole and as a stream."""
    prompt = [(7 * i) % 250 + 5 for i in range(2000)]
    body = {"prompt": prompt, "echo": True, "logprobs": 20, "n": 64, "max_tokens": 4, "seed": 1}
    return [post(url, COMPLETIONS, body), post(url, COMPLETIONS, body | {"stream": True})]


@attack
def reply_beyond_all_bounds(url: str, rng: random.Random) -> list[Answer]:
    """A request of 103 bytes whose reply would have gigabytes."""
    sampling = {"logprobs": 20, "max_tokens": 2000, "n": 1024, "ignore_eos": True}
    return [post(url, GENERATE, {"token_ids": [5], "sampling_params": sampling})]


@attack
def whole_vocabulary(url: str, rng: random.Random) -> list[Answer]:
    """All logprobs of every token: refused by default, sent in parts with --max-logprobs -1."""
    prompt = [(7 * i) % 250 + 5 for i in range(2000)]
    body = {"prompt": prompt, "echo": True, "logprobs": -1, "n": 4, "max_tokens": 4, "seed": 1}
    return [post(url, COMPLETIONS, body | {"return_tokens_as_token_ids": True})]  # as text, some have the same name


# --- row 11: values ---


@attack
def many_messages(url: str, rng: random.Random) -> list[Answer]:
    """100,000 and a million messages, and a message of 100,000 parts."""
    message = {"role": "user", "content": "x"}
    parts = [{"type": "text", "text": "x"}] * 100_000
    return [
        post(url, CHAT, {"messages": [message] * 100_000}),
        post(url, CHAT, {"messages": [message] * 1_000_000}),
        post(url, CHAT, {"messages": [{"role": "user", "content": parts}]}),
    ]


@attack
def many_ids(url: str, rng: random.Random) -> list[Answer]:
    """Millions of token ids."""
    return [
        post(url, path, b'{"%b":[%b5]}' % (name, b"5," * count))
        for path, name in ((COMPLETIONS, b"prompt"), (GENERATE, b"token_ids"), ("/detokenize", b"tokens"))
        for count in (1_500_000, 10_000_000)
    ]


@attack
def nothing_but_lists(url: str, rng: random.Random) -> list[Answer]:
    """Empty lists: 60 MB that would take gigabytes when decoded."""
    import msgspec

    lists = b"[" + b"[]," * (20 * MIB) + b"[]]"
    packed = b"\xdd" + (50 * MIB).to_bytes(4, "big") + b"\x80" * (50 * MIB)
    assert msgspec.msgpack.decode(packed[:1] + b"\0\0\0\1\x80") == [{}]
    return [
        post(url, COMPLETIONS, b'{"prompt":%b}' % lists),
        post(url, COMPLETIONS, packed, {"Content-Type": "application/msgpack"}),
    ]


# --- rows 9 and 13: who asks, and how ---


@attack
def another_host(url: str, rng: random.Random) -> list[Answer]:
    """A page whose name leads to the server's address."""
    headers = {"Host": "evil.example"}
    return [
        post(url, "/resume", b"", headers),
        post(url, "/sleep", b"", headers),
        answer_of(*_get(url, "/inference/v1/requests", headers)),
        answer_of(*_get(url, "/server_info", headers)),
    ]


def _get(url: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    reply = httpx.get(url + path, headers=headers, timeout=PATIENT, verify=NO_TLS)
    return reply.status_code, reply.content


@attack
def odd_requests(url: str, rng: random.Random) -> list[Answer]:
    """An unknown version of HTTP, a level that no message can hold, invalid names."""
    with connect(url) as sock:
        sock.sendall(b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n")
        version = read(sock)
    return [
        version,
        post(url, "/sleep", {"level": 2**64}),
        post(url, "/update_weight_version", {"new_version": "a\0b"}),
        post(url, "/update_weight_version", {"new_version": "a\r\nb"}),
    ]


# --- the scene ---

METRONOME = """
import sys, threading, time
worst = 0.0
def beat():
    global worst
    while True:
        start = time.monotonic()
        time.sleep(0.01)
        worst = max(worst, time.monotonic() - start - 0.01)
threading.Thread(target=beat, daemon=True).start()
for _ in sys.stdin:
    print(worst, flush=True)
    worst = 0.0
"""


class Metronome:
    """A process that does nothing but sleep: how late it wakes is how much this machine lets every process wait."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", METRONOME], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def worst(self) -> float:
        """The most seconds that it was late since the last call."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        """End the process."""
        with self._process:
            self._process.kill()


class Scene:
    """A server with a good client, whose seeded request must get the same bits, and soon, whatever others do."""

    REQUEST = {
        "token_ids": [5, 20, 31],
        "request_id": "good",
        "sampling_params": {"max_tokens": 12, "seed": 3, "logprobs": 2, "ignore_eos": True},
    }

    def __init__(self, server: Server) -> None:
        self.server = server
        self.metronome = Metronome()
        self.expected = self.good()
        self.rss = self.memory()

    def good(self) -> Any:
        """The good client's reply."""
        reply = self.server.post(GENERATE, self.REQUEST)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"]

    def memory(self) -> int:
        """Resident bytes of the server and its engine."""
        processes = [psutil.Process(self.server.process.pid)]
        return sum(process.memory_info().rss for parent in processes for process in (parent, *parent.children()))

    def stalls(self, above: float = 0.25) -> int:
        """How often the event loop has stalled for longer."""
        buckets = dict(self._buckets("tokserve:event_loop_stall_seconds_bucket"))
        return int(buckets["+Inf"] - buckets[str(above)])

    def _buckets(self, name: str) -> Iterator[tuple[str, float]]:
        for line in self.server.get("/metrics").text.splitlines():
            if line.startswith(name) and (bound := re.search(r'le="([^"]+)"', line)):
                yield bound[1], float(line.rsplit(" ", 1)[1])

    def under(self, attack: Attack, seed: int = 0, *, stalls: int = 0, more_memory: int = 150 * MIB) -> list[Answer]:
        """Run an attack; asserts that the good client gets its bits meanwhile, that the event loop never stalls for
        250 ms, unless the server's threads waited as long for a processor, and that the memory comes back."""
        answers: list[Answer] = []
        self.metronome.worst()
        before, waits = self.stalls(), self.processor_waits()
        thread = threading.Thread(target=lambda: answers.extend(attack(self.server.url, random.Random(seed))))
        thread.start()
        while thread.is_alive():
            assert self.good() == self.expected
        thread.join()
        assert self.good() == self.expected
        if self.stalled_seconds(before + stalls) > self.waited_seconds(waits):
            self.check_stalls(before + stalls)
        self.server.wait_idle()
        self.wait_for_memory(more_memory)
        return answers

    def processor_waits(self) -> dict[str, float]:
        """The seconds that each thread of the server was ready and waited for a processor, where Linux counts them."""
        threads = Path(f"/proc/{self.server.process.pid}/task")
        return {path.parent.name: int(path.read_text().split()[1]) / 1e9 for path in threads.glob("*/schedstat")}

    def waited_seconds(self, before: dict[str, float]) -> float:
        """The seconds since `before` that the server's threads were ready and waited for a processor, all together."""
        return sum(seconds - before.get(thread, 0.0) for thread, seconds in self.processor_waits().items())

    def stalled_seconds(self, most: int) -> float:
        """The seconds of the stalls beyond so many, as the server has logged them."""
        logged = [float(stall[1]) for line in self.server.log if (stall := re.search(r"stalled for ([\d.]+) s", line))]
        beyond = self.stalls() - most
        return sum(logged[-beyond:]) if beyond > 0 else 0.0

    def check_stalls(self, most: int, where: str = "", waits: dict[str, float] | None = None) -> None:
        """Assert that the event loop has stalled no more often than that; a machine that let a process wait that does
        nothing says nothing about the server, and there is nothing to assert.  `waits`: the `processor_waits` before
        one request that was alone; the same holds for a machine that let the server wait meanwhile."""
        late = self.metronome.worst()
        if waits is not None:
            now = self.processor_waits()
            late = max([late, *(seconds - waits.get(thread, 0.0) for thread, seconds in now.items())])
        if late > STARVED:
            print(f"stalls are not judged: this machine let a process wait for {late:.2f} s {where}")
        else:
            lines = [line for line in self.server.log if "stalled" in line]
            assert self.stalls() <= most, (where, lines[-5:])

    def wait_for_memory(self, more: int, seconds: float = 20.0) -> None:
        """Until the server has at most so many more bytes than at its start."""
        end = time.monotonic() + seconds
        while (now := self.memory()) > self.rss + more:
            assert time.monotonic() < end, f"{(now - self.rss) / MIB:.0f} MiB more than before"
            time.sleep(0.2)
