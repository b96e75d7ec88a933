"""Control: the tiny exchanges with which ranks agree before anything large is sent.

Everything here runs on host memory over the engine's own gloo group and costs a round trip, not
bandwidth; the ledger does not enter it. Up to 64 ranks send to one another directly: for a few
hundred bytes that takes a fifth of the time of gloo's own algorithms on two local ranks.
"""

import pickle
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

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

    def largest(self, values: list[int]) -> list[int]:
        """The elementwise maximum over ranks of equally long lists of 32-bit integers."""
        self.count += 1
        mine = torch.tensor(values, dtype=torch.int32)
        if self.size > MAX_PAIRWISE_RANKS:
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group)
            return mine.tolist()
        return torch.stack(self._from_all(mine)).amax(dim=0).tolist()

    def gather_floats(self, values: list[float]) -> list[list[float]]:
        """Every rank's list of fp64 numbers, in rank order; equally long everywhere."""
        self.count += 1
        theirs = self._from_all(torch.tensor(values, dtype=torch.float64))
        return [tensor.tolist() for tensor in theirs]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (anything that pickles), in rank order; for rare moments."""
        self.count += 1
        raw = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._from_all(torch.tensor([raw.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: raw.numel()] = raw
        return [
            pickle.loads(theirs[:size].numpy().tobytes())
            for theirs, size in zip(self._from_all(padded), sizes, strict=True)
        ]

    def destroy(self) -> None:
        """Free the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _from_all(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, equally large everywhere, in rank order."""
        everyone = [
            mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)
        ]
        if self.size > MAX_PAIRWISE_RANKS:
            dist.all_gather(everyone, mine, group=self._group)
            return everyone
        peers = [rank for rank in range(self.size) if rank != self.rank]
        works = [dist.irecv(everyone[peer], group=self._group, group_src=peer) for peer in peers]
        works += [dist.isend(mine, group=self._group, group_dst=peer) for peer in peers]
        for work in works:
            assert work is not None, "this rank is not part of the group"
            work.wait()
        return everyone
