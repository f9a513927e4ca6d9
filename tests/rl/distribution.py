"""`rl`: the package under test: that of tokserve-client where it is installed by itself, else the server's modules.

test_distribution.py runs the tests that import this in both.
"""

import importlib
import importlib.util

HAS_SERVER = importlib.util.find_spec("tokserve") is not None
rl = importlib.import_module("tokserve.rl" if HAS_SERVER else "tokserve_client")
