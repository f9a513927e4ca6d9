"""Turns replies of /inference/v1/generate into replies of chat and completions: the inverse of `render`."""
