"""What a transport offers and what a started collective owes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A started collective."""

    def wait(self) -> None:
        """Return when the result may be read and every buffer may be reused."""

    def is_done(self) -> bool:
        """Whether ``wait`` would return at once; False also where that cannot be known."""


class Transport(Protocol):
    """The three collectives on flat buffers. Called in the same order on every rank of the group.

    ``tag`` names the unit. Buffers belong to the call until ``Work.wait`` has returned. Results are
    sums; nobody divides here. Every term of a sum, the rank's own too, is rounded once to
    ``wire_dtype`` and added in the dtype of the result, so the bits do not depend on who adds.
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

    def close(self) -> None:
        """End what runs in the background; nothing can be started afterwards."""


def sum_in_rank_order(terms: Sequence[Tensor], out: Tensor, rank: int) -> None:
    """``((terms[0] + terms[1]) + terms[2]) + ...`` into ``out``, one add after another.

    Args:
        terms: two or more, of one dtype; the first is overwritten unless it is ``terms[rank]``.
        out: the sum is taken in its dtype. Where that is the terms' it may be the same memory as
            ``terms[rank]``.
        rank: whose term is this rank's own.
    """
    first, second, *rest = terms
    if first.dtype == out.dtype:
        # In the first received term where ``out`` may be a later term of the sum itself.
        total = out if rank < 2 else first
        torch.add(first, second, out=total)
    else:
        total = out
        total.copy_(first)
        total.add_(second)
    for term in rest:
        total.add_(term)
    if total is not out:
        out.copy_(total)


def peers_of(rank: int, size: int) -> list[int]:
    """The other ranks, nearest first, so that not everybody starts with rank 0."""
    return [(rank + step) % size for step in range(1, size)]


def cut(buffer: Tensor, size: int) -> list[Tensor]:
    """``buffer`` in ``size`` nearly equal slices."""
    cuts = [buffer.numel() * part // size for part in range(size + 1)]
    return [buffer[begin:end] for begin, end in pairwise(cuts)]
