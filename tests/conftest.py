"""Shared by all tests: one torch thread unless a test says otherwise."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--base-url", help="the server that tests/conformance asks, instead of one of its own")


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)
