"""Transports: sums of a wire narrower than the result, and of one that is as wide."""

from typing import Any

import pytest
import torch
from torch import Tensor

from onefold.wire.buffer import Arena
from onefold.wire.transports import choose_transport
from tests.harness import RankContext, distributed
from tests.rig import gathered

WORLDS = [2, 3, 4]
NARROW = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)]
NARROW += [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


CHOICES = ["cross-memory", "direct", "native"]


def transports(ctx: RankContext, *choices: str) -> list[Any]:
    group = ctx.new_group()
    arena = Arena(torch.device("cpu"))
    made = [choose_transport(group, choice, arena, 60.0) for choice in choices or CHOICES]
    for transport in made:
        ctx.cleanup(transport.close)
    return made


def term(ctx: RankContext, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return ctx.data(numel, rank=rank, key=5).to(dtype)


def in_order(terms: list[Tensor]) -> Tensor:
    total = terms[0].float()
    for one in terms[1:]:
        total = total + one.float()
    return total


@distributed(world_size=WORLDS)
@pytest.mark.parametrize(("dtype", "wire"), NARROW, ids=str)
def test_reduce_scatter_rounds_each_peer_s_term_once(
    ctx: RankContext, dtype: torch.dtype, wire: torch.dtype
) -> None:
    """The sum is fp32, in rank order, of the peers' rounded terms and the rank's own unrounded."""
    numel = 33
    own = slice(ctx.rank * numel, (ctx.rank + 1) * numel)
    for transport in transports(ctx):
        source = term(ctx, ctx.rank, numel * ctx.world_size, dtype)
        kept = source.clone()
        out = torch.empty(numel)
        transport.reduce_scatter(source, out, tag=3, wire_dtype=wire).wait()
        terms = [term(ctx, r, numel * ctx.world_size, dtype)[own] for r in range(ctx.world_size)]
        rounded = [t if r == ctx.rank else t.to(wire) for r, t in enumerate(terms)]
        assert torch.equal(out, in_order(rounded)), transport.name
        assert torch.equal(source, kept), "the source is somebody else's"
        exact = torch.stack([t.double() for t in terms])
        bound = torch.finfo(wire).eps / 2 * exact.abs().sum(0) + 1e-6
        assert ((out.double() - exact.sum(0)).abs() <= bound).all()


@distributed(world_size=WORLDS)
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [1, 40, 101])
def test_all_reduce_is_the_same_rounded_sum_everywhere(
    ctx: RankContext, wire: torch.dtype, numel: int
) -> None:
    for transport in transports(ctx):
        buffer = term(ctx, ctx.rank, numel, torch.float32)
        transport.all_reduce(buffer, tag=2, wire_dtype=wire).wait()
        terms = torch.stack(
            [term(ctx, rank, numel, torch.float32).double() for rank in range(ctx.world_size)]
        )
        bound = torch.finfo(wire).eps / 2 * (terms.abs().sum(0) + terms.sum(0).abs()) * 1.01 + 1e-6
        assert ((buffer.double() - terms.sum(0)).abs() <= bound).all(), transport.name
        assert torch.equal(buffer, buffer.to(wire).float())
        assert all(torch.equal(buffer, other) for other in gathered(buffer))


@distributed(world_size=WORLDS)
def test_every_lease_comes_back(ctx: RankContext) -> None:
    group, arena = ctx.new_group(), Arena(torch.device("cpu"))
    for choice in CHOICES:
        transport = choose_transport(group, choice, arena, 60.0)
        ctx.cleanup(transport.close)
        for wire in (torch.float32, torch.bfloat16):
            source = term(ctx, ctx.rank, 16 * ctx.world_size, torch.float32)
            transport.reduce_scatter(source, torch.empty(16), 1, wire).wait()
            transport.all_reduce(source, 2, wire).wait()
            assert arena.leased_bytes == 0
