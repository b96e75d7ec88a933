"""The native transport's narrow sum: all-to-all, then fp32."""

import pytest
import torch
from torch import Tensor

from onefold.wire.buffer import Arena
from onefold.wire.transports import NativeTransport
from onefold.wire.transports.native import MAX_ORDERED_RANKS, sum_of_terms
from tests.harness import RankContext, distributed
from tests.rig import gathered

NARROW = [torch.bfloat16, torch.float16]
NUMEL = 48


def in_order(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total = total + term
    return total


def sum_of(terms: Tensor) -> Tensor:
    out = torch.empty(NUMEL)
    sum_of_terms(terms, out)
    return out


def terms_of(size: int, wire: torch.dtype) -> Tensor:
    """``[W, S]``, of magnitudes that make the order matter."""
    generator = torch.Generator().manual_seed(1)
    scale = 10.0 ** (torch.arange(size) % 4)
    return (torch.randn(size, NUMEL, generator=generator) * scale[:, None]).to(wire)


@pytest.mark.parametrize("wire", NARROW, ids=str)
def test_64_terms_are_added_one_after_another(wire: torch.dtype) -> None:
    terms = terms_of(MAX_ORDERED_RANKS, wire)
    rows = list(terms.float())
    wanted = in_order(rows)
    assert torch.equal(sum_of(terms), wanted)
    assert not torch.equal(terms.float().sum(0), wanted), "the order must matter here"
    assert not torch.equal(in_order(rows[::-1]), wanted)


@pytest.mark.parametrize("wire", NARROW, ids=str)
@pytest.mark.parametrize("size", [MAX_ORDERED_RANKS + 1, 512])
def test_more_terms_are_summed_in_one_call(size: int, wire: torch.dtype) -> None:
    """In another order: within the error of an fp32 sum, and the same bits when run again."""
    terms = terms_of(size, wire)
    rows = terms.double()
    found = sum_of(terms)
    bound = size * torch.finfo(torch.float32).eps * rows.abs().sum(0)
    assert ((found.double() - rows.sum(0)).abs() <= bound).all()
    assert torch.equal(sum_of(terms), found)


@pytest.mark.parametrize("size", [1, 2, 3, MAX_ORDERED_RANKS, MAX_ORDERED_RANKS + 1, 512])
def test_each_term_counts_once(size: int) -> None:
    """Integers, so every order is exact."""
    terms = (torch.arange(size * NUMEL) % 7).view(size, NUMEL).float()
    assert torch.equal(sum_of(terms.bfloat16()), terms.sum(0))


def transport_of(ctx: RankContext) -> NativeTransport:
    return NativeTransport(ctx.new_group(), Arena(torch.device("cpu")))


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("wire", NARROW, ids=str)
def test_the_wire_gives_the_same_terms(ctx: RankContext, wire: torch.dtype) -> None:
    transport = transport_of(ctx)
    sources = [ctx.data(ctx.world_size * NUMEL, rank=r, key=7) for r in range(ctx.world_size)]
    own = slice(ctx.rank * NUMEL, (ctx.rank + 1) * NUMEL)
    terms = [source[own].to(wire).float() for source in sources]
    out = torch.empty(NUMEL)
    transport.reduce_scatter(sources[ctx.rank], out, tag=1, wire_dtype=wire).wait()
    assert torch.equal(out, in_order(terms))
    terms[ctx.rank] = sources[ctx.rank][own]
    assert not torch.equal(out, in_order(terms)), "the own term is rounded"


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("wire", NARROW, ids=str)
@pytest.mark.parametrize("numel", [1, 40, 101])
def test_an_all_reduce_rounds_terms_and_sum(
    ctx: RankContext, wire: torch.dtype, numel: int
) -> None:
    """Whoever sums an element, the bits are the same: slices are padded where W does not divide."""
    transport = transport_of(ctx)
    sources = [ctx.data(numel, rank=r, key=8) for r in range(ctx.world_size)]
    wanted = in_order([source.to(wire).float() for source in sources]).to(wire).float()
    buffer = sources[ctx.rank].clone()
    transport.all_reduce(buffer, tag=2, wire_dtype=wire).wait()
    assert torch.equal(buffer, wanted)
    assert all(torch.equal(buffer, other) for other in gathered(buffer))
