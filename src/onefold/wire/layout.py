"""Layout: where each parameter of a unit lies in its flat buffer, and where ranks cut it.

All numbers are elements. N is the padded length, W the number of shards, S = N / W.

    param 0 |pad| param 1      |pad| param 2 |  padding  |      N elements
    |<---- S ---->|<---- S ---->|<---- S ---->|<-- S --->|      W = 4

Every parameter starts at a 64-byte boundary and S is a multiple of 64 bytes, so that vectorised
kernels see the same tails wherever shards are cut and results do not depend on W.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

ALIGNMENT_BYTES: Final = 64


class Piece(NamedTuple):
    """The part of one parameter that one rank's shard holds; ``numel`` may be 0."""

    shard_offset: int
    """First element, counted from the start of the shard."""
    param_offset: int
    """First element, counted from the start of the parameter."""
    numel: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Offsets of a unit's parameters in a flat buffer of ``num_shards`` equal shards."""

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    shard_numel: int  # S
    num_shards: int  # W

    @property
    def numel(self) -> int:
        """N, padding included."""
        return self.shard_numel * self.num_shards

    @classmethod
    def build(cls, numels: Sequence[int], *, itemsize: int, num_shards: int) -> "FlatLayout":
        """Lay ``numels`` out one after another.

        Args:
            numels: elements of each parameter, zero allowed.
            itemsize: bytes of one element; must divide 64.
            num_shards: W, at least 1.
        """
        step = ALIGNMENT_BYTES // itemsize
        offsets: list[int] = []
        end = 0
        for numel in numels:
            offsets.append(end)
            end += -(-numel // step) * step
        shard_numel = -(-end // (step * num_shards)) * step
        return cls(tuple(offsets), tuple(numels), shard_numel, num_shards)

    def __post_init__(self) -> None:
        end = 0
        for offset, numel in zip(self.offsets, self.numels, strict=True):
            assert offset >= end, "parameters of a layout overlap"
            end = offset + numel
        assert end <= self.numel, "a layout is shorter than its parameters"

    def piece(self, index: int, shard_rank: int) -> Piece:
        """The part of parameter ``index`` that shard ``shard_rank`` holds."""
        begin, end = shard_rank * self.shard_numel, (shard_rank + 1) * self.shard_numel
        first = max(begin, self.offsets[index])
        last = min(end, self.offsets[index] + self.numels[index])
        if last <= first:
            return Piece(0, 0, 0)
        return Piece(first - begin, first - self.offsets[index], last - first)
