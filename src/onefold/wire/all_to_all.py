"""All-to-all: every rank of one mesh axis sends an equal slice of a tensor to every other.

What leaves a rank is a copy of bytes, so any dtype travels on any backend. The exchange is part of
autograd's graph: its backward is the same exchange of the gradient, because what slice p of rank r
became is slice r of rank p.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.errors import StateError
from onefold.wire.groups import new_group
from onefold.wire.ledger import Ledger


class AllToAll:
    """The all-to-all of the ranks of one axis.

    Every call is a collective: all ranks of the axis make it in the same order, in forward, in
    backward and in a recompute. That holds by itself where all of them run the same model, because
    autograd orders its nodes by the order of the forward.

    Args:
        rank: this rank's place on the axis.
        size: number of ranks on the axis.
        group: their process group; not needed for ``size`` 1.
        ledger: enters every exchange as ``all_to_all``, if given.
        reconnect: makes a new group, for ``rebuild``.

    Attributes:
        is_broken: an exchange failed, so the group must be rebuilt.

    Raises:
        ValueError: ``rank`` is not on the axis, or several ranks have no group.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None = None,
        *,
        ledger: Ledger | None = None,
        reconnect: Callable[[], dist.ProcessGroup | None] | None = None,
    ) -> None:
        if not 0 <= rank < size or (size > 1 and group is None):
            raise ValueError(
                f"AllToAll(rank={rank}, size={size}): expected 0 <= rank < size, and a group "
                f"for more than one rank, got {group}. Use onefold.wire.all_to_all.connect."
            )
        self.rank = rank
        self.size = size
        self.is_broken = False
        self._group = group
        self._ledger = ledger
        self._reconnect = reconnect

    def exchange(self, tensor: Tensor) -> Tensor:
        """Send slice p of ``tensor`` to rank p, and receive slice ``rank`` of every rank's.

        Args:
            tensor: ``[size * k, ...]``, any dtype; of the same shape and dtype on every rank.

        Returns:
            ``[size * k, ...]``: slice p came from rank p. ``tensor`` itself on an axis of one rank.

        Raises:
            ValueError: the first dim is not a multiple of the number of ranks.
            StateError: the group was destroyed.
        Communication: one all-to-all; (size-1)/size * nbytes out and in; the same in backward.
            Nothing for an axis of one rank or an empty tensor.
        Memory: the result, and a copy of ``tensor`` where it is not contiguous.
        """
        if tensor.dim() == 0 or tensor.shape[0] % self.size:
            raise ValueError(
                f"exchange(): expected a first dim that is a multiple of the {self.size} ranks, "
                f"got shape {tuple(tensor.shape)} on rank {self.rank}. Pad the tensor."
            )
        if self.size == 1:
            return tensor
        exchanged: Tensor = _Exchange.apply(tensor, self)  # type: ignore[no-untyped-call]
        return exchanged

    def rebuild(self) -> None:
        """Replace the group after an exchange failed; on every rank together."""
        if self._reconnect is None:
            return
        self.destroy()
        self._group = self._reconnect()
        self.is_broken = False

    def destroy(self) -> None:
        """Free the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _move(self, tensor: Tensor) -> Tensor:
        if self._group is None:
            raise StateError(
                f"exchange(): the group of the {self.size} ranks was destroyed (by "
                f"engine.destroy()?), on rank {self.rank}. Call onefold.initialize again."
            )
        source = tensor.contiguous()
        out = torch.empty_like(source)
        if not source.numel():
            return out
        moved = source.nbytes * (self.size - 1) // self.size
        entry = self._ledger.open("all_to_all", "", moved, moved) if self._ledger else None
        begin = time.perf_counter()
        try:
            dist.all_to_all_single(_bytes_of(out), _bytes_of(source), group=self._group)
        except RuntimeError:
            self.is_broken = True
            raise
        if self._ledger is not None and entry is not None:
            self._ledger.close(entry, time.perf_counter() - begin)
        return out


def connect(ranks: tuple[int, ...], timeout_s: float, ledger: Ledger | None = None) -> AllToAll:
    """Make the group of one axis.

    Args:
        ranks: the axis this rank is on, as global ranks in ascending order; the place of a rank
            on the axis is its place here.
        timeout_s: seconds an exchange may take.
        ledger: enters the exchanges, if given.

    Raises:
        ValueError: ``ranks`` do not ascend (torch orders a group by global rank), or this rank is
            not one of them.
    Communication: group creation only, among ``ranks``.
    """
    if len(ranks) == 1:
        return AllToAll(0, 1, ledger=ledger)
    here = dist.get_rank()
    if here not in ranks or list(ranks) != sorted(set(ranks)):
        raise ValueError(
            f"connect(ranks={ranks}): expected ascending ranks, among them this one, {here}. Pass "
            "the axis that this rank is on."
        )

    def reconnect() -> dist.ProcessGroup | None:
        return new_group(ranks, timeout_s, backend=None)

    return AllToAll(ranks.index(here), len(ranks), reconnect(), ledger=ledger, reconnect=reconnect)


class _Exchange(torch.autograd.Function):
    """``AllToAll.exchange`` in autograd's graph; twice differentiable, as backward applies it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, all_to_all: AllToAll) -> Tensor:
        ctx.all_to_all = all_to_all
        return all_to_all._move(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchanged: Tensor = _Exchange.apply(gradient, ctx.all_to_all)  # type: ignore[no-untyped-call]
        return exchanged, None


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
