"""Narrow embeddings, logits beyond what exponentials hold, and what autocast must not do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onefold.contrastive import InfoNCE, SigLIP
from tests.contrastive.reference import (
    assert_alike,
    deviation,
    embeddings,
    gradients,
    info_nce,
    siglip,
)

LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "InfoNCE": (lambda: InfoNCE(tile=48), info_nce),
    "symmetric": (
        lambda: InfoNCE(symmetric=True, tile=48),
        lambda columns: info_nce(columns, symmetric=True),
    ),
    "dot": (
        lambda: InfoNCE(0.3, similarity="dot", tile=48),
        lambda columns: info_nce(columns, scale=0.3, similarity="dot"),
    ),
    "SigLIP": (lambda: SigLIP(tile=48, learnable=False), siglip),
}
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24}
"""The largest relative error of one rounding to nearest."""
SUMS = 2**-24 * 64
"""Of sums of 150 terms and exponentials of logits up to 20, in fp32."""


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_logits_are_fp32_and_gradients_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    """Against fp64 on the same, already rounded embeddings."""
    make, full = LOSSES[name]
    inputs = embeddings(150, 32, dtype=dtype)
    widened = [tensor.detach().double().requires_grad_() for tensor in inputs]
    value, *found = gradients(make(), inputs)
    true, *expected = gradients(lambda *c: full(c), widened)
    assert value.dtype == torch.float32
    assert deviation(value, true) < SUMS
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        largest = float(other.abs().max())
        # fp16 numbers below 2**-14 are 2**-24 apart.
        smallest = 2**-25 if dtype == torch.float16 else 0.0
        bound = ROUNDING[dtype] * other.abs() + SUMS * largest + smallest
        assert bool(((one.double() - other).abs() <= bound).all())


def test_logits_in_bf16_would_be_seen() -> None:
    """The control."""
    inputs = embeddings(150, 32, dtype=torch.bfloat16)
    widened = [tensor.detach().double() for tensor in inputs]
    assert deviation(info_nce(inputs), info_nce(widened)) > 50 * SUMS


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_does_not_reach_in(name: str) -> None:
    make, full = LOSSES[name]
    inputs = embeddings(50, 16, dtype=torch.float32)
    expected = gradients(make(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert_alike(gradients(make(), inputs), expected, 0)
        control = full(inputs)
    assert deviation(control, expected[0]) > 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("similarity", ["cos", "dot"])
def test_large_logits_do_not_overflow(similarity: Any, dtype: torch.dtype) -> None:
    """Up to 1e3 and 5e4, where exp() ends at 88 in fp32 and at 709 in fp64."""
    inputs = embeddings(40, 32, 3, dtype=dtype)
    widened = [tensor.detach().double().requires_grad_() for tensor in inputs]
    for make, full in (
        (InfoNCE, info_nce),
        (lambda *a, **k: SigLIP(*a, learnable=False, **k), siglip),
    ):
        columns = 3 if full is info_nce else 2
        loss = make(1000.0, similarity=similarity, tile=16)
        found = gradients(loss, inputs[:columns])
        assert all(bool(tensor.isfinite().all()) for tensor in found)
        expected = full(widened[:columns], scale=1000.0, similarity=similarity)
        assert deviation(found[0], expected) < 1e-5


@pytest.mark.parametrize("own", [4.0, 12.0, 20.0, 50.0])
def test_a_loss_of_nearly_nothing_has_all_its_digits(own: float) -> None:
    """In fp32; of torch's own cross-entropy nothing is left at 20."""
    anchors = (torch.eye(24) * own).sqrt().requires_grad_()
    widened = anchors.detach().double()
    loss = InfoNCE(1.0, similarity="dot", tile=5)
    value, found = gradients(lambda a: loss(a, a.detach()), [anchors])
    others = (widened @ widened.t()).fill_diagonal_(-torch.inf).exp()
    relative = others.sum(dim=1) / (widened @ widened.t()).diagonal().exp()
    assert deviation(value, relative.log1p().mean()) < 1e-6
    derived = others / (widened @ widened.t()).exp().sum(dim=1, keepdim=True)
    derived.diagonal().copy_(-derived.sum(dim=1))
    assert deviation(found, derived @ widened / 24) < 1e-6


def test_fp16_logits_beyond_the_largest_fp16_number() -> None:
    inputs = [torch.full((4, 64), 100.0, dtype=torch.float16) for _ in range(2)]
    found = InfoNCE(1.0, similarity="dot")(*inputs)  # logits of 640,000
    torch.testing.assert_close(found, torch.tensor(4.0).log())


def test_rows_of_zeros_have_gradients() -> None:
    inputs = embeddings(6, 4)
    inputs[0].data[2] = 0
    inputs[1].data[3] = 0
    assert all(bool(tensor.isfinite().all()) for tensor in gradients(InfoNCE(tile=4), inputs))


def test_nan_is_not_hidden() -> None:
    inputs = embeddings(6, 4)
    inputs[1].data[3, 1] = torch.nan
    for loss in (InfoNCE(tile=4), SigLIP(tile=4)):
        assert bool(loss(*inputs).isnan())


def test_products_beyond_the_dtype_are_not_hidden() -> None:
    inputs = [torch.full((3, 4), 1e30).requires_grad_() for _ in range(2)]
    found = gradients(InfoNCE(similarity="dot", tile=2), inputs)
    assert all(bool(tensor.isnan().all()) for tensor in found)
