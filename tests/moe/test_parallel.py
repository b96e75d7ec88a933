"""The layer on several ranks against one process that holds all experts.

A rank's capacity comes from its own tokens, so the reference runs the whole layer on one rank's
batch after another. An expert's gradient is the sum over the ranks of the axis; the router's is the
rank's own, which data parallelism reduces later.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onefold.experts import ExpertParallel, expert_parallel_modules
from onefold.moe import MoE, MoEOutput
from onefold.wire.all_to_all import AllToAll, connect
from onefold.wire.ledger import Ledger
from tests import rig
from tests.harness import RankContext, distributed
from tests.moe.naive import WIDTH, Expert, assert_close, assert_equal, build, gradients, loss_of

LIMITS: dict[str, dict[str, Any]] = {
    "all": {"drop_tokens": False},
    "tight": {"capacity_factor": 0.5, "min_capacity": 1},
    "roomy": {"capacity_factor": 1.5},
}


def spread(
    ctx: RankContext,
    whole: nn.Module,
    ranks: tuple[int, ...] | None = None,
    ledger: Ledger | None = None,
) -> Any:
    """A copy of ``whole`` whose experts lie on ``ranks``, as an engine would leave it."""
    axis = connect(ranks or tuple(range(ctx.world_size)), 60, ledger)
    ctx.cleanup(axis.destroy)
    own = copy.deepcopy(whole)
    for _, marked in expert_parallel_modules(own):
        marked.connect(axis)
    return own


def alone(whole: MoE) -> MoE:
    """A copy of ``whole`` that runs in one process."""
    copied = copy.deepcopy(whole)
    copied.experts.size = 1
    return copied


def batch(ctx: RankContext, num_tokens: Sequence[int], rank: int, k: int) -> tuple[Tensor, Tensor]:
    """Input and target of backward ``k`` on ``rank``."""
    shape = (num_tokens[rank], WIDTH)
    hidden = ctx.data(*shape, key=2 * k, rank=rank, dtype=torch.float64)
    return hidden, ctx.data(*shape, key=2 * k + 1, rank=rank, dtype=torch.float64)


def reference(
    ctx: RankContext, whole: MoE, num_tokens: Sequence[int], backwards: int, ranks: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor], MoEOutput]:
    """Gradients summed over ``ranks``, this rank's own, and its last output."""
    summed, own = alone(whole), alone(whole)
    for k in range(backwards):
        for rank in ranks:
            hidden, target = batch(ctx, num_tokens, rank, k)
            loss_of(summed(hidden), target).backward()
            if rank == ctx.rank:
                output = own(hidden)
                loss_of(output, target).backward()
    return gradients(summed), gradients(own), output


def check(
    ctx: RankContext,
    whole: MoE,
    num_tokens: Sequence[int],
    *,
    backwards: int = 1,
    ranks: tuple[int, ...] | None = None,
) -> dict[str, Tensor]:
    """Run ``backwards`` on all ranks and compare all there is; returns this rank's gradients."""
    layer = spread(ctx, whole, ranks)
    for k in range(backwards):
        hidden, target = batch(ctx, num_tokens, ctx.rank, k)
        found = layer(hidden)
        loss_of(found, target).backward()
    everyone = ranks or range(ctx.world_size)
    summed, own, wanted = reference(ctx, whole, num_tokens, backwards, everyone)
    assert_close(found.output, wanted.output, "output")
    assert torch.equal(found.expert_counts, wanted.expert_counts)
    assert torch.equal(found.load_balancing_loss, wanted.load_balancing_loss)
    each = whole.num_experts // len(everyone)
    place = list(everyone).index(ctx.rank)
    numbers = {name.split(".")[2] for name in gradients(layer) if name.startswith("experts.")}
    assert numbers == {str(e) for e in range(place * each, (place + 1) * each)}
    for name, gradient in gradients(layer).items():
        wanted_gradient = own[name] if name == "gate.weight" else summed[name]
        assert_close(gradient, wanted_gradient, name)
    return gradients(layer)


@distributed(world_size=[1, 2, 4])
@pytest.mark.parametrize("limit", list(LIMITS))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_as_in_one_process(ctx: RankContext, k: int, limit: str) -> None:
    whole = build(k=k, ep_size=ctx.world_size, **LIMITS[limit])
    named = check(ctx, whole, [12] * ctx.world_size, backwards=3)
    assert all(gradient.any() for gradient in named.values()), "all of it was tested"


@distributed(world_size=2)
@pytest.mark.parametrize("backwards", [5, 7])
def test_more_backwards(ctx: RankContext, backwards: int) -> None:
    check(ctx, build(6, k=2, ep_size=2), [9, 9], backwards=backwards)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("limit", list(LIMITS))
