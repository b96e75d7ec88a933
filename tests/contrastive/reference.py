"""The same losses with the whole matrix of logits, in plain torch; and how to compare."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

EXACT = 1e-12
"""Relative to a tensor's largest magnitude, in fp64: rounding of sums in another order."""
NOTHING = 1e-14
"""What such rounding may leave of a gradient that is nearly 0; embeddings are about 1."""


def logits_of(rows: Tensor, columns: Tensor, scale: Tensor | float, similarity: str) -> Tensor:
    if similarity == "cos":
        rows, columns = F.normalize(rows, dim=-1), F.normalize(columns, dim=-1)
    return scale * (rows @ columns.t())


def info_nce(
    columns: Sequence[Tensor],
    *,
    scale: Tensor | float = 20.0,
    symmetric: bool = False,
    similarity: str = "cos",
    left_out: Tensor | None = None,
) -> Tensor:
    """``left_out``: bool ``[B, B * (C - 1)]``."""
    anchors, *candidates = columns
    own = torch.arange(len(anchors))
    logits = logits_of(anchors, torch.cat(candidates), scale, similarity)
    if left_out is not None:
        logits = logits.masked_fill(left_out, -torch.inf)
    loss = F.cross_entropy(logits, own)
    if symmetric:
        logits = logits_of(candidates[0], anchors, scale, similarity)
        if left_out is not None:
            logits = logits.masked_fill(left_out[:, : len(anchors)].t(), -torch.inf)
        loss = (loss + F.cross_entropy(logits, own)) / 2
    return loss


def siglip(
    columns: Sequence[Tensor],
    *,
    scale: Tensor | float = 10.0,
    bias: Tensor | float = -10.0,
    similarity: str = "cos",
    left_out: Tensor | None = None,
) -> Tensor:
    """``left_out``: bool ``[B, B]``."""
    anchors, positives = columns
    logits = logits_of(anchors, positives, scale, similarity) + bias
    z = 2 * torch.eye(len(anchors), dtype=logits.dtype) - 1
    pairs = -F.logsigmoid(z * logits)
    if left_out is not None:
        pairs = pairs.masked_fill(left_out, 0)
    return pairs.sum() / len(anchors)


def same_id(ids: Tensor, num_candidates: int) -> Tensor:
    """Which candidates are left out, pair by pair: ``[B, B * (C - 1)]``."""
    batch = len(ids)
    of_anchor = ids if ids.ndim == 1 else ids[:, 0]
    left_out = torch.zeros(batch, num_candidates, batch, dtype=torch.bool)
    for anchor in range(batch):
        for number in range(1 if ids.ndim == 1 else num_candidates):
            of_candidate = ids if ids.ndim == 1 else ids[:, number]
            for row in range(batch):
                is_own = number == 0 and row == anchor
                left_out[anchor, number, row] = not is_own and bool(
                    of_anchor[anchor] == of_candidate[row]
                )
    return left_out.flatten(1)


def embeddings(
    batch: int, width: int, columns: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """Leaves; positives resemble their anchors, as trained ones do."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(columns, batch, width, dtype=torch.float64, generator=generator)
    made[1] += made[0]
    return [column.to(dtype).requires_grad_() for column in made]


def gradients(
    loss: Callable[..., Tensor], inputs: Sequence[Tensor], *more: Tensor | None
) -> list[Tensor]:
    """The value, and its gradients with respect to the inputs and more."""
    value = loss(*inputs)
    wanted = [*inputs, *(tensor for tensor in more if tensor is not None)]
    found = torch.autograd.grad(value, wanted, allow_unused=True)
    return [
        value.detach(),
        *(
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(wanted, found, strict=True)
        ),
    ]


def deviation(found: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest magnitude expected."""
    if not expected.numel():
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max()) / (float(expected.abs().max()) or 1.0)


def assert_alike(
    found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = EXACT
) -> None:
    assert len(found) == len(expected)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        worst = deviation(one, other)
        is_nothing = tolerance > 0 and bool(((one - other).abs() < NOTHING).all())
        # Neither comparison holds for nan.
        assert worst <= tolerance or is_nothing, f"number {place}: {worst:.2g}"
