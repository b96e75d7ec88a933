"""What every test shares: the environment, Hypothesis profiles, and the end of the worker pools."""

import os
import socket

# Set before torch is imported: OpenMP reads its variable once, workers inherit all of them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without it gloo asks for the address of the machine's own name, which not every machine has.
for _, _interface in socket.if_nameindex():
    if _interface in ("lo", "lo0"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface)

import hypothesis
import pytest
import torch

from tests.harness import shutdown_pools

# A pool call now and then includes starting the pool, so Hypothesis must not judge single calls.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_sessionfinish() -> None:
    """End the worker processes of all pools."""
    shutdown_pools()
