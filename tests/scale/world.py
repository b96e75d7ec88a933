"""One rank of a world of any size, alone in this process, and the work that it does there.

torch's fake process group completes every collective at once: a gather yields this rank's own
shard W times, a reduce-scatter its own slice, a message nothing. So numbers mean little here, while
calls, bytes, memory and the host's work are those of a world of that size.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import onefold

SIZES = [8, 64, 512, 4096]
STAGES = [0, 1, 2, 3]
PACKAGE = str(Path(onefold.__file__).parent)
WIDTH = 512
LAYER_NUMEL = WIDTH * WIDTH  # 64 elements for each of 4096 ranks: no padding at any size
NATIVE: Mapping[str, Any] = {"transport": "native"}


class Stack(nn.Module):
    """So many layers of one square weight, each a block and a unit, and a scale in the root."""

    def __init__(self, layers: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.root = nn.Parameter(torch.full((width, width), 1 / width))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, width]`` -> a scalar."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x @ self.root).square().mean()


class Many(nn.Module):
    """``params`` parameters of one module."""

    def __init__(self, params: int, width: int = WIDTH) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(params))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, width]`` -> a scalar."""
        return (x * torch.stack(list(self.scales)).mean(dim=0)).square().mean()


def _back_to_sender(out: Tensor, source: Tensor, **arguments: Any) -> Any:
    """The fake group leaves ``out`` as it is, which need not even be finite."""
    out.copy_(source)
    return _all_to_all(out, source, **arguments)


_all_to_all = dist.all_to_all_single


@contextmanager
def world(size: int, rank: int = 1) -> Iterator[None]:
    """A default process group of ``size`` ranks, of which this process is one."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with patch.object(dist, "all_to_all_single", _back_to_sender):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def engine_of(
    size: int,
    stage: int,
    model: nn.Module,
    *,
    rank: int = 1,
    bucket_numel: int = LAYER_NUMEL,
    onefold_config: Mapping[str, Any] = NATIVE,
    **config: Any,
) -> Iterator[onefold.Engine]:
    """An engine on one rank of ``size``, with plain SGD."""
    settings = {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket_numel},
        "onefold": onefold_config,
        **config,
    }
    with world(size, rank):
        engine = onefold.initialize(
            model=model, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3), config=settings
        ).engine
        try:
            yield engine
        finally:
            engine.destroy()


def run_step(
    engine: onefold.Engine, backwards: int, *, windowed: bool = True, width: int = WIDTH
) -> None:
    """One step of ``backwards`` backwards, in a window or bare."""
    x = torch.linspace(-1, 1, 2 * width).view(2, width)
    x = x.to(next(engine.module.parameters()).dtype)
    if windowed:
        with engine.coalesce_grad_reduction():
            for _ in range(backwards):
                engine.backward(engine(x))
    else:
        for _ in range(backwards):
            engine.backward(engine(x))
    engine.step()


Work = Counter[str]
"""Python instructions by function of our package."""


@contextmanager
def counted() -> Iterator[Work]:
    """Count the instructions that Python executes in our package, loops included.

    What C code does for one instruction is not seen, nor is other packages' Python.
    """
    work: Work = Counter()

    def inside(frame: FrameType, event: str, _arg: object) -> Any:
        if event == "opcode":
            work[frame.f_code.co_qualname] += 1
        return inside

    def entered(frame: FrameType, _event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield work
    finally:
        sys.settrace(before)


def work_of_step(engine: onefold.Engine, backwards: int, **arguments: Any) -> Work:
    """The work of one step, after two that fill what is made once."""
    for _ in range(2):
        run_step(engine, backwards, **arguments)
    with counted() as work:
        run_step(engine, backwards, **arguments)
    return work


def differences(one: Work, other: Work) -> dict[str, tuple[int, int]]:
    """Functions that did more or less, for messages."""
    return {name: (one[name], other[name]) for name in one | other if one[name] != other[name]}
