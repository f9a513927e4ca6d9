"""Benchmarks: load on any server with the token or OpenAI routes, and the engine without HTTP."""
