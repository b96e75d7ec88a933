"""Transports: sums of a wire narrower than the result, and of one that is as wide."""

import time
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
def test_reduce_scatter_rounds_each_term_once(
    ctx: RankContext, dtype: torch.dtype, wire: torch.dtype
) -> None:
    """The sum is fp32, in rank order, of the rounded terms; the own one is no exception."""
    numel = 33
    own = slice(ctx.rank * numel, (ctx.rank + 1) * numel)
    for transport in transports(ctx):
        source = term(ctx, ctx.rank, numel * ctx.world_size, dtype)
        kept = source.clone()
        out = torch.empty(numel)
        transport.reduce_scatter(source, out, tag=3, wire_dtype=wire).wait()
        terms = [term(ctx, r, numel * ctx.world_size, dtype)[own] for r in range(ctx.world_size)]
        assert torch.equal(out, in_order([t.to(wire) for t in terms])), transport.name
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
        terms = [term(ctx, rank, numel, torch.float32) for rank in range(ctx.world_size)]
        total = in_order([t.to(wire) for t in terms])
        assert torch.equal(buffer, total.to(wire).float()), transport.name
        assert all(torch.equal(buffer, other) for other in gathered(buffer))
        exact = torch.stack([t.double() for t in terms])
        bound = torch.finfo(wire).eps / 2 * (exact.abs().sum(0) + exact.sum(0).abs()) * 1.01 + 1e-6
        assert ((buffer.double() - exact.sum(0)).abs() <= bound).all()


@distributed(world_size=2)
def test_what_has_arrived_is_known_where_it_can_be(ctx: RankContext) -> None:
    """Of gloo's messages it is not, nor of its reduce-scatter: they say so when waited for."""
    works = {}
    for tag, transport in enumerate(transports(ctx)):
        source, out = term(ctx, ctx.rank, 32, torch.float32), torch.empty(16)
        works[transport.name] = transport.reduce_scatter(source, out, tag, torch.float32), out
    total = in_order([term(ctx, rank, 32, torch.float32) for rank in range(2)])
    deadline = time.monotonic() + 20
    while not works["cross-memory"][0].is_done():
        assert time.monotonic() < deadline
    assert not works["direct"][0].is_done()
    for work, out in works.values():
        work.wait()
        assert torch.equal(out, total[ctx.rank * 16 : (ctx.rank + 1) * 16])


@distributed(world_size=2)
def test_what_has_not_arrived_is_not_done(ctx: RankContext) -> None:
    """Nor is what failed: that must be found by waiting, after the exchange."""
    (transport,) = transports(ctx, "cross-memory")
    group = ctx.new_group()
    source, out = term(ctx, ctx.rank, 32, torch.float32), torch.empty(16)
    if ctx.rank == 0:
        work = transport.reduce_scatter(source, out, 1, torch.float32)
        assert not work.is_done(), "rank 1 has not started it"
    torch.distributed.barrier(group=group)
    if ctx.rank == 1:
        transport.close()
        return
    with pytest.raises(RuntimeError, match="rank 1 of it has ended or left"):
        work.wait()
    assert not work.is_done()


@distributed(world_size=WORLDS)
def test_every_lease_comes_back(ctx: RankContext) -> None:
    """And what a narrow wire needs is leased: rounded copies, and what peers send."""
    group, numel = ctx.new_group(), 16 * ctx.world_size
    received = {"cross-memory": 0, "direct": numel - 16, "native": numel}
    for choice in CHOICES:
        arena = Arena(torch.device("cpu"))
        transport = choose_transport(group, choice, arena, 60.0)
        ctx.cleanup(transport.close)
        for wire in (torch.float32, torch.bfloat16):
            source = term(ctx, ctx.rank, numel, torch.float32)
            work = transport.reduce_scatter(source, torch.empty(16), 1, wire)
            if wire == torch.bfloat16:
                assert arena.leased_bytes == 2 * (numel + received[choice]), choice
            work.wait()
            transport.all_reduce(source, 2, wire).wait()
            assert arena.leased_bytes == 0
