"""What a transport offers and what a started collective owes."""

from typing import Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A started collective."""

    def wait(self) -> None:
        """Return when the result may be read and every buffer may be reused."""


class Transport(Protocol):
    """The three collectives on flat buffers. Called in the same order on every rank of the group.

    ``tag`` names the unit. Buffers belong to the call until ``Work.wait`` has returned. Results are
    sums; nobody divides here. Terms of a sum travel in ``wire_dtype`` and are added in the dtype of
    the result.
    """

    name: str

    def reduce_scatter(
        self, source: Tensor, out: Tensor, tag: int, wire_dtype: torch.dtype
    ) -> Work:
        """``[N] -> [S]``: the sum over ranks of slice r of ``source``, written to ``out``."""

    def all_gather(self, shard: Tensor, out: Tensor, tag: int) -> Work:
        """``[S] -> [N]``: every rank's ``shard``; ``shard`` may be slice r of ``out`` itself."""

    def all_reduce(self, buffer: Tensor, tag: int, wire_dtype: torch.dtype) -> Work:
        """``[N] -> [N]`` in place: the sum over ranks, itself rounded to ``wire_dtype``."""
