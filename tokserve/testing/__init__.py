"""Servers for tests of RL code and other clients.

    with tokserve.testing.server("demo", tokens_only=True) as s:
        s.url, s.client                     # a real server, ready in seconds, and a client of it

    with tokserve.testing.scripted_server([ScriptedReply([5, 6, 7]), ScriptedReply(refuse=503)]) as s:
        ...                                  # the same without a model: given tokens and logprobs, and faults

`tokserve.testing.plugin` has pytest fixtures of a real server; docs/testing.md says how to load them.
"""

from tokserve.testing.process import ServerFailed, ServerProcess, server
from tokserve.testing.script import ScriptedReply
from tokserve.testing.scripted import ScriptedServer, scripted_server

__all__ = ["ScriptedReply", "ScriptedServer", "ServerFailed", "ServerProcess", "scripted_server", "server"]