def test_other_numbers_of_tokens_on_every_rank(ctx: RankContext, limit: str) -> None:
    """What a rank drops does not depend on the others' tokens; having none is allowed."""
    whole = build(6, k=2, ep_size=ctx.world_size, **LIMITS[limit])
    for num_tokens in ([17, 3, 8], [0, 11, 1], [5, 0, 0], [0, 0, 0]):
        check(ctx, whole, num_tokens)


@distributed(world_size=4)
def test_two_axes_side_by_side(ctx: RankContext) -> None:
    """Ranks 0 and 2 share a layer, and ranks 1 and 3."""
    ranks = (0, 2) if ctx.rank % 2 == 0 else (1, 3)
    check(ctx, build(k=2, ep_size=2), [7, 9, 11, 13], ranks=ranks)


def to_expert(whole: MoE, chosen: int) -> MoE:
    """Let the sign of a token's first element decide between ``chosen`` and expert 0."""
    with torch.no_grad():
        whole.gate.weight.zero_()
        whole.gate.weight[chosen, 0] = 100.0
        whole.gate.weight[0, 0] = -100.0
    return whole


@distributed(world_size=2)
@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_experts_without_tokens(ctx: RankContext, use_reentrant: bool | None) -> None:
    """Expert 3 gets tokens from rank 1 alone; 1 and 2, one on each rank, from nobody."""
    layer = spread(ctx, to_expert(build(ep_size=2), 3))
    hidden, target = batch(ctx, [6, 6], ctx.rank, 0)
    hidden[:, 0] = -1.0 if ctx.rank == 0 else 1.0
    hidden.requires_grad_()
    if use_reentrant is None:
        found = layer(hidden)
    else:
        found = MoEOutput(*checkpoint(layer, hidden, use_reentrant=use_reentrant))
    loss_of(found, target).backward()
    assert found.expert_counts.tolist() == ([6, 0, 0, 0] if ctx.rank == 0 else [0, 0, 0, 6])
    used = "0" if ctx.rank == 0 else "3"
    for name, gradient in gradients(layer).items():
        if name.startswith("experts."):
            assert gradient.any() == (name.split(".")[2] == used), name


@distributed(world_size=2)
def test_one_rank_gets_no_tokens_at_all(ctx: RankContext) -> None:
    """All tokens of all ranks go to expert 0; rank 1 computes and reduces zeros."""
    layer = spread(ctx, to_expert(build(ep_size=2), 1))
    for k in range(3):
        hidden, target = batch(ctx, [6, 6], ctx.rank, k)
        hidden[:, 0] = -1.0
        loss_of(layer(hidden.requires_grad_()), target).backward()
    for name, gradient in gradients(layer).items():
        if name.startswith("experts."):
            assert gradient.any() == ("experts.0." in name), name


class Deep(nn.Module):
    """Two layers, one of them in a branch beside the other, each with its own loss."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first = build(k=2, ep_size=2, seed=1)
        self.second = build(2, ep_size=2, seed=2, noisy_gate_policy="RSample")
        self.third = build(k=3, ep_size=2, seed=3, drop_tokens=False)
        self.use_reentrant = use_reentrant

    def _run(self, layer: MoE, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.use_reentrant is None:
            output, loss, _ = layer(hidden)
        else:
            found: Any = checkpoint(layer, hidden, use_reentrant=self.use_reentrant)
            output, loss, _ = found
        return output, loss

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        first, loss = self._run(self.first, hidden)
        branches = [self._run(layer, torch.tanh(first)) for layer in (self.second, self.third)]
        output = first + branches[0][0] * branches[1][0]
        return output, loss + branches[0][1] + branches[1][1]


@distributed(world_size=2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_gives_the_same_bits(ctx: RankContext, use_reentrant: bool) -> None:
    """Tokens differ in number between ranks, and rank 1's last batch has none."""
    layers = [spread(ctx, Deep(how)) for how in (None, use_reentrant)]
    results = []
    for layer in layers:
        torch.manual_seed(ctx.rank)
        for k in range(3):
            hidden, target = batch(ctx, [9, 12 - 6 * k], ctx.rank, k)
            hidden.requires_grad_()
            output, loss = layer(hidden)
            ((output - target).square().sum() + loss).backward()
        results.append((output, hidden.grad))
    for plain, found in zip(*results, strict=True):
        assert plain is not None
        assert torch.equal(found, plain)
    assert_equal(gradients(layers[1]), gradients(layers[0]))


