"""The exchange alone: what goes where, in forward, backward and a backward of the backward."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from onefold.errors import StateError
from onefold.wire.all_to_all import AllToAll, connect
from onefold.wire.ledger import Ledger
from tests.harness import CommLog, RankContext, distributed

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
]


def everyone(ctx: RankContext, ledger: Ledger | None = None) -> AllToAll:
    axis = connect(tuple(range(ctx.world_size)), 60, ledger)
    ctx.cleanup(axis.destroy)
    return axis


def slices(rank: int, size: int) -> Tensor:
    """``[size * 2, 3]``: small integers that name the sender, the receiver and the place."""
    places = torch.arange(6).reshape(2, 3)
    return torch.cat([100 * rank + 10 * receiver + places for receiver in range(size)])


def received(rank: int, size: int) -> Tensor:
    return torch.cat([slices(sender, size)[2 * rank : 2 * rank + 2] for sender in range(size)])


@distributed(world_size=[1, 2, 3, 4])
def test_slice_p_goes_to_rank_p(ctx: RankContext) -> None:
    axis = everyone(ctx)
    assert (axis.rank, axis.size) == (ctx.rank, ctx.world_size)
    for dtype in DTYPES:
        sent = slices(ctx.rank, ctx.world_size).to(dtype)
        found = axis.exchange(sent)
        wanted = received(ctx.rank, ctx.world_size).to(dtype)
        assert found.dtype == dtype
        assert torch.equal(found.double(), wanted.double()), f"{dtype}: {found}, expected {wanted}"
        assert torch.equal(axis.exchange(found).double(), sent.double()), "it is its own inverse"


@distributed(world_size=2)
def test_other_strides_and_shapes(ctx: RankContext) -> None:
    axis = everyone(ctx)
    sent = slices(ctx.rank, 2)
    wanted = received(ctx.rank, 2)
    assert torch.equal(axis.exchange(sent.t().contiguous().t()), wanted)
    assert torch.equal(axis.exchange(sent[:, 1]), wanted[:, 1])
    assert torch.equal(
        axis.exchange(sent[:1].expand(4, 3)[:, :, None]).squeeze(2)[2:],
        slices(1, 2)[:1].expand(2, 3),
    )
    assert axis.exchange(torch.zeros(0, 3)).shape == (0, 3)
    assert axis.exchange(torch.zeros(4, 0)).shape == (4, 0)


@distributed(world_size=[1, 2, 3])
def test_the_gradient_goes_back_where_the_slice_came_from(ctx: RankContext) -> None:
    """The factor that rank p puts on what came from rank r is the gradient of slice p on rank r."""
    axis = everyone(ctx)
    for dtype in (torch.float64, torch.bfloat16):
        sent = torch.zeros(2 * ctx.world_size, 3, dtype=dtype, requires_grad=True)
        for n in range(1, 4):
            (axis.exchange(sent) * slices(ctx.rank, ctx.world_size).to(dtype)).sum().backward()
            wanted = received(ctx.rank, ctx.world_size).to(dtype) * n
            assert sent.grad is not None
            assert torch.equal(sent.grad, wanted), f"{sent.grad}, expected {wanted}"
    sent = torch.zeros(ctx.world_size, requires_grad=True)
    (axis.exchange(sent).sum() * (1 + ctx.rank)).backward()  # an expanded gradient
    assert sent.grad is not None
    assert torch.equal(sent.grad, 1.0 + torch.arange(ctx.world_size))


@distributed(world_size=2)
def test_backward_of_the_backward(ctx: RankContext) -> None:
    """Sum of cubes, so the first derivative is 3 x x, and that of v . 3 x x is 6 x v."""
    axis = everyone(ctx)
    x = slices(ctx.rank, 2).double().requires_grad_()
    (first,) = torch.autograd.grad(axis.exchange(x).pow(3).sum(), x, create_graph=True)
    assert torch.equal(first, 3 * x * x)
    v = received(ctx.rank, 2).double()
    (second,) = torch.autograd.grad((first * v).sum(), x)
    assert torch.equal(second, 6 * x * v)


@distributed(world_size=4)
def test_axes_side_by_side(ctx: RankContext) -> None:
    ranks = (0, 2) if ctx.rank % 2 == 0 else (1, 3)
    axis = connect(ranks, 60)
    ctx.cleanup(axis.destroy)
    found = axis.exchange(torch.tensor([10 * ctx.rank, 10 * ctx.rank + 1]))
    place = ranks.index(ctx.rank)
    assert axis.rank == place
    assert found.tolist() == [10 * rank + place for rank in ranks]


@distributed(world_size=[1, 2, 3])
def test_ledger_by_formula(ctx: RankContext) -> None:
    """(size-1)/size of the bytes, once in forward and once in backward; an empty one is free."""
    ledger = Ledger()
    axis = everyone(ctx, ledger)
    sent = torch.zeros(ctx.world_size * 2, 5, requires_grad=True)
    with CommLog() as log:
        axis.exchange(sent).sum().backward()
        axis.exchange(torch.zeros(0, 5))
    if ctx.world_size == 1:
        assert not ledger.totals
        assert not log.records
        return
    moved = 2 * 5 * 4 * (ctx.world_size - 1)
    total = ledger.totals["all_to_all"]
    assert (total.count, total.bytes_out, total.bytes_in) == (2, 2 * moved, 2 * moved)
    assert [record.op for record in log.records] == ["alltoall_base_"] * 2
    assert all(entry.finished_s is not None for entry in ledger.recent)


@distributed(world_size=2)
def test_refused_before_anything_is_sent(ctx: RankContext) -> None:
    axis = everyone(ctx)
    for wrong in (torch.zeros(3, 2), torch.zeros(())):
        with pytest.raises(ValueError, match="multiple of the 2 ranks"):
            axis.exchange(wrong)
    for ranks in ((1 - ctx.rank, 7), (1, 0), (0, 0, 1)):
        with pytest.raises(ValueError, match="expected ascending ranks"):
            connect(ranks, 60)
    assert torch.equal(axis.exchange(slices(ctx.rank, 2)), received(ctx.rank, 2))
    axis.destroy()
    with pytest.raises(StateError, match="was destroyed"):
        axis.exchange(torch.zeros(2))


@distributed(world_size=2)
def test_a_new_group_after_a_failure(ctx: RankContext) -> None:
    axis = everyone(ctx)
    old = axis._group

    def fails(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("connection closed by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", fails)
        with pytest.raises(RuntimeError, match="closed by peer"):
            axis.exchange(torch.zeros(2))
    assert axis.is_broken
    axis.rebuild()
    assert not axis.is_broken
    assert axis._group is not old
    assert old not in dist.distributed_c10d._world.pg_map
    assert torch.equal(axis.exchange(slices(ctx.rank, 2)), received(ctx.rank, 2))


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 1), (-1, 2), (0, 0)])
def test_no_such_place(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= rank < size"):
        AllToAll(rank, size)


def test_one_rank_needs_no_process_group() -> None:
    axis = connect((0,), 60)
    tensor = torch.ones(3)
    assert axis.exchange(tensor) is tensor
    axis.rebuild()
    axis.destroy()
