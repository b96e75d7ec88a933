"""B45. A function that runs backwards inside its forward (a chunked loss): gradients that appear
during the forward, and through autograd.grad, must be counted once: not lost, not reduced twice.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onefold
from tests.cases.gradcache import assert_state
from tests.cases.wire_formula import MODES, SCOPES, assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import STAGES, assert_ranks_equal, counts, start, weights

CHUNKS = 3


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy through the head, a chunk at a time; the head's gradient is a side effect."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: nn.Module, scale: float) -> Tensor:
        grads, total = [], torch.zeros((), dtype=hidden.dtype)
        for part, target in zip(hidden.chunk(CHUNKS), targets.chunk(CHUNKS), strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                loss = F.cross_entropy(head(leaf), target, reduction="sum") * scale
                loss.backward()
            assert leaf.grad is not None
            grads.append(leaf.grad)
            total += loss.detach()
        ctx.save_for_backward(torch.cat(grads))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.saved_tensors[0], None, None, None


class Head(nn.Module):
    """A linear map whose weight may be shared."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T


class Model(nn.Module):
    """Embedding, repeated layers, norm, head; ``ties`` shares the head's weight."""

    def __init__(self, *, ties: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm = nn.LayerNorm(5)
        weight = self.embed.weight if ties else nn.Parameter(torch.randn(11, 5))
        assert isinstance(weight, nn.Parameter)
        self.head = Head(weight)
        self.is_chunked = True
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        hidden = self.norm(hidden)
        scale = 1 / len(targets)
        if self.is_chunked:
            return ChunkedLoss.apply(hidden, targets, self.head, scale)
        return F.cross_entropy(self.head(hidden), targets, reduction="sum") * scale


def _batch(ctx: RankContext, key: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    numbers = (ctx.data(2, 6, key=key, rank=rank).abs() * 97).long() % 11
    return numbers[0], numbers[1]


def _reference(ctx: RankContext, model: Model, micro_batches: int) -> Model:
    """One process, no chunks, the mean over ranks and micro-batches; gradients are left in."""
    alone = copy.deepcopy(model)
    alone.is_chunked = False
    for key in range(micro_batches):
        for rank in range(ctx.world_size):
            loss = alone(*_batch(ctx, key, rank))
            (loss / (ctx.world_size * micro_batches)).backward()
    return alone


def _stepped(alone: Model) -> dict[str, Tensor]:
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    return alone.state_dict()


@distributed()
@pytest.mark.parametrize("ties", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_chunked_loss_in_a_window(
    ctx: RankContext, stage: int, micro_batches: int, ties: bool
) -> None:
    model = Model(ties=ties)
    wanted = _stepped(_reference(ctx, model, micro_batches))
    accumulation = {"gradient_accumulation_steps": micro_batches}
    engine = start(ctx, model, stage, config=accumulation, zero={"reduce_bucket_size": 30})
    mark = engine.ledger.mark()
    for key in range(micro_batches):
        with engine.coalesce_grad_reduction() as window:
            engine.backward(engine(*_batch(ctx, key)))
        assert window.backwards == 1 + CHUNKS
        engine.step()
    # The head is reduced with its unit, once per window where gradients are Shard.
    expected = wire(engine, "window", scopes=micro_batches)
    assert_wire(counts(engine, mark), expected)
    assert_state(weights(engine), wanted)
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("ties", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("mode", ["bare", "armed", "no_sync"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_chunked_loss_in_every_mode(ctx: RankContext, stage: int, mode: str, ties: bool) -> None:
    model = Model(ties=ties)
    wanted = _stepped(_reference(ctx, model, 1))
    engine = start(ctx, model, stage)
    mark = engine.ledger.mark()
    with scope(engine, mode, 1 + CHUNKS):
        engine.backward(engine(*_batch(ctx, 0)))
    engine.step()
    if mode != "bare":
        assert_wire(counts(engine, mark), wire(engine, mode))
    else:
        assert_wire(_reductions(counts(engine, mark)), _bare_reductions(engine))
    assert_state(weights(engine), wanted)
    assert_ranks_equal(engine)


def _reductions(found: dict[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in found.items() if kind != "all_gather"}


def _bare_reductions(engine: onefold.Engine) -> dict[str, int]:
    """Where gradients are Shard, a unit that holds nothing but the head completes in each chunk."""
    model = engine.module
    assert isinstance(model, Model)
    if not engine.plan.home.shards_gradients:
        return _reductions(wire(engine, "bare"))
    head, ties = model.head.weight, model.head.weight is model.embed.weight
    total = 0
    for unit in engine.plan.units:
        is_head = all(slot.param is head for slot in unit.slots)
        total += CHUNKS + ties if is_head else 1
    return {"reduce_scatter": total}


@distributed()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_sees_the_gradients(ctx: RankContext, stage: int, mode: str) -> None:
    """It returns this rank's own gradients, and adds nothing to the step."""
    model = Model(ties=True)
    model.is_chunked = False
    alone = copy.deepcopy(model)
    wanted = _stepped(_reference(ctx, model, 1))
    own = torch.autograd.grad(alone(*_batch(ctx, 7)), list(alone.parameters()))
    engine = start(ctx, model, stage)
    mark = engine.ledger.mark()
    with scope(engine, mode, 1):
        found = torch.autograd.grad(engine(*_batch(ctx, 7)), list(engine.module.parameters()))
        engine.backward(engine(*_batch(ctx, 0)))
    engine.step()
    for (name, _), mine, theirs in zip(alone.named_parameters(), own, found, strict=True):
        assert torch.equal(mine, theirs), f"autograd.grad of {name}"
    assert_wire(_reductions(counts(engine, mark)), _reductions(wire(engine, mode)))
    assert_state(weights(engine), wanted)
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("mode", SCOPES)
@pytest.mark.parametrize("stage", STAGES)
def test_only_the_head_has_a_gradient(ctx: RankContext, stage: int, mode: str) -> None:
    """The outer backward never runs; what appeared during the forward is still the step's."""
    model = Model(ties=False)
    alone = _reference(ctx, model, 1)
    head = {"head.weight"}
    for name, param in alone.named_parameters():
        if name not in head:
            param.grad = None
    wanted = _stepped(alone)
    engine = start(ctx, model, stage)
    with scope(engine, mode, CHUNKS):
        engine(*_batch(ctx, 0))
    engine.step()
    assert_state(weights(engine), wanted)
    assert_ranks_equal(engine)
