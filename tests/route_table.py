"""The routes of a server with default options, for tests over all of them."""

from tokserve.config import Config
from tokserve.server.routes import endpoints

ENDPOINTS = endpoints(Config())
CONTROL = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.control)
