"""Gather: the rows of all ranks on every rank, and gradients back to where the rows are from."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.wire.all_to_all import AllToAll


class Share(NamedTuple):
    """Which rows of the whole batch are this rank's."""

    sizes: tuple[int, ...]
    """Rows of every rank."""
    rank: int

    @property
    def first(self) -> int:
        """The first one."""
        return sum(self.sizes[: self.rank])

    @property
    def end(self) -> int:
        """Beyond the last one."""
        return self.first + self.sizes[self.rank]


def gather_rows(exchange: AllToAll, rows: Tensor, share: Share) -> Tensor:
    """``[m, D] -> [B, D]``: the rows of all ranks, in rank order.

    Communication: one all-to-all of W times the most rows of a rank.
    """
    longest = max(share.sizes)
    padded = rows.new_zeros(longest, rows.shape[1])
    padded[: len(rows)] = rows
    sent = padded.expand(exchange.size, *padded.shape).reshape(-1, rows.shape[1])
    got = exchange.exchange(sent).view(exchange.size, longest, -1)
    return torch.cat([part[:size] for part, size in zip(got, share.sizes, strict=True)])


def return_gradients(exchange: AllToAll, whole: Tensor, share: Share) -> Tensor:
    """``[B, D] -> [m, D]``: every rank's summand for this rank's rows, added in rank order.

    Communication: as ``gather_rows``.
    """
    longest = max(share.sizes)
    padded = whole.new_zeros(exchange.size, longest, whole.shape[1])
    for part, rows, size in zip(padded, whole.split(share.sizes), share.sizes, strict=True):
        part[:size] = rows
    got = exchange.exchange(padded.view(-1, whole.shape[1])).view_as(padded)
    total = got[0, : share.sizes[share.rank]].clone()
    for part in got[1:]:
        total += part[: share.sizes[share.rank]]
    return total


def split_columns(embeddings: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """The chunks' embeddings, joined column by column; ``counts`` chunks of each."""
    joined, begin = [], 0
    for count in counts:
        joined.append(torch.cat(list(embeddings[begin : begin + count])))
        begin += count
    return joined
