"""The native transport's narrow sum: all-to-all, then fp32, this rank's own term unrounded."""

import pytest
import torch
from torch import Tensor

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


def terms_of(size: int, wire: torch.dtype) -> tuple[Tensor, Tensor]:
    """``[W, S]`` narrow and ``[W, S]`` as they were, of magnitudes that make the order matter."""
    generator = torch.Generator().manual_seed(1)
    scale = 10.0 ** (torch.arange(size) % 4)
    wide = torch.randn(size, NUMEL, generator=generator) * scale[:, None]
    return wide.to(wire), wide


@pytest.mark.parametrize("wire", NARROW, ids=str)
@pytest.mark.parametrize("rank", [0, 1, 31, 63])
def test_64_terms_are_added_one_after_another(rank: int, wire: torch.dtype) -> None:
    narrow, wide = terms_of(MAX_ORDERED_RANKS, wire)
    rows = [wide[r] if r == rank else narrow[r].float() for r in range(MAX_ORDERED_RANKS)]
    wanted = in_order(rows)
    assert torch.equal(sum_of_terms(narrow.clone(), wide[rank], rank, torch.float32), wanted)
    assert not torch.equal(torch.stack(rows).sum(0), wanted), "the order must matter here"
    assert not torch.equal(in_order(rows[::-1]), wanted)
    assert not torch.equal(in_order([row.float() for row in narrow]), wanted), "own is unrounded"


@pytest.mark.parametrize("wire", NARROW, ids=str)
@pytest.mark.parametrize("size", [MAX_ORDERED_RANKS + 1, 512])
def test_more_terms_are_summed_in_one_call(size: int, wire: torch.dtype) -> None:
    """In another order: within the error of an fp32 sum, and the same bits when run again."""
    rank = size // 2
    narrow, wide = terms_of(size, wire)
    rows = narrow.double()
    rows[rank] = wide[rank].double()
    found = sum_of_terms(narrow.clone(), wide[rank], rank, torch.float32)
    bound = size * torch.finfo(torch.float32).eps * rows.abs().sum(0)
    assert ((found.double() - rows.sum(0)).abs() <= bound).all()
    assert torch.equal(sum_of_terms(narrow.clone(), wide[rank], rank, torch.float32), found)


@pytest.mark.parametrize("size", [2, 3, MAX_ORDERED_RANKS, MAX_ORDERED_RANKS + 1, 512])
@pytest.mark.parametrize("place", ["first", "last"])
def test_each_term_counts_once_and_the_own_one_is_not_rounded(size: int, place: str) -> None:
    """Integers, so every order is exact; the own ones have more bits than bf16."""
    rank = 0 if place == "first" else size - 1
    terms = (torch.arange(size * NUMEL) % 7).view(size, NUMEL).float()
    own = 1025.0 + torch.arange(NUMEL)
    assert not torch.equal(own.bfloat16().float(), own)
    wanted = terms.sum(0) - terms[rank] + own
    assert torch.equal(sum_of_terms(terms.bfloat16(), own, rank, torch.float32), wanted)


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("wire", NARROW, ids=str)
def test_the_wire_gives_the_same_terms(ctx: RankContext, wire: torch.dtype) -> None:
    transport = NativeTransport(ctx.new_group())
    sources = [ctx.data(ctx.world_size * NUMEL, rank=r, key=7) for r in range(ctx.world_size)]
    own = slice(ctx.rank * NUMEL, (ctx.rank + 1) * NUMEL)
    terms = [s[own] if r == ctx.rank else s[own].to(wire).float() for r, s in enumerate(sources)]
    out = torch.empty(NUMEL)
    transport.reduce_scatter(sources[ctx.rank], out, tag=1, wire_dtype=wire).wait()
    assert torch.equal(out, in_order(terms))


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("wire", NARROW, ids=str)
@pytest.mark.parametrize("numel", [1, 40, 101])
def test_an_all_reduce_rounds_the_sum_of_its_owner(
    ctx: RankContext, wire: torch.dtype, numel: int
) -> None:
    """Element i is summed by the rank whose slice it is in, and then rounded once, for all."""
    transport = NativeTransport(ctx.new_group())
    sources = [ctx.data(numel, rank=r, key=8) for r in range(ctx.world_size)]
    each = -(-numel // ctx.world_size)
    wanted = torch.empty(numel)
    for owner in range(ctx.world_size):
        part = slice(owner * each, (owner + 1) * each)
        terms = [s[part] if r == owner else s[part].to(wire).float() for r, s in enumerate(sources)]
        wanted[part] = in_order(terms).to(wire).float()
    buffer = sources[ctx.rank].clone()
    transport.all_reduce(buffer, tag=2, wire_dtype=wire).wait()
    assert torch.equal(buffer, wanted)
    assert all(torch.equal(buffer, other) for other in gathered(buffer))
