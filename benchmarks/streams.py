"""Streams: a second one to issue to, and gradients that come late, for checks of stream order.

On the CPU, where streams are nothing, all of it does nothing, so that the same bodies run there.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

SLEEP_CYCLES: Final = 20_000_000
"""Some ten milliseconds of a GPU: longer than a reduction of a few units takes."""


@functools.cache
def side_stream(device: torch.device) -> "torch.cuda.Stream":
    """One per process, so that what was issued to it in an earlier step may still run."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def on_side(device: torch.device, is_on: bool = True) -> Iterator[None]:
    """Issue to the side stream, ordered after and before the current one as torch asks for."""
    if device.type != "cuda" or not is_on:
        yield
        return
    current, side = torch.cuda.current_stream(device), side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def sleep(device: torch.device) -> None:
    """Keep the current stream busy."""
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)


class Late(torch.autograd.Function):
    """The identity; in backward a long kernel comes before the one that makes the gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        sleep(grads[0].device)
        return grads[0].clone()
