"""Contrastive losses of a whole batch, of which each rank computes the summand of its rows.

Legend: C columns of the data (anchors, positives, then hard negatives), m rows of this rank, B rows
of the whole batch over all ranks, D the width of embeddings. "Wide" is fp32, or fp64 where the
embeddings are.

Nothing here talks to other ranks: who gathers embeddings, and sums values and gradients, calls
``partial``. That order (embed without a graph, compute the loss's gradients with respect to the
embeddings, embed once more with a graph) is GradCache's, Gao et al., arXiv:2101.06983.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onefold.contrastive import checks
from onefold.contrastive.tiles import (
    FalseNegatives,
    Tiling,
    cross_entropy,
    sigmoid_loss,
    wide_dtype,
)

Similarity = Literal["cos", "dot"]

TILE: Final = 1024
"""4 MiB of fp32 logits: small beside embeddings, large enough for a matrix product's full speed."""


class ContrastiveLoss(nn.Module, ABC):
    """A loss of a whole batch that is a sum over its rows, so that each rank computes its part.

    Embeddings come as C columns: anchors, their positives, then any number of hard negatives; row i
    of each belongs to pair i.

    Attributes:
        max_scale: a learnable scale is held at or below this.
        max_columns: the most columns the loss has a meaning for; None for any number.
        needs_all_anchors: whether the anchors of other ranks have a part in ``partial``. Where not,
            ``everything[0]`` is not read, nothing needs to be gathered for it, and an expanded
            zero will do in its place.
        log_scale: the learnable scale's logarithm, fp32, 0-dim; None if the scale is fixed.
    """

    max_scale: ClassVar[float] = math.inf
    max_columns: ClassVar[int | None] = None
    log_scale: nn.Parameter | None

    def __init__(self, scale: float, learnable_scale: bool, similarity: str, tile: int) -> None:
        super().__init__()
        who = f"{type(self).__name__}()"
        limit = self.max_scale if learnable_scale else math.inf
        checks.check_number(who, "scale", scale, 0, limit)
        checks.check_choices(who, similarity, tile)
        self.similarity = similarity
        self.tile = tile
        self._first_scale = float(scale)
        log_scale = _parameter(math.log(scale)) if learnable_scale else None
        self.register_parameter("log_scale", log_scale)

    @property
    def needs_all_anchors(self) -> bool:
        """See the class."""
        return False

    def forward(
        self,
        *embeddings: Tensor,
        ids: Tensor | None = None,
        false_negatives: FalseNegatives | None = None,
    ) -> Tensor:
        """The loss of one process with the whole batch: C tensors ``[B, D]``, see ``partial``."""
        return self._of("forward", embeddings, embeddings, 0, ids, false_negatives)

    def partial(
        self,
        rows: Sequence[Tensor],
        everything: Sequence[Tensor],
        first_row: int,
        *,
        ids: Tensor | None = None,
        false_negatives: FalseNegatives | None = None,
    ) -> Tensor:
        """This rank's summand of the whole batch's loss.

        The sum of all ranks' values is the loss of one process that has the whole batch. So it is
        with gradients: the whole batch's are, for each column, the sum over ranks of those of
        ``everything``, and in this rank's rows those of ``rows`` beside. A tensor that has no part
        in the loss gets none. Ranks may have different numbers of rows, also none.

        Args:
            rows: this rank's embeddings, C tensors ``[m, D]``, fp16, bf16, fp32 or fp64.
            everything: the same columns of the whole batch, C tensors ``[B, D]`` in rank order.
            first_row: where this rank's rows begin in them.
            ids: integers ``[B]``, the same on all ranks, in rank order: rows that have the same id
                are about the same thing, and their positives are no negatives for each other. With
                ``[B, C - 1]`` each candidate has its own, in the order of ``everything[1:]``; the
                anchor's is its positive's. With ``[B]`` hard negatives are always negatives.
            false_negatives: instead of ids, says which pairs are left out: called with positions of
                anchors ``[r]`` and candidates ``[c]`` in the whole batch (int64), and the number of
                the candidates' column (0 for positives, then those of hard negatives), it returns
                bool ``[r, c]``, or None if all have a part. It is called again in backward and must
                answer alike.

        A pair's own positive is never left out.

        Returns:
            0-dim, wide; differentiable once.

        Raises:
            ValueError: numbers of columns, shapes, dtypes or devices do not fit; B is 0; the rows
                lie outside of the whole batch; both ids and false_negatives are given; what
                false_negatives returned is not bool ``[r, c]``.
            NotImplementedError: in backward, with ``create_graph=True``.
        Memory: for "cos" the normalised embeddings, wide; up to three numbers per row; at most two
            tiles of ``tile ** 2`` logits, wide. Backward: the gradients, wide, and a tile. Never
            ``[m, B]``.
        Communication: none.
        """
        return self._of("partial", rows, everything, first_row, ids, false_negatives)

    def _of(
        self,
        method: str,
        rows: Sequence[Tensor],
        everything: Sequence[Tensor],
        first_row: int,
        ids: Tensor | None,
        false_negatives: FalseNegatives | None,
    ) -> Tensor:
        who = f"{type(self).__name__}.{method}()"
        checks.check_columns(who, rows, everything, self.max_columns)
        checks.check_embeddings(who, rows, everything, first_row)
        if ids is not None:
            if false_negatives is not None:
                raise ValueError(
                    f"{who}: expected ids or false_negatives, got both. Compare ids in "
                    "false_negatives, or leave that out."
                )
            checks.check_ids(who, ids, everything)
            false_negatives = _with_same_id(ids)
        losses = self._row_losses(_Batch(self, rows, everything), first_row, false_negatives)
        return losses.sum() / len(everything[0])

    @abstractmethod
    def _row_losses(
        self, batch: "_Batch", first_row: int, false_negatives: FalseNegatives | None
    ) -> Tensor:
        """The losses of this rank's rows, ``[m]``, wide; the loss is their sum over B."""

    def _scale(self, like: Tensor) -> Tensor:
        """0-dim, wide, on the device of embeddings."""
        wide = wide_dtype(like.dtype)
        if self.log_scale is None:
            return like.new_full((), self._first_scale, dtype=wide)
        log_scale = self.log_scale.to(device=like.device, dtype=wide)
        if self.max_scale == math.inf:
            return log_scale.exp()
        # Clamped in value only. A zero gradient would hold it there for ever once a step went
        # beyond, and one that depended on its sign would not be the sum of the ranks' gradients.
        beyond = (log_scale.detach() - math.log(self.max_scale)).clamp(min=0)
        return (log_scale - beyond).exp()

    def extra_repr(self) -> str:
        """The settings, as ``print(model)`` shows them."""
        start = ", learnable" if self.log_scale is not None else ""
        return f"scale={self._first_scale}{start}, similarity={self.similarity!r}, tile={self.tile}"


