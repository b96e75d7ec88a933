"""Retrieval: how well anchors find their own positives among all positives."""

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

CUTOFF: Final = 10


class Retrieval(NamedTuple):
    """Means over the anchors."""

    mrr: float
    """Of 1 / place of the own positive, 0 below place 10 (MRR@10)."""
    recall: float
    """Of whether the own positive comes first (recall@1)."""


def evaluate(anchors: "Tensor", positives: "Tensor") -> Retrieval:
    """Rank all ``positives`` for each of the ``anchors`` by dot product.

    Args:
        anchors: ``[P, D]``.
        positives: ``[P, D]``; row i belongs to anchor i.
    """
    scores = anchors @ positives.T
    own = scores.diagonal().unsqueeze(1)
    # Whatever is not certainly worse comes first: ties, and NaN, must not look like success.
    places = (~(scores < own)).sum(dim=1)
    reciprocal = places.double().reciprocal() * (places <= CUTOFF)
    return Retrieval(reciprocal.mean().item(), (places == 1).double().mean().item())
