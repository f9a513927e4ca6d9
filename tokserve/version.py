"""The version of tokserve; `rl/version.py` has the same number for tokserve-client."""

__version__ = "0.1.0"