def _parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float32))


class _Batch:
    """The embeddings as the logits take them; normalised once each, where asked for."""

    def __init__(
        self, loss: ContrastiveLoss, rows: Sequence[Tensor], everything: Sequence[Tensor]
    ) -> None:
        self._rows = rows
        self._everything = everything
        self._normalises = loss.similarity == "cos"
        self._normalised: dict[int, Tensor] = {}
        self.num_columns = len(rows)
        self.scale = loss._scale(rows[0])

    def rows(self, column: int) -> Tensor:
        """``[m, D]``."""
        return self._prepared(self._rows[column])

    def everything(self, column: int) -> Tensor:
        """``[B, D]``."""
        return self._prepared(self._everything[column])

    def _prepared(self, embeddings: Tensor) -> Tensor:
        if not self._normalises:
            return embeddings
        # One process passes the same tensors twice, as rows and as everything.
        if id(embeddings) not in self._normalised:
            # Wide, because a unit vector rounded to 16 bits is off by more than its products.
            wide = embeddings.to(wide_dtype(embeddings.dtype))
            self._normalised[id(embeddings)] = F.normalize(wide, dim=-1)
        return self._normalised[id(embeddings)]


def _with_same_id(ids: Tensor) -> FalseNegatives:
    """Leaves out candidates whose id is the anchor's; of columns without ids none."""
    ids = ids.view(len(ids), -1)

    def false_negatives(anchors: Tensor, candidates: Tensor, number: int) -> Tensor | None:
        if number >= ids.shape[1]:
            return None
        return ids[anchors, :1] == ids[candidates, number]

    return false_negatives


def _reversed(asked: FalseNegatives) -> FalseNegatives:
    """The same pairs, where positives are the rows and anchors the columns."""

    def false_negatives(positives: Tensor, anchors: Tensor, number: int) -> Tensor | None:
        left_out = asked(anchors, positives, number)
        return None if left_out is None else left_out.t()

    return false_negatives


