"""The sum over ranks of each rank's part is the loss of one process, and its gradients."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onefold.contrastive import ContrastiveLoss, InfoNCE, SigLIP
from tests.contrastive.reference import assert_alike, deviation, embeddings, gradients, info_nce

SPLITS = [[0, 24], [0, 12, 24], [0, 6, 12, 18, 24], [0, 1, 1, 24], [0, 10, 24, 24]]
LOSSES = {
    "InfoNCE": (lambda: InfoNCE(6.0, tile=5), 4),
    "learnable": (lambda: InfoNCE(6.0, learnable_scale=True, tile=5), 3),
    "symmetric": (lambda: InfoNCE(6.0, symmetric=True, learnable_scale=True, tile=7), 3),
    "dot": (lambda: InfoNCE(0.5, symmetric=True, similarity="dot", tile=64), 2),
    "SigLIP": (lambda: SigLIP(3.0, -1.0, tile=5), 2),
}


def over_ranks(
    loss: ContrastiveLoss, inputs: list[Tensor], bounds: list[int], **more: Any
) -> list[Tensor]:
    """Every rank in turn: the sums of values and of gradients, as ranks would sum them."""
    value = torch.zeros((), dtype=torch.float64)
    sums = [torch.zeros_like(tensor) for tensor in inputs]
    of_parameters = [torch.zeros_like(parameter) for parameter in loss.parameters()]
    for begin, end in pairwise(bounds):
        rows = [tensor[begin:end].detach().clone().requires_grad_() for tensor in inputs]
        everything = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        part = loss.partial(rows, everything, begin, **more)
        value += part.detach()
        found = torch.autograd.grad(
            part, [*rows, *everything, *loss.parameters()], allow_unused=True
        )
        for place, gradient in enumerate(found):
            if gradient is None:
                continue
            if place < len(rows):
                sums[place][begin:end] += gradient
            elif place < 2 * len(rows):
                sums[place - len(rows)] += gradient
            else:
                of_parameters[place - 2 * len(rows)] += gradient
    return [value, *sums, *of_parameters]


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("bounds", SPLITS, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_parts_sum_to_the_whole(name: str, bounds: list[int], with_ids: bool) -> None:
    make, columns = LOSSES[name]
    loss = make().double()
    inputs = embeddings(24, 5, columns)
    more = {"ids": torch.arange(24) % 10} if with_ids else {}
    whole = gradients(lambda *c: loss(*c, **more), inputs, *loss.parameters())
    assert_alike(over_ranks(loss, inputs, bounds, **more), whole)


def test_a_rank_that_begins_elsewhere_is_seen() -> None:
    """The control: with a wrong first row each anchor is compared with another's positive."""
    inputs = embeddings(24, 5)
    loss = InfoNCE()
    rows = [tensor[12:] for tensor in inputs]
    right, wrong = (loss.partial(rows, inputs, first) for first in (12, 11))
    assert deviation(wrong, right) > 0.1


def test_gradients_of_the_own_rows_alone_are_not_the_whole() -> None:
    """The control: who forgets to sum the gradients of everything is far off."""
    inputs = embeddings(24, 5)
    whole = gradients(lambda *c: info_nce(c), inputs)
    everything = [tensor.detach() for tensor in inputs]
    parts = [
        gradients(lambda *c, first=first: InfoNCE().partial(c, everything, first), rows)
        for first in (0, 12)
        for rows in [[tensor[first : first + 12] for tensor in inputs]]
    ]
    assert deviation(torch.cat([part[1] for part in parts]), whole[1]) < 1e-12
    assert deviation(torch.cat([part[2] for part in parts]), whole[2]) > 0.1


@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_without_rows(name: str) -> None:
    make, columns = LOSSES[name]
    loss = make().double()
    inputs = embeddings(6, 5, columns)
    rows = [tensor[:0].detach().requires_grad_() for tensor in inputs]
    part = loss.partial(rows, inputs, 6)
    part.backward()
    assert float(part.detach()) == 0
    used = [rows[0], inputs[1], *loss.parameters()]
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in used)


@pytest.mark.parametrize(
    ("loss", "expected"), [(InfoNCE(), False), (InfoNCE(symmetric=True), True), (SigLIP(), False)]
)
def test_whether_all_anchors_are_needed(loss: ContrastiveLoss, expected: bool) -> None:
    """Where not, anything of their shape will do."""
    assert loss.needs_all_anchors is expected
    inputs = embeddings(6, 5)
    rows = [tensor[2:4] for tensor in inputs]
    part = loss.partial(rows, inputs, 2)
    stand_in = torch.zeros((), dtype=torch.float64).expand(6, 5)
    other = loss.partial(rows, [stand_in, inputs[1]], 2)
    assert torch.equal(part, other) is not expected


def test_a_loss_is_a_module() -> None:
    """So that an engine can hold it beside the model, and hooks see its call."""
    seen = []
    loss = InfoNCE(learnable_scale=True)
    loss.register_forward_hook(lambda *_: seen.append(1))
    model = nn.ModuleDict({"loss": loss})
    model["loss"](*embeddings(3, 2))
    assert seen == [1]
    assert [name for name, _ in model.named_parameters()] == ["loss.log_scale"]
