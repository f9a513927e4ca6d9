"""Requests that begin alike: choices of one prompt, samples of a group, branches of a session."""