@distributed(world_size=2)
def test_backward_of_the_backward(ctx: RankContext) -> None:
    """A penalty on the gradient of the input, whose graph crosses to the other rank and back."""
    whole = build(k=2, ep_size=2, drop_tokens=False)

    def penalty(layer: MoE, hidden: Tensor, target: Tensor) -> Tensor:
        hidden = hidden.requires_grad_()
        loss = loss_of(layer(hidden), target)
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return gradient.square().sum()

    layer = spread(ctx, whole)
    penalty(layer, *batch(ctx, [8, 8], ctx.rank, 0)).backward()
    summed, own = alone(whole), alone(whole)
    for rank in range(2):
        penalty(summed, *batch(ctx, [8, 8], rank, 0)).backward()
    penalty(own, *batch(ctx, [8, 8], ctx.rank, 0)).backward()
    for name, param in layer.named_parameters():
        known = (own if name == "gate.weight" else summed).get_parameter(name).grad
        assert param.grad is not None
        assert known is not None
        assert_close(param.grad, known, name)


@distributed(world_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(ctx: RankContext, dtype: torch.dtype) -> None:
    """Against the same dtype in one process; only the shapes of the products differ."""
    whole = build(k=2, ep_size=2, dtype=dtype, drop_tokens=False)
    layer, single = spread(ctx, whole), alone(whole)
    for rank in range(2):
        hidden, target = (tensor.to(dtype) for tensor in batch(ctx, [8, 8], rank, 0))
        wanted = single(hidden)
        loss_of(wanted, target).backward()
        if rank == ctx.rank:
            found = layer(hidden)
            loss_of(found, target).backward()
            assert found.output.dtype == dtype
            rounding = 4 * torch.finfo(dtype).eps
            assert_close(found.output, wanted.output, "output", rounding)
    for name, gradient in gradients(layer).items():
        if name != "gate.weight":
            known = single.get_parameter(name).grad
            assert known is not None
            assert_close(gradient, known, name, 8 * torch.finfo(dtype).eps)


@distributed(world_size=2)
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_traffic_by_formula(ctx: RankContext, needs_gradient: bool) -> None:
    """Three exchanges in forward; in backward two, or one if the input needs no gradient.

    Rank 0 needs 5 rows for its fullest expert and rank 1 needs 3, so R is 5 on both.
    """
    ledger = Ledger()
    layer = spread(ctx, to_expert(build(ep_size=2, drop_tokens=False), 3), ledger=ledger)
    num_tokens = [7, 4][ctx.rank]
    hidden = torch.ones(num_tokens, WIDTH, dtype=torch.float64)
    hidden[[5, 3][ctx.rank] :, 0] = -1.0
    hidden.requires_grad_(needs_gradient)
    found = layer(hidden)
    buffer_bytes = 4 * 5 * WIDTH * 8
    moved = (2 * 8 + 2 * buffer_bytes) // 2
    total = ledger.totals["all_to_all"]
    assert (total.count, total.bytes_out, total.bytes_in) == (3, moved, moved)
    found.output.sum().backward()
    backward = 2 if needs_gradient else 1
    moved += backward * buffer_bytes // 2
    assert (total.count, total.bytes_out, total.bytes_in) == (3 + backward, moved, moved)


class OwnLayer(nn.Module):
    """A user's layer: rank r's map serves the r-th part of every rank's rows."""

    def __init__(self, factor: float, size: int) -> None:
        super().__init__()
        linear = nn.Linear(2, 2, bias=False)
        linear.weight.data = torch.eye(2) * factor
        self.mine = ExpertParallel(linear, size=size, axis="mine")

    def forward(self, rows: Tensor) -> Tensor:
        axis = self.mine.all_to_all
        return axis.exchange(self.mine(axis.exchange(rows)))


@distributed(world_size=[1, 2, 3])
def test_a_layer_of_ones_own(ctx: RankContext) -> None:
    """Part p of the rows comes back times p + 1, and rank r's rows are all r + 1; exact."""
    layer = spread(ctx, OwnLayer(ctx.rank + 1.0, ctx.world_size))
    output = layer(torch.full((ctx.world_size, 2), ctx.rank + 1.0))
    factors = torch.arange(1.0, ctx.world_size + 1).unsqueeze(1).expand(-1, 2)
    assert torch.equal(output, (ctx.rank + 1) * factors)
    output.sum().backward()
    ((_, gradient),) = gradients(layer).items()
    wanted = torch.full((2, 2), sum(rank + 1.0 for rank in range(ctx.world_size)))
    assert torch.equal(gradient, wanted), f"{gradient}, expected {wanted}"


@distributed(world_size=2)
def test_ranks_hold_different_experts(ctx: RankContext) -> None:
    layer = spread(ctx, build(ep_size=2))
    assert isinstance(layer.experts.all_to_all, AllToAll)
    own = {name: tensor for name, tensor in layer.state_dict().items() if "experts" in name}
    union = {name: tensor for other in rig.gathered(own) for name, tensor in other.items()}
    assert len(union) == 2 * len(own)
    whole = {n: t for n, t in build(ep_size=2).state_dict().items() if n.startswith("experts")}
    assert_equal(union, whole)
    assert isinstance(layer.experts.experts["0" if ctx.rank == 0 else "2"], Expert)
