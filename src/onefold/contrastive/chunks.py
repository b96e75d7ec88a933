"""Chunks: a column of the batch in pieces, and what must be as it was to encode one again."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Column = Any
"""One input of the encoder for all rows: a tensor ``[B, ...]``, a mapping of such tensors (other
values are passed on whole), or a list or tuple of samples."""


class Rows(NamedTuple):
    """A range of a column."""

    column: int
    begin: int
    end: int


def num_rows(column: Column) -> int:
    """How many samples there are.

    Raises:
        TypeError: the column is none of the kinds.
        ValueError: tensors of one mapping have different numbers of rows.
    """
    if isinstance(column, Tensor):
        return len(column)
    if isinstance(column, Mapping):
        sizes = {key: len(value) for key, value in column.items() if isinstance(value, Tensor)}
        if len(set(sizes.values())) != 1:
            raise ValueError(
                f"GradCache: expected a mapping with tensors of equally many rows, got {sizes}. "
                "Pass what is not per row as something else than a tensor, or in the encoder."
            )
        return next(iter(sizes.values()))
    if isinstance(column, list | tuple):
        return len(column)
    raise TypeError(
        f"GradCache: expected columns that are tensors, mappings of tensors, lists or tuples, got "
        f"{type(column).__name__}."
    )


def take_rows(column: Column, rows: Rows) -> Column:
    """The samples of a range, in the column's own kind."""
    if isinstance(column, Mapping):
        return {
            key: value[rows.begin : rows.end] if isinstance(value, Tensor) else value
            for key, value in column.items()
        }
    return column[rows.begin : rows.end]


def cut(columns: Sequence[Column], size: int | None, tokens: int | None, mask: str) -> list[Rows]:
    """The chunks of all columns, column by column.

    Args:
        columns: of this rank.
        size: rows of a chunk; or
        tokens: the most that rows x longest row of a chunk may be. A longer single row is a chunk.
        mask: the key of the tensor ``[B, T]`` whose row sums are the rows' lengths.
    """
    found = []
    for number, column in enumerate(columns):
        count = num_rows(column)
        ends = _ends_by_size(count, size) if size else _ends_by_tokens(column, tokens or 1, mask)
        begin = 0
        for end in ends:
            found.append(Rows(number, begin, end))
            begin = end
    return found


def _ends_by_size(count: int, size: int) -> Iterator[int]:
    yield from range(size, count, size)
    if count:
        yield count


def _ends_by_tokens(column: Column, tokens: int, mask: str) -> Iterator[int]:
    lengths = _lengths(column, mask)
    begin = longest = 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if row > begin and longest * (row + 1 - begin) > tokens:
            yield row
            begin, longest = row, length
    if lengths:
        yield len(lengths)


def _lengths(column: Column, mask: str) -> list[int]:
    if isinstance(column, Mapping):
        if mask not in column:
            raise ValueError(
                f"GradCache(mini_batch_tokens=): expected {mask!r} in the inputs, got "
                f"{', '.join(map(str, column))}. Say mask=, or cut by mini_batch_size=."
            )
        lengths: list[int] = column[mask].sum(dim=1).tolist()
        return lengths
    if isinstance(column, Tensor):
        return [column.shape[1] if column.dim() > 1 else 1] * len(column)
    return [len(sample) for sample in column]


class Moment:
    """The random numbers and buffers that a chunk was encoded with.

    Buffers are cloned when they have changed since the last moment, so one that never changes is
    cloned once.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._buffers = [buffer for module in modules for buffer in module.buffers()]
        self._device = device
        self._versions: list[int] = []
        self._clones: list[Tensor] = []

    def now(self) -> "State":
        """What is at this moment."""
        versions = [buffer._version for buffer in self._buffers]
        if self._versions != versions:
            old = self._versions or [-1] * len(versions)
            kept = self._clones or self._buffers
            rows = zip(self._buffers, versions, old, kept, strict=True)
            self._clones = [
                clone if version == before else buffer.detach().clone()
                for buffer, version, before, clone in rows
            ]
            self._versions = versions
        cuda = self._device.type == "cuda"
        accelerator = torch.cuda.get_rng_state(self._device) if cuda else None
        return State(torch.get_rng_state(), accelerator, self._clones)

    def restore(self, state: "State") -> None:
        """Make it that moment again."""
        torch.set_rng_state(state.cpu)
        if state.accelerator is not None:
            torch.cuda.set_rng_state(state.accelerator, self._device)
        with torch.no_grad():
            for buffer, clone in zip(self._buffers, state.buffers, strict=True):
                if not torch.equal(buffer, clone):
                    buffer.copy_(clone)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever happens inside, afterwards it is as it was before."""
        state = self.now()
        try:
            yield
        finally:
            self.restore(state)


class State(NamedTuple):
    """A moment."""

    cpu: Tensor
    accelerator: Tensor | None
    buffers: list[Tensor]