class InfoNCE(ContrastiveLoss):
    """InfoNCE with in-batch and hard negatives: each anchor is to find its own positive.

    The candidates of an anchor are all positives and all hard negatives of the whole batch. Its
    loss is the cross-entropy of the softmax over ``scale * similarity``; the loss is the mean over
    the B anchors. It is also called the multiple negatives ranking or NT-Xent loss.

    Args:
        scale: the inverse temperature, above 0.
        learnable_scale: make its logarithm the parameter ``log_scale``, as CLIP does. What forward
            uses is held at or below ``max_scale``, 100; the gradient is then that at 100, so that a
            parameter beyond it can come back. Clamp it after each step, as CLIP does, to keep it
            from drifting.
        symmetric: the mean of this loss and that of the other direction, in which the candidates of
            a positive are the anchors of the whole batch. With it ``everything[0]`` is needed.
        similarity: "cos" or "dot". "cos" normalises embeddings, in fp32 or wider; one shorter than
            1e-12 is divided by that instead.
        tile: rows and columns of the largest part of the matrix that exists at a time. Larger ones
            may be faster on a GPU.

    Shapes, dtypes, errors and memory are those of ``ContrastiveLoss.partial``.

    Raises:
        ValueError: a setting is not one of these.
    Time: 4/3 of the multiplications of the full matrix, as backward makes each tile anew; with
        ``symmetric`` 8/3, because each direction has its own.
    Source: van den Oord et al. (arXiv:1807.03748) eq. 4; the symmetric form and learnable scale
        after CLIP, Radford et al. (arXiv:2103.00020) fig. 3 and sec. 2.5.
    """

    max_scale = 100.0

    def __init__(
        self,
        scale: float = 20.0,
        *,
        learnable_scale: bool = False,
        symmetric: bool = False,
        similarity: Similarity = "cos",
        tile: int = TILE,
    ) -> None:
        super().__init__(scale, learnable_scale, similarity, tile)
        self.symmetric = symmetric

    @property
    def needs_all_anchors(self) -> bool:
        """See ``ContrastiveLoss``."""
        return self.symmetric

    def _row_losses(
        self, batch: _Batch, first_row: int, false_negatives: FalseNegatives | None
    ) -> Tensor:
        candidates = [batch.everything(column) for column in range(1, batch.num_columns)]
        tiling = Tiling(self.tile, first_row, false_negatives)
        losses = cross_entropy(batch.rows(0), candidates, batch.scale, tiling)
        if not self.symmetric:
            return losses
        tiling = Tiling(self.tile, first_row, false_negatives and _reversed(false_negatives))
        reverse = cross_entropy(batch.rows(1), [batch.everything(0)], batch.scale, tiling)
        return (losses + reverse) / 2

    def extra_repr(self) -> str:
        """The settings, as ``print(model)`` shows them."""
        return f"{super().extra_repr()}, symmetric={self.symmetric}"


class SigLIP(ContrastiveLoss):
    """The pairwise sigmoid loss: is this candidate the anchor's own positive, yes or no.

    The sum over all pairs of the whole batch of ``log(1 + exp(-z * (scale * similarity + bias)))``,
    divided by B; z is 1 for an anchor and its own positive, -1 for every other. It takes two
    columns; hard negatives have no place in it.

    Args:
        scale: the inverse temperature, above 0. The default, as that of the bias, is the paper's.
        bias: what is added to logits.
        learnable: make the logarithm of the scale the parameter ``log_scale`` and the bias the
            parameter ``bias``, as in the paper. The scale has no upper limit: published models have
            learned more than 100.
        similarity: "cos" or "dot", as for ``InfoNCE``.
        tile: as for ``InfoNCE``.

    Shapes, dtypes, errors and memory are those of ``ContrastiveLoss.partial``.

    Raises:
        ValueError: a setting is not one of these.
    Source: Zhai et al. (arXiv:2303.15343) eq. 2 and algorithm 1.
    """

    max_columns = 2
    bias: nn.Parameter | None

    def __init__(
        self,
        scale: float = 10.0,
        bias: float = -10.0,
        *,
        learnable: bool = True,
        similarity: Similarity = "cos",
        tile: int = TILE,
    ) -> None:
        super().__init__(scale, learnable, similarity, tile)
        checks.check_number("SigLIP()", "bias", bias, -math.inf, math.inf)
        self._first_bias = float(bias)
        self.register_parameter("bias", _parameter(bias) if learnable else None)

    def _row_losses(
        self, batch: _Batch, first_row: int, false_negatives: FalseNegatives | None
    ) -> Tensor:
        bias = torch.full_like(batch.scale, self._first_bias)
        if self.bias is not None:
            bias = self.bias.to(batch.scale)
        tiling = Tiling(self.tile, first_row, false_negatives)
        return sigmoid_loss(batch.rows(0), batch.everything(1), batch.scale, bias, tiling)

    def extra_repr(self) -> str:
        """The settings, as ``print(model)`` shows them."""
        return f"{super().extra_repr()}, bias={self._first_bias}"
