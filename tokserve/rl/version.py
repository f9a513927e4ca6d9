"""The version of tokserve, and of tokserve-client, which is this package by itself."""

__version__ = "0.1.0"
