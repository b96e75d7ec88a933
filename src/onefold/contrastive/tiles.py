"""Losses over all pairs of rows and columns, whose matrix of logits never exists whole.

Legend: M rows, N columns (of all column tensors together), D their width; r, c the rows and
columns of one tile. "Wide" is the dtype of the computation: fp32, or fp64 where the inputs are.
Logits are ``scale * rows @ columns.T + bias``.

Forward walks the matrix tile by tile, keeps up to three numbers per row and forgets the logits.
Backward computes each tile once more, turns it into the derivative with respect to the logits, and
multiplies that into the gradients. So both hold O((M + N) * D) numbers and one tile, and an
extra M * N * D multiplications are the price. (The idea is that of attention without its matrix:
online softmax, Milakov and Gimelshein, arXiv:1805.02867, algorithm 3.)

The own column of a row is its positive: column ``first_row + i`` of the first column tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FalseNegatives = Callable[[Tensor, Tensor, int], Tensor | None]
"""``(rows [r], columns [c], number) -> bool [r, c]``: which pairs of a tile have no part.

Rows and columns are int64 positions in the whole batch, ``number`` says which column tensor. None
stands for no pair. It is asked once in forward and once in backward, and must answer alike.
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of the matrix of logits; it lasts until the next one is asked for."""

    logits: Tensor  # [r, c], wide, to be overwritten; -inf where a pair has no part
    own: Tensor  # view of those logits that are of a row and its own column
    own_rows: slice  # the rows of ``own``, counted from the tile's first
    columns: Tensor  # [c, D], wide
    number: int  # of the column tensor
    place: slice  # of the columns in their tensor


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the matrix is walked.

    Attributes:
        size: rows and columns of a tile, at most.
        first_row: position of the first row in the whole batch, which is its own column.
        false_negatives: pairs that are left out; own columns never are.
    """

    size: int
    first_row: int = 0
    false_negatives: FalseNegatives | None = None

    def blocks(self, num_rows: int) -> Iterator[slice]:
        """The rows in groups of ``size``."""
        for start in range(0, num_rows, self.size):
            yield slice(start, min(start + self.size, num_rows))

    def tiles(
        self, rows: slice, scaled: Tensor, columns: Sequence[Tensor], bias: Tensor | None = None
    ) -> Iterator[Tile]:
        """All tiles of one block of rows.

        Args:
            rows: where the block is.
            scaled: the block ``[r, D]``, wide, times the scale.
            columns: the column tensors ``[n, D]``, any floating dtype.
            bias: 0-dim, wide.
        """
        memory = scaled.new_empty(len(scaled) * min(self.size, max(map(len, columns))))
        for number, whole in enumerate(columns):
            for place in self.blocks(len(whole)):
                part = whole[place].to(scaled.dtype)
                logits = memory[: len(scaled) * len(part)].view(len(scaled), len(part))
                if bias is None:
                    torch.mm(scaled, part.t(), out=logits)
                else:
                    torch.addmm(bias, scaled, part.t(), out=logits)
                # Beyond the tile the diagonal is empty.
                offset = self.first_row + rows.start - place.start if number == 0 else len(part)
                own = logits.diagonal(offset)
                skipped = max(0, -offset)
                own_rows = slice(skipped, skipped + len(own))
                tile = Tile(logits, own, own_rows, part, number, place)
                if self.false_negatives is not None:
                    self._leave_out(tile, rows)
                yield tile

    def _leave_out(self, tile: Tile, rows: slice) -> None:
        assert self.false_negatives is not None
        device = tile.logits.device
        row_positions = torch.arange(rows.start, rows.stop, device=device) + self.first_row
        positions = torch.arange(tile.place.start, tile.place.stop, device=device)
        left_out = self.false_negatives(row_positions, positions, tile.number)
        if left_out is None:
            return
        if left_out.shape != tile.logits.shape or left_out.dtype != torch.bool:
            raise ValueError(
                f"false_negatives(): for {len(row_positions)} rows and {len(positions)} columns "
                f"expected bool {list(tile.logits.shape)}, got {left_out.dtype} "
                f"{list(left_out.shape)}. Return one truth value per pair, or None."
            )
        own = tile.own.clone()
        tile.logits.masked_fill_(left_out, -torch.inf)
        tile.own.copy_(own)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What logits and sums of embeddings of this dtype are computed in."""
    return torch.promote_types(dtype, torch.float32)


def cross_entropy(rows: Tensor, columns: Sequence[Tensor], scale: Tensor, tiling: Tiling) -> Tensor:
    """Cross-entropy of each row: ``logsumexp over all columns of the logits - own logit``.

    Args:
        rows: ``[M, D]``; M may be 0.
        columns: at least one tensor ``[n, D]``, of the same dtype and device; the own columns are
            in the first.
        scale: 0-dim, wide; what products are multiplied with.
        tiling: tile size, where the rows begin, and what is left out.

    Returns:
        ``[M]``, wide, differentiable once with respect to rows, columns and scale.

    Raises:
        ValueError: what ``tiling.false_negatives`` returned is not bool ``[r, c]``.
        NotImplementedError: in backward, with ``create_graph=True``.
    Memory: saves its inputs and 3 M numbers; at most one tile of logits at a time. Backward makes
        the gradients, those of the columns wide until it ends.
    Source: InfoNCE (arXiv:1807.03748) eq. 4; online softmax (arXiv:1805.02867) algorithm 3.
    """
    losses: Tensor = _CrossEntropy.apply(tiling, rows, scale, *columns)  # type: ignore[no-untyped-call]
    return losses


def sigmoid_loss(
    rows: Tensor, columns: Tensor, scale: Tensor, bias: Tensor, tiling: Tiling
) -> Tensor:
    """Of each row the sum over all columns of ``log(1 + exp(-z * logit))``; z is 1 or -1.

    Args:
        rows: ``[M, D]``; M may be 0.
        columns: ``[N, D]``, same dtype and device. z is 1 for the own column, -1 for the others.
        scale: 0-dim, wide; what products are multiplied with.
        bias: 0-dim, wide; what is added to them then.
        tiling: tile size, where the rows begin, and what is left out.

    Returns:
        ``[M]``, wide, differentiable once with respect to all four tensors.

    Raises:
        ValueError, NotImplementedError: as ``cross_entropy``.
    Memory: saves its inputs alone; at most two tiles at a time. Backward makes the gradients, those
        of the columns wide until it ends.
    Source: SigLIP (arXiv:2303.15343) eq. 2 and algorithm 1.
    """
    losses: Tensor = _SigmoidLoss.apply(tiling, rows, scale, bias, columns)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    """See ``cross_entropy``. Saved per row: largest logit, and two sums relative to it.

    Their log-sum-exp would be one number, but not precise where logits are large: at 1000 the
    nearest fp32 numbers are 6e-5 apart, and so would be the relative error of each probability.
    And where the own logit is far above the others, their sum is lost beside it; kept apart it
    gives the loss, and the derivative with respect to the own logit, all their digits.
    """

    @staticmethod
    def forward(ctx: Any, tiling: Tiling, rows: Tensor, scale: Tensor, *columns: Tensor) -> Tensor:
        # The lowest finite number: with -inf a tile without any pair would make -inf - -inf.
        largest = scale.new_full((len(rows),), torch.finfo(scale.dtype).min)  # [M], of others
        others = torch.zeros_like(largest)  # [M], sum of exp(logit - largest)
        own = torch.empty_like(largest)  # [M]
        with torch.autocast(rows.device.type, enabled=False):
            for block in tiling.blocks(len(rows)):
                scaled = rows[block].to(scale.dtype) * scale
                block_largest, block_others = largest[block], others[block]  # views
                for tile in tiling.tiles(block, scaled, columns):
                    own[block][tile.own_rows] = tile.own
                    tile.own.fill_(-torch.inf)
                    now = torch.maximum(block_largest, tile.logits.amax(dim=1))
                    tile.logits.sub_(now.unsqueeze(1)).exp_()
                    block_others.mul_((block_largest - now).exp_()).add_(tile.logits.sum(dim=1))
                    block_largest.copy_(now)
        of_others, largest = largest, torch.maximum(largest, own)
        others.mul_((of_others - largest).exp_())
        below = largest - own  # nan where logits overflowed, and so is the loss then
        total = others + (-below).exp_()
        ctx.tiling = tiling
        ctx.save_for_backward(rows, scale, largest, others, total, *columns)
        return torch.where(below == 0, others.log1p(), below + total.log())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_graph("cross_entropy")
        rows, scale, largest, others, total, *columns = ctx.saved_tensors

        def derive(tile: Tile, block: slice) -> Tensor:
            """Softmax less one at the own column, both times ``total``."""
            tile.logits.sub_(largest[block].unsqueeze(1)).exp_()
            tile.own.copy_(others[block][tile.own_rows]).neg_()
            return tile.logits

        sums = _Sums(ctx.tiling, rows, scale, None, columns)
        needs_rows, needs_scale, *needs_columns = ctx.needs_input_grad[1:]
        sums.add_tiles(derive, grad / total, needs_rows or needs_scale, needs_columns, False)
        return None, sums.of_rows, sums.of_scale, *sums.of_columns()


class _SigmoidLoss(torch.autograd.Function):
    """See ``sigmoid_loss``."""

    @staticmethod
    def forward(
        ctx: Any, tiling: Tiling, rows: Tensor, scale: Tensor, bias: Tensor, columns: Tensor
    ) -> Tensor:
        losses = scale.new_zeros(len(rows))
        with torch.autocast(rows.device.type, enabled=False):
            for block in tiling.blocks(len(rows)):
                scaled = rows[block].to(scale.dtype) * scale
                for tile in tiling.tiles(block, scaled, [columns], bias):
                    tile.own.neg_()
                    # Above the threshold log(1 + exp(x)) is x: at 40 to within 5e-18, in fp64 too.
                    softplus = torch.nn.functional.softplus(tile.logits, threshold=40)
                    losses[block].add_(softplus.sum(dim=1))
        ctx.tiling = tiling
        ctx.save_for_backward(rows, scale, bias, columns)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_graph("sigmoid_loss")
        rows, scale, bias, columns = ctx.saved_tensors

        def derive(tile: Tile, block: slice) -> Tensor:
            tile.own.neg_()
            tile.logits.sigmoid_()
            tile.own.neg_()
            return tile.logits

        sums = _Sums(ctx.tiling, rows, scale, bias, [columns])
        needs_rows, needs_scale, needs_bias, needs_columns = ctx.needs_input_grad[1:]
        sums.add_tiles(derive, grad, needs_rows or needs_scale, [needs_columns], needs_bias)
        return None, sums.of_rows, sums.of_scale, sums.of_bias, *sums.of_columns()


def _refuse_graph(who: str) -> None:
    # once_differentiable would let this pass where the loss itself is differentiated: its marks
    # hang on the incoming gradient, and the second derivative through the embeddings would be 0.
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{who}(): its gradients are not differentiable, and backward was called with "
            "create_graph=True. Differentiate this loss without that, or use a full matrix."
        )


class _Sums:
    """The gradients, while the tiles' parts are added to them.

    With ``G [M, N]``, the derivative with respect to the logits, they are ``scale * G @ columns``,
    ``scale * G.T @ rows`` and the sum of G. That of the scale is the sum of ``G * (rows @
    columns.T)``, which is the sum of ``rows * (G @ columns)``: no pass over tiles of its own.
    """

    def __init__(
        self,
        tiling: Tiling,
        rows: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        columns: Sequence[Tensor],
    ) -> None:
        self._tiling = tiling
        self._rows = rows
        self._scale = scale
        self._bias = bias
        self._columns = columns
        self._wide: list[Tensor | None] = []
        self.of_rows: Tensor | None = None
        self.of_scale: Tensor | None = None
        self.of_bias: Tensor | None = None

    def of_columns(self) -> list[Tensor | None]:
        """In the columns' dtype."""
        return [
            None if wide is None else wide.to(columns.dtype)
            for wide, columns in zip(self._wide, self._columns, strict=True)
        ]

    def add_tiles(
        self,
        derive: Callable[[Tile, slice], Tensor],
        factor: Tensor,
        needs_rows: bool,
        needs_columns: Sequence[bool],
        needs_bias: bool,
    ) -> None:
        """Walk the matrix once.

        Args:
            derive: makes a tile of logits, in place, one of ``G / factor``.
            factor: ``[M]``, wide: kept out of the tiles, which spares a pass over each.
            needs_rows: whether gradients of rows or scale are wanted.
            needs_columns: the same for each column tensor.
            needs_bias: the same for the bias.
        """
        rows, scale = self._rows, self._scale
        self._wide = [
            columns.new_zeros(columns.shape, dtype=scale.dtype) if needed else None
            for columns, needed in zip(self._columns, needs_columns, strict=True)
        ]
        if needs_rows:
            self.of_rows, self.of_scale = torch.empty_like(rows), torch.zeros_like(scale)
        if needs_bias:
            self.of_bias = torch.zeros_like(scale)
        with torch.autocast(rows.device.type, enabled=False):
            for block in self._tiling.blocks(len(rows)):
                wide = rows[block].to(scale.dtype)
                scaled, weight = wide * scale, factor[block].unsqueeze(1)
                weighted = scaled * weight
                product = torch.zeros_like(scaled) if needs_rows else None
                for tile in self._tiling.tiles(block, scaled, self._columns, self._bias):
                    derived = derive(tile, block)
                    if product is not None:
                        product.addmm_(derived, tile.columns)
                    of_columns = self._wide[tile.number]
                    if of_columns is not None:
                        of_columns[tile.place].addmm_(derived.t(), weighted)
                    if self.of_bias is not None:
                        self.of_bias += torch.dot(derived.sum(dim=1), factor[block])
                if self.of_rows is not None and self.of_scale is not None and product is not None:
                    product.mul_(weight)
                    self.of_scale += (wide * product).sum()
                    self.of_rows[block] = product.mul_(scale)
