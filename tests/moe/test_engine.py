"""Experts under the engine: gradients, norms and weights equal those of one process with them all.

Every rank has its own tokens, and capacity is counted per rank, so the reference runs each rank's
batch through a whole model of its own forward, and adds.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.experts import ExpertParallel
from onefold.moe import MoE
from tests import rig
from tests.cases.modes import MODES
from tests.cases.wire_formula import scope
from tests.harness import RankContext, distributed, pool_for
from tests.rig import STAGES, start

WIDTH = 8
GRIDS = [(1, 2), (2, 2), (1, 4), (2, 4), (4, 4)]  # (ep, ranks)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(rows)))


class Block(nn.Module):
    def __init__(self, ep_size: int, **settings: Any) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, Expert, 4, ep_size=ep_size, k=2, **settings)
        self.balance: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        output, self.balance, _ = self.moe(torch.tanh(self.mix(hidden)))
        return hidden + output


class Model(nn.Module):
    def __init__(self, ep_size: int, recompute: bool = False, **settings: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(ep_size, **settings) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self._recompute = recompute

    def forward(self, hidden: Tensor) -> Tensor:
        """A loss, with a part of each layer's load-balancing loss."""
        total = torch.zeros((), dtype=hidden.dtype)
        for layer in self.layers:
            assert isinstance(layer, Block)
            if self._recompute:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
            assert layer.balance is not None
            total = total + 0.01 * layer.balance
        return self.head(hidden).square().mean() + total


def make(ep_size: int, **settings: Any) -> Model:
    torch.manual_seed(3)
    return Model(ep_size, **settings).double()


def tokens(rank: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + k)
    return torch.randn(6 + rank, WIDTH, generator=generator, dtype=torch.float64)


def reference(world_size: int, backwards: int, **settings: Any) -> Model:
    """One process with all experts; ``.grad`` is the mean over ranks of the sum over backwards."""
    model = make(1, **settings)
    for rank in range(world_size):
        for k in range(backwards):
            model(tokens(rank, k)).backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= world_size
    return model


def assert_gradients(engine: onefold.Engine, wanted: Model) -> None:
    named = dict(wanted.named_parameters())
    for name, param in engine.module.named_parameters():
        found = engine.full_grad(param)
        gradient = named[name].grad
        assert (found is None) == (gradient is None), name
        if found is not None and gradient is not None:
            torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-14, msg=name)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("ep_size", "world_size"), GRIDS)
def test_gradients_norm_and_weights(
    stage: int, mode: str, recompute: bool, ep_size: int, world_size: int
) -> None:
    pool_for(world_size).run(check, stage=stage, mode=mode, recompute=recompute, ep_size=ep_size)


def check(ctx: RankContext, stage: int, mode: str, recompute: bool, ep_size: int) -> None:
    engine = start(
        ctx, make(ep_size, recompute=recompute), stage, config={"gradient_clipping": 0.05}
    )
    wanted = reference(ctx.world_size, 3)
    with scope(engine, mode, 3):
        for k in range(3):
            engine.backward(engine(tokens(ctx.rank, k)))
    engine.reduce_gradients()
    assert_gradients(engine, wanted)
    squares = [param.grad.square().sum() for param in wanted.parameters() if param.grad is not None]
    norm = torch.stack(squares).sum().sqrt()
    assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-6)
    engine.step()
    assert engine.clip_factor == pytest.approx(0.05 / float(norm), rel=1e-4)
    state = engine.full_state_dict()
    assert state.keys() == wanted.state_dict().keys()
    for name, param in wanted.named_parameters():
        assert param.grad is not None
        after = param.detach() - engine.clip_factor * param.grad
        torch.testing.assert_close(state[name], after, rtol=1e-10, atol=1e-12, msg=name)
    with engine.full_parameters():
        pass  # raises if replicas differ


