"""Tiled losses are those of the full matrix: values, and every gradient."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from onefold.contrastive import ContrastiveLoss, InfoNCE, SigLIP
from tests.contrastive.reference import (
    assert_alike,
    deviation,
    embeddings,
    gradients,
    info_nce,
    same_id,
    siglip,
)

Loss = TypeVar("Loss", bound=ContrastiveLoss)

SHAPES = [(1, 1), (2, 3), (7, 5), (16, 8), (33, 4)]
TILES = [1, 3, 8, 16, 100]


def doubled(loss: Loss) -> Loss:
    """Parameters in fp64, so that the reference computes with the same numbers."""
    return loss.double()


@pytest.mark.parametrize("similarity", ["cos", "dot"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("batch", "width"), SHAPES)
def test_info_nce(
    batch: int, width: int, tile: int, negatives: int, symmetric: bool, similarity: Any
) -> None:
    loss = InfoNCE(5.0, symmetric=symmetric, similarity=similarity, tile=tile)
    inputs = embeddings(batch, width, 2 + negatives)

    def full(*columns: Tensor) -> Tensor:
        return info_nce(columns, scale=5.0, symmetric=symmetric, similarity=similarity)

    assert_alike(gradients(loss, inputs), gradients(full, inputs))


@pytest.mark.parametrize("similarity", ["cos", "dot"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("batch", "width"), SHAPES)
def test_siglip(batch: int, width: int, tile: int, similarity: Any) -> None:
    loss = doubled(SigLIP(3.0, -2.0, similarity=similarity, tile=tile))
    inputs = embeddings(batch, width)

    def full(*columns: Tensor) -> Tensor:
        assert loss.log_scale is not None
        assert loss.bias is not None
        return siglip(columns, scale=loss.log_scale.exp(), bias=loss.bias, similarity=similarity)

    more = list(loss.parameters())
    assert len(more) == 2
    assert_alike(gradients(loss, inputs, *more), gradients(full, inputs, *more))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("tile", [3, 64])
def test_learnable_scale(symmetric: bool, tile: int) -> None:
    loss = doubled(InfoNCE(7.0, learnable_scale=True, symmetric=symmetric, tile=tile))
    inputs = embeddings(20, 6, 3)

    def full(*columns: Tensor) -> Tensor:
        assert loss.log_scale is not None
        return info_nce(columns, scale=loss.log_scale.exp(), symmetric=symmetric)

    assert_alike(gradients(loss, inputs, loss.log_scale), gradients(full, inputs, loss.log_scale))


def test_learnable_scale_is_held_at_its_maximum_and_can_come_back() -> None:
    loss = doubled(InfoNCE(100.0, learnable_scale=True))
    inputs = embeddings(20, 6)
    assert loss.log_scale is not None
    at_maximum = gradients(loss, inputs, loss.log_scale)
    with torch.no_grad():
        loss.log_scale.add_(1)
    assert_alike(gradients(loss, inputs, loss.log_scale), at_maximum, 1e-11)
    assert float(at_maximum[-1]) != 0


def test_siglip_has_no_maximum() -> None:
    loss = doubled(SigLIP(1000.0, -3.0))
    inputs = embeddings(9, 4)
    found = gradients(loss, inputs)
    assert_alike(found, gradients(lambda *c: siglip(c, scale=1000.0, bias=-3.0), inputs), 1e-6)


@pytest.mark.parametrize("of_candidates", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("tile", [1, 4, 64])
def test_ids(tile: int, symmetric: bool, of_candidates: bool) -> None:
    inputs = embeddings(15, 4, 4)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, (15, 3) if of_candidates else (15,), generator=generator)
    left_out = same_id(ids, 3)
    assert 20 < int(left_out.sum()) < 300
    loss = InfoNCE(symmetric=symmetric, tile=tile)
    expected = gradients(lambda *c: info_nce(c, symmetric=symmetric, left_out=left_out), inputs)
    assert_alike(gradients(lambda *c: loss(*c, ids=ids), inputs), expected)

    def false_negatives(anchors: Tensor, candidates: Tensor, number: int) -> Tensor:
        return left_out.view(15, 3, 15)[:, number][anchors][:, candidates]

    found = gradients(lambda *c: loss(*c, false_negatives=false_negatives), inputs)
    assert_alike(found, expected)
    control = gradients(lambda *c: info_nce(c, symmetric=symmetric), inputs)
    assert deviation(control[0], expected[0]) > 1e-3


@pytest.mark.parametrize("tile", [1, 4, 64])
def test_ids_of_siglip(tile: int) -> None:
    inputs = embeddings(15, 4)
    ids = torch.arange(15) // 4
    loss = SigLIP(tile=tile, learnable=False)
    expected = gradients(lambda *c: siglip(c, left_out=same_id(ids, 1)), inputs)
    assert_alike(gradients(lambda *c: loss(*c, ids=ids), inputs), expected)


def test_where_all_are_about_the_same_each_has_its_own_positive_alone() -> None:
    inputs = embeddings(9, 4)
    found = gradients(lambda *c: InfoNCE(tile=2)(*c, ids=torch.ones(9, dtype=torch.int32)), inputs)
    assert all(float(tensor.abs().max()) < 1e-14 for tensor in found)


def test_no_false_negatives_is_the_loss_without_the_argument() -> None:
    inputs = embeddings(9, 4, 3)
    loss = InfoNCE(symmetric=True, tile=4)
    found = gradients(lambda *c: loss(*c, false_negatives=lambda *_: None), inputs)
    assert_alike(found, gradients(loss, inputs), 0)


@pytest.mark.parametrize(
    "loss",
    [
        InfoNCE(3.0, learnable_scale=True, tile=2),
        InfoNCE(3.0, learnable_scale=True, symmetric=True, tile=3),
        InfoNCE(1.0, learnable_scale=True, similarity="dot", tile=4),
    ],
)
def test_gradcheck_of_info_nce(loss: nn.Module) -> None:
    inputs = embeddings(5, 3, 3)
    log_scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 1, 2, 0, 3])

    def call(log_scale: Tensor, *columns: Tensor) -> Any:
        return functional_call(loss, {"log_scale": log_scale}, columns, {"ids": ids})

    assert torch.autograd.gradcheck(call, (log_scale, *inputs))


def test_gradcheck_of_siglip() -> None:
    loss = SigLIP(tile=2)
    parameters = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.5, -1.0)]

    def call(log_scale: Tensor, bias: Tensor, *columns: Tensor) -> Any:
        return functional_call(loss, {"log_scale": log_scale, "bias": bias}, columns)

    assert torch.autograd.gradcheck(call, (*parameters, *embeddings(5, 3)))


@settings(max_examples=60)
@given(
    batch=st.integers(1, 12),
    width=st.integers(1, 5),
    tile=st.integers(1, 14),
    negatives=st.integers(0, 2),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    batch: int, width: int, tile: int, negatives: int, symmetric: bool, seed: int
) -> None:
    inputs = embeddings(batch, width, 2 + negatives, seed=seed)
    kinds = 1 + seed % 12
    ids = torch.randint(kinds, (batch,), generator=torch.Generator().manual_seed(seed))
    left_out = same_id(ids, 1 + negatives)
    loss = InfoNCE(4.0, symmetric=symmetric, similarity="dot", tile=tile)
    found = gradients(lambda *c: loss(*c, ids=ids), inputs)
    expected = gradients(
        lambda *c: info_nce(c, scale=4.0, symmetric=symmetric, similarity="dot", left_out=left_out),
        inputs,
    )
    for one, other in zip(found, expected, strict=True):
        # The gradients of well separated pairs are nearly nothing, and embeddings are about 1.
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert float(found[0]) >= 0


@pytest.mark.parametrize("make", [lambda: InfoNCE(tile=3), lambda: SigLIP(tile=3)])
def test_only_the_gradients_that_are_wanted(make: Callable[[], nn.Module]) -> None:
    loss = make()
    inputs = embeddings(8, 4)
    whole = gradients(loss, inputs)
    for wanted in (0, 1):
        some = [
            tensor if place == wanted else tensor.detach() for place, tensor in enumerate(inputs)
        ]
        (found,) = torch.autograd.grad(loss(*some), some[wanted])
        assert_alike([found], [whole[1 + wanted]], 0)
    if isinstance(loss, SigLIP):
        loss(*(tensor.detach() for tensor in inputs)).backward()
        assert loss.bias is not None
        assert loss.bias.grad is not None


@pytest.mark.parametrize("loss", [InfoNCE(), SigLIP()])
def test_differentiating_twice_is_refused(loss: nn.Module) -> None:
    inputs = embeddings(4, 3)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(loss(*inputs), inputs[0], create_graph=True)


def test_parameters_are_in_the_state_dict() -> None:
    assert InfoNCE().state_dict() == {}
    assert list(InfoNCE(learnable_scale=True).state_dict()) == ["log_scale"]
    assert sorted(SigLIP().state_dict()) == ["bias", "log_scale"]
    assert SigLIP(learnable=False).state_dict() == {}
    loss = InfoNCE(14.0, learnable_scale=True)
    assert loss.log_scale is not None
    assert loss.log_scale.dtype == torch.float32
    assert math.isclose(loss.log_scale.item(), math.log(14.0), rel_tol=1e-6)


def test_settings_are_shown() -> None:
    shown = str(InfoNCE(30.0, symmetric=True))
    assert shown == "InfoNCE(scale=30.0, similarity='cos', tile=1024, symmetric=True)"
    assert "scale=10.0, learnable" in str(SigLIP())
    assert "bias=-10.0" in str(SigLIP())
