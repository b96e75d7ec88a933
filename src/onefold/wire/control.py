"""Control: the tiny exchanges with which ranks agree before anything large is sent.

Everything here runs on host memory over the engine's own gloo group and costs a round trip, not
bandwidth; the ledger does not enter it.
"""

from typing import Any

import torch
import torch.distributed as dist


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
        if self._group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.int32)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor.tolist()

    def gather_floats(self, values: list[float]) -> list[list[float]]:
        """Every rank's list of fp64 numbers, in rank order; equally long everywhere."""
        self.count += 1
        mine = torch.tensor(values, dtype=torch.float64)
        if self._group is None:
            return [values]
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(theirs, mine, group=self._group)
        return [tensor.tolist() for tensor in theirs]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (anything that pickles), in rank order; for rare moments."""
        self.count += 1
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def destroy(self) -> None:
        """Free the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
