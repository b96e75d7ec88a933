"""Recomputed activations, in kinds that mix and nest, over blocks and over pieces of blocks.

A recompute is a forward inside a backward: it gathers what it needs, it must not free what the
backward around it needs, and every contribution of a module that several segments use counts once.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.autograd.helpers import (
    MODES,
    Block,
    Net,
    check,
    check_modes,
    engine_and_twin,
    finish,
    plain,
)
from tests.harness import RankContext, distributed
from tests.rig import STAGES

Body = Callable[[Tensor], Tensor]


def _segment(kind: str, body: Body, x: Tensor) -> Tensor:
    """Run ``body`` under the checkpoints that ``kind`` names, the outermost last."""
    inner, _, outer = kind.rpartition(" in ")
    if outer == "none":
        return body(x)
    out: Tensor = checkpoint(
        lambda h: _segment(inner or "none", body, h), x, use_reentrant=outer == "reentrant"
    )
    return out


KINDS = [
    "reentrant",
    "saved",
    "saved in reentrant",
    "reentrant in saved",
    "reentrant in reentrant",
    "saved in saved",
]


class Recomputing(Net):
    """A ``Net`` whose blocks, pieces of blocks, or pairs of blocks are recomputed."""

    def __init__(self, kinds: list[str], over: str) -> None:
        super().__init__(layers=4)
        self.kinds = kinds
        self.over = over

    def forward(self, x: Tensor) -> Tensor:
        segments = {"blocks": self._blocks, "pieces": self._pieces, "pairs": self._pairs}
        if self.over == "all":
            return _segment(self.kinds[0], super().forward, x)
        for position, body in enumerate(segments[self.over]()):
            x = _segment(self.kinds[position % len(self.kinds)], body, x)
        return self.head(x).squeeze(-1)

    def _blocks(self) -> list[Body]:
        return list(self.layers)

    def _pieces(self) -> list[Body]:
        """Each block's matrix and its vector, read outside its forward, are recomputed apart."""
        bodies: list[Body] = []
        for layer in self.layers:
            assert isinstance(layer, Block)
            bodies += [partial(_piece, layer), layer]
        return bodies

    def _pairs(self) -> list[Body]:
        """The end of one block and the beginning of the next are recomputed together."""
        first, *middle, last = self.layers
        pairs = [partial(_pair, *two) for two in zip(middle, (last, first), strict=True)]
        return [first, *pairs, last]


def _piece(block: Block, x: Tensor) -> Tensor:
    return x + torch.tanh(block.up(x))


def _pair(one: nn.Module, other: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(other, Block)
    hidden: Tensor = other.up(one(x))
    return hidden


@pytest.mark.parametrize("over", ["blocks", "pieces", "pairs", "all"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_one_kind(ctx: RankContext, stage: int, kind: str, over: str) -> None:
    """Bare, and in one of the scopes, which changes with the field of the grid."""
    engine, twin = engine_and_twin(ctx, Recomputing([kind], over), stage)
    twin.module.kinds = ["none"]  # type: ignore[assignment]
    scopes = MODES[1:]
    turn = KINDS.index(kind) + len(over) + stage
    for mode in ("bare", scopes[turn % len(scopes)]):
        check(ctx, engine, twin, mode, plain)


@pytest.mark.parametrize("over", ["blocks", "pieces", "pairs"])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_mixed_kinds(ctx: RankContext, stage: int, over: str) -> None:
    """Neighbours that are recomputed in different ways, and one that is not."""
    model = Recomputing(["reentrant", "none", "saved in reentrant", "saved"], over)
    check_modes(ctx, model, stage, plain)


@pytest.mark.parametrize("over", ["blocks", "pieces"])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_a_recompute_that_stops_early_or_not(ctx: RankContext, stage: int, over: str) -> None:
    """Stopped by an exception in the middle of a module's forward, whose hold must still end."""
    engine, twin = engine_and_twin(ctx, Recomputing(["saved", "saved in saved"], over), stage)
    for stops in (True, False):
        with set_checkpoint_early_stop(stops):
            for mode in ("bare", "window"):
                check(ctx, engine, twin, mode, plain)


class Reused(nn.Module):
    """One block several times in one forward: plain, twice in one segment, and in two kinds."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        net = Net(layers=3)
        self.layers, self.head = net.layers, net.head
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        shared, second, third = self.layers
        kinds = ["reentrant", "saved", "saved in reentrant", "none"]
        bodies: list[Body] = [
            lambda h: shared(second(shared(h))),
            lambda h: third(shared(h)),
            lambda h: shared(third(h)),
            shared,
        ]
        for kind, body in zip(kinds, bodies, strict=True):
            x = _segment(kind if self.recomputes else "none", body, x)
        return self.head(x).squeeze(-1)


@pytest.mark.parametrize("recomputes", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_a_block_that_many_segments_use(ctx: RankContext, stage: int, recomputes: bool) -> None:
    check_modes(ctx, Reused(recomputes), stage, plain)


class Recurrent(Net):
    """Every block is applied to its own output, so that its output is its input."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(layer(x)))
        return self.head(x).squeeze(-1)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_a_block_on_its_own_output(ctx: RankContext, stage: int, frozen: bool) -> None:
    """The backward of one use ends where that of another begins; a frozen block reads too."""
    model = Recurrent()
    if frozen:
        model.layers[1].requires_grad_(False)
    check_modes(ctx, model, stage, plain)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_frozen_blocks_inside_segments(ctx: RankContext, stage: int) -> None:
    """A frozen block in the middle is recomputed too, and the first one needs no gradient."""
    model = Recomputing(["saved", "reentrant"], "blocks")
    for index in (0, 2):
        model.layers[index].requires_grad_(False)
    check_modes(ctx, model, stage, plain)


@distributed(world_size=2)
def test_the_oracle_sees_a_lost_segment(ctx: RankContext) -> None:
    """Negative control: one use of the shared block fewer is told apart."""
    engine, twin = engine_and_twin(ctx, Reused(True), 2)
    assert isinstance(twin.module, Reused)
    twin.module.layers[1] = nn.Identity()
    twin.accumulate(plain, 1)
    plain(engine.module, engine, ctx.rank, 0)
    with pytest.raises((AssertionError, KeyError)):
        finish(engine, twin)
