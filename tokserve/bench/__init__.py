"""Measuring: load on any server that speaks the token or OpenAI routes, and the engine without HTTP."""
