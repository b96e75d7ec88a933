"""What every test shares: the environment, Hypothesis profiles, and the end of the worker pools."""

import os
import socket
import zlib
from collections import Counter, defaultdict

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
from tests.rig import TRANSPORT

# A pool call now and then includes starting the pool, so Hypothesis must not judge single calls.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--grid full`` runs every combination of every test's parameters; ``--transport`` on one."""
    parser.addoption(
        "--transport",
        default="auto",
        help="of engines whose test does not ask for one: auto, cross-memory, direct or native",
    )
    parser.addoption(
        "--grid",
        choices=["cover", "full"],
        default="cover",
        help="cover: every second to twelfth field of each test's grid; full: all",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Workers inherit the environment."""
    os.environ[TRANSPORT] = config.getoption("--transport")


class Cover:
    """A covering sample of what tests are parametrized over (stages, world sizes, modes ...).

    A test with several parameters runs every other field of its grid, or every twelfth of a large
    one, so that each value of each parameter meets a part of the values of every other; which part
    differs from test to test. Tests with one parameter, and those outside of ``SAMPLED``, run
    whole.
    """

    FIELDS = 2
    LARGEST_STEP = 12
    SAMPLED = tuple(
        f"tests/{folder}/"
        for folder in (
            "autograd",
            "cases",
            "contract",
            "integration",
            "mesh",
            "moe",
            "offload",
            "optim",
            "precision",
        )
    )

    def __init__(self, items: list[pytest.Item]) -> None:
        self._positions: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        self._sizes = Counter(item.nodeid.partition("[")[0] for item in items)

    def includes(self, item: pytest.Item) -> bool:
        params = getattr(getattr(item, "callspec", None), "params", {})
        name = item.nodeid.partition("[")[0]
        field = zlib.crc32(name.encode())
        num_axes = 0
        for param, value in sorted(params.items()):
            seen = self._positions[name, param]
            field += seen.setdefault(repr(value), len(seen))
            num_axes += len(seen) > 1 or param != "world_size"
        is_sampled = name.startswith(self.SAMPLED) and num_axes > 1
        step = min(self.LARGEST_STEP, max(2, self._sizes[name] // self.FIELDS))
        return not is_sampled or field % step == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in the grid; skip tests marked ``gpu`` where there is none."""
    if config.getoption("grid") == "cover" and len(items) > 1:
        cover = Cover(items)
        kept = [item for item in items if cover.includes(item)]
        chosen = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = kept
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_sessionfinish() -> None:
    """End the worker processes of all pools."""
    shutdown_pools()
