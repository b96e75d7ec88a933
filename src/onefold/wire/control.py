"""Control: the tiny exchanges with which ranks agree before anything large is sent.

Everything here runs on host memory over a group of the engine's own and costs a round trip, not
bandwidth; the ledger does not enter it. Up to 64 ranks send to one another directly: for a few
hundred bytes that takes a fifth of the time of gloo's own algorithms on two local ranks. Above,
every exchange is one collective on one tensor, so that nothing here loops over ranks.
"""

import pickle
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.wire import single

MAX_PAIRWISE_RANKS: Final = 64


class Control:
    """Agreement between the data-parallel ranks of one engine.

    Every method is a collective: all ranks call it, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size
        self.count = 0
        """Exchanges so far."""

    def largest(self, values: Sequence[int]) -> list[int]:
        """The elementwise maximum over ranks of equally long lists of 32-bit integers."""
        self.count += 1
        mine = torch.tensor(values, dtype=torch.int32)
        if self.size > MAX_PAIRWISE_RANKS:
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group)
            return mine.tolist()
        return self._from_all(mine).amax(dim=0).tolist()

    def gather_floats(self, values: Sequence[float]) -> Tensor:
        """Every rank's K fp64 numbers, in rank order: ``[W, K]``, K the same everywhere."""
        self.count += 1
        return self._from_all(torch.tensor(values, dtype=torch.float64))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (anything that pickles), in rank order; for rare moments.

        Memory: W times the longest pickle.
        """
        self.count += 1
        raw = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes: list[int] = self._from_all(torch.tensor([raw.numel()]))[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: raw.numel()] = raw
        rows = self._from_all(padded).numpy()
        return [pickle.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def destroy(self) -> None:
        """Free the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _from_all(self, mine: Tensor) -> Tensor:
        """``[K] -> [W, K]``: every rank's numbers, equally many everywhere, in rank order."""
        everyone = mine.expand(self.size, -1).clone()  # this rank's row is there already
        if self.size > MAX_PAIRWISE_RANKS:
            single.all_gather(everyone.view(-1), mine, group=self._group)
            return everyone
        rows = everyone.unbind()
        peers = [rank for rank in range(self.size) if rank != self.rank]
        works = [dist.irecv(rows[peer], group=self._group, group_src=peer) for peer in peers]
        works += [dist.isend(mine, group=self._group, group_dst=peer) for peer in peers]
        for work in works:
            assert work is not None, "this rank is not part of the group"
            work.wait()
        return everyone