@distributed(world_size=4)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("names", [("replicate", "shard"), ("shard", "expert")], ids="+".join)
@pytest.mark.parametrize("mode", ["bare", "window", "across"])
def test_on_meshes_of_two_axes(
    ctx: RankContext, stage: int, names: tuple[str, str], mode: str
) -> None:
    """Experts along neighbours of the shard axis, or on an axis of their own."""
    mesh = ctx.device_mesh(2, 2, names=names)
    engine = start(ctx, make(2), stage, mesh=mesh)
    wanted = reference(4, 3)
    opened: Any = scope(engine, mode, 3)
    if mode == "across":
        opened = engine.coalesce_grad_reduction(across="replicate")
    with opened:
        for k in range(3):
            engine.backward(engine(tokens(ctx.rank, k)))
    engine.reduce_gradients()
    assert_gradients(engine, wanted)
    group = next(group for group in engine.plan.groups if group.expert_axis)
    cut = engine._world.grid.cut(group, ctx.rank, shards=stage > 0)
    assert len(cut.expert.members) == 2
    assert cut.expert.members == ((0, 1) if ctx.rank < 2 else (2, 3))


class Scales(nn.Module):
    """A user's own layer: rank p of the axis multiplies by its own vector; 2 vectors in all."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.full((1, 5), value))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.own


class OwnLayer(nn.Module):
    def __init__(self, size: int, value: float) -> None:
        super().__init__()
        self.scales = ExpertParallel(Scales(value), size=size, axis="vectors")
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, rows: Tensor) -> Tensor:
        """``[2, 5]``: row p goes to rank p, is scaled there, and comes back."""
        exchange = self.scales.all_to_all
        return (exchange.exchange(self.scales(exchange.exchange(rows))) + self.bias).sum()


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_of_the_user_s_own(ctx: RankContext, stage: int, mode: str) -> None:
    """Row p of rank r, backward k is 10 r + k + p + 1: the gradient of vector p is their mean."""
    engine = start(ctx, OwnLayer(2, value=1.0 + ctx.rank % 2), stage)
    layer = engine.module
    assert isinstance(layer, OwnLayer)
    with scope(engine, mode, 3):
        for k in range(3):
            rows = torch.stack([torch.full((5,), 10.0 * ctx.rank + k + p + 1) for p in range(2)])
            engine.backward(engine(rows))
    engine.step()
    own = ctx.rank % 2
    gradients = [
        sum(10.0 * r + k + p + 1 for r in range(ctx.world_size) for k in range(3)) / ctx.world_size
        for p in range(2)
    ]
    state = engine.full_state_dict()
    wanted = torch.stack([torch.full((5,), 1.0 + p - gradients[p]) for p in range(2)])
    assert torch.equal(state["scales.experts.own"], wanted), "joined along dim 0, in axis order"
    assert torch.equal(state["bias"], torch.full((5,), -6.0))
    with engine.full_parameters():
        [held] = layer.scales.parameters()
        assert torch.equal(held, wanted[own : own + 1])


@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_experts_that_do_not_fit_are_refused_on_every_rank(ctx: RankContext, stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MoE(WIDTH, Expert, 6, ep_size=3))
    with pytest.raises(ValueError, match=r"experts over 3 ranks .ep_size. do not divide"):
        start(ctx, model, stage)
    mesh = ctx.device_mesh(2, ctx.world_size // 2, names=("shard", "expert"))
    if ctx.world_size == 2:
        with pytest.raises(ValueError, match="has 1 ranks, but the model has experts over 2"):
            start(ctx, make(2), stage, mesh=mesh)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_an_expert_that_nobody_touched_keeps_its_moments(ctx: RankContext, stage: int) -> None:
    """Rank 0 holds expert 0, which is used; rank 1 holds expert 1, which is not: None, not zero."""
    model = nn.Sequential(ExpertParallel(Scales(1.0), size=2))
    engine = start(
        ctx, model, stage, optimizer=lambda params: torch.optim.AdamW(params, weight_decay=0.1)
    )
    for _ in range(3):
        if ctx.rank == 0:
            engine.backward(model(torch.ones(1, 5)).sum())
        engine.step()
    own = rig.weights(engine)["0.experts.own"][ctx.rank]
    assert torch.equal(own, torch.ones(5)) == (ctx.rank == 1)
