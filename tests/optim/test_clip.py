"""The global norm of every order, and clipping by it: each element counts once."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.experts import ExpertParallel, NumberedExperts
from tests import rig
from tests.cases.wire_formula import MODES, scope
from tests.harness import RankContext, distributed, pool_for

ORDERS = [1.0, 2.0, 3.0, math.inf]
LAYOUTS = ["one axis", "replicas", "experts", "experts and replicas"]
NUMELS = {"dense.0": 48, "dense.1": 5, "dense.2": 144}  # several 64-byte lines: shards differ
EXPERTS = {"experts.experts.0": 48, "experts.experts.1": 48}


class Own(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel, dtype=torch.float64))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.w * gradient).sum()


class Mixture(nn.Module):
    """Dense and expert parameters; each one's gradient is a fixed vector times the input."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.dense = nn.ModuleList(Own(numel) for numel in NUMELS.values())
        built = NumberedExperts(Own(numel) for numel in EXPERTS.values())
        self.experts = ExpertParallel(built, size=ep_size)

    def forward(self, x: float) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for name, own in self.named_modules():
            if isinstance(own, Own):
                loss = loss + own(direction(name) * x)
        return loss


def direction(name: str) -> Tensor:
    """What the gradient of the parameter ``name`` is a multiple of."""
    name = name.removesuffix(".w")
    every = NUMELS | EXPERTS
    generator = torch.Generator().manual_seed(list(every).index(name))
    return torch.randn(every[name], generator=generator, dtype=torch.float64)


def start(ctx: RankContext, layout: str, stage: int, config: dict[str, Any]) -> onefold.Engine:
    arguments: dict[str, Any] = {}
    if "replicas" in layout:
        arguments["mesh"] = ctx.device_mesh(2, 2, names=("replicate", "shard"))
    model = Mixture(2 if "experts" in layout else 1)
    return rig.start(ctx, model, stage, config=config, **arguments)


def run(ctx: RankContext, engine: onefold.Engine, mode: str = "window") -> dict[str, Tensor]:
    """Two backwards with every rank's own terms; returns the averaged gradients by name."""
    with scope(engine, mode, 2):
        for k in range(2):
            engine.backward(engine(rig.x_of(ctx.rank, k)))
    held = rig.gathered([name for name, _ in engine.module.named_parameters()])
    totals: dict[str, float] = {}
    for rank, names in enumerate(held):
        for name in names:
            terms = sum(rig.x_of(rank, k) for k in range(2)) / ctx.world_size
            totals[name] = totals.get(name, 0.0) + terms
    return {name: direction(name) * total for name, total in totals.items()}


def norm_of(gradients: dict[str, Tensor], order: float = 2.0) -> float:
    return float(torch.linalg.vector_norm(torch.cat(list(gradients.values())), order))


def near(value: float) -> Any:
    """Rounded to fp32, as the engine's norms and what is made of them are."""
    return pytest.approx(value, rel=2**-22)


def assert_moved(engine: onefold.Engine, gradients: dict[str, Tensor]) -> None:
    """The weights, which were zeros, moved by minus ``gradients`` times the factor, everywhere."""
    state = engine.full_state_dict()
    assert state.keys() == gradients.keys()
    for name, gradient in gradients.items():
        wanted = -gradient * engine.clip_factor
        torch.testing.assert_close(state[name], wanted, rtol=1e-13, atol=1e-14, msg=name)
    with engine.full_parameters():
        pass  # raises if replicas differ


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_everything_counts_once(layout: str, stage: int, order: float, by_hand: bool) -> None:
    pool = pool_for(4 if "replicas" in layout else 2)
    pool.run(check, layout=layout, stage=stage, order=order, by_hand=by_hand)


def check(ctx: RankContext, layout: str, stage: int, order: float, by_hand: bool) -> None:
    clipping = {"gradient_clipping": 3.0, "onefold": {"norm_order": order}}
    engine = start(ctx, layout, stage, {} if by_hand else clipping)
    assert engine.get_global_grad_norm() is None
    gradients = run(ctx, engine)
    norm = norm_of(gradients, order)
    assert norm > 3.0
    if by_hand:
        assert engine.clip_grad_norm(3.0, norm_type=order) == near(norm)
    else:
        engine.reduce_gradients()
        assert engine.get_global_grad_norm() == near(norm)
    engine.step()
    told = (engine.get_global_grad_norm(), engine.clip_factor)
    assert told == (near(norm), near(3.0 / (norm + 1e-6)))  # the norm is that before clipping
    assert rig.gathered(told) == [told] * ctx.world_size
    assert_moved(engine, gradients)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
def test_by_hand_in_every_mode(ctx: RankContext, stage: int, mode: str) -> None:
    """Clipped by hand, what ``full_grad`` reads is clipped, and step() takes it as it is."""
    engine = start(ctx, "one axis", stage, {})
    gradients = run(ctx, engine, mode)
    norm = norm_of(gradients)
    assert engine.clip_grad_norm(1.0) == near(norm)
    for name, param in engine.module.named_parameters():
        found = engine.full_grad(param)
        torch.testing.assert_close(found, gradients[name] / (norm + 1e-6), rtol=1e-6, atol=1e-14)
    engine.step()
    assert engine.clip_factor == near(1 / (norm + 1e-6))
    assert_moved(engine, gradients)
    run(ctx, engine, mode)
    engine.step()
    assert (engine.clip_factor, engine.get_global_grad_norm()) == (1.0, near(norm))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_by_hand_and_by_config_multiply(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, "one axis", stage, {"gradient_clipping": 1.0})
    gradients = run(ctx, engine)
    norm = norm_of(gradients)
    engine.clip_grad_norm(4.0)
    engine.step()
    assert engine.get_global_grad_norm() == near(norm)
    assert engine.clip_factor == pytest.approx(1.0 / norm, rel=1e-5)
    assert_moved(engine, gradients)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_small_gradients_stay_as_they_are(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, "one axis", stage, {"gradient_clipping": 1e6})
    gradients = run(ctx, engine)
    assert engine.clip_grad_norm(1e6) == near(norm_of(gradients))
    engine.step()
    assert engine.clip_factor == 1.0
    assert_moved(engine, gradients)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("opened", ["window", "armed", "no_sync", "full_parameters", "backward"])
def test_by_hand_is_refused_inside(ctx: RankContext, stage: int, opened: str) -> None:
    engine = start(ctx, "one axis", stage, {})
    if opened == "backward":
        loss = engine(rig.x_of(ctx.rank, 0))
        loss.register_hook(lambda _grad: _refused(engine, "inside a backward"))
        engine.backward(loss)
    elif opened == "full_parameters":
        with engine.full_parameters():
            _refused(engine, r"inside full_parameters\(\)")
    else:
        with scope(engine, opened, 1):
            engine.backward(engine(rig.x_of(ctx.rank, 0)))
            _refused(engine, "Leave the with-block first")
    engine.zero_grad()
    gradients = run(ctx, engine)
    engine.step()
    assert engine.clip_factor == 1.0
    assert_moved(engine, gradients)


def _refused(engine: onefold.Engine, words: str) -> None:
    with pytest.raises(onefold.StateError, match=words):
        engine.clip_grad_norm(1.0)


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("max_norm", "order"), [(0.0, 2.0), (-1.0, 2.0), (math.nan, 2.0), (1.0, 0.5), (1.0, math.nan)]
)
def test_what_is_no_norm_is_refused(ctx: RankContext, max_norm: float, order: float) -> None:
    engine = start(ctx, "one axis", 2, {})
    run(ctx, engine)
    with pytest.raises(ValueError, match="expected max_norm above 0 and norm_type of 1 or above"):
        engine.clip_grad_norm(max_norm, order)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("order", [20.0, 100.0, 400.0])
@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_high_orders_of_any_size(ctx: RankContext, stage: int, order: float, size: float) -> None:
    """1e4 to the power of 100 is no fp64 any more, nor is 1e-4 to it; the norm is."""
    engine = start(ctx, "one axis", stage, {"onefold": {"norm_order": order}})
    engine.backward(engine(size * rig.x_of(ctx.rank, 0)))
    gradients = torch.cat([direction(name) for name in (*NUMELS, *EXPERTS)]) * size * 6
    largest = gradients.abs().max()
    norm = float(largest * torch.linalg.vector_norm(gradients / largest, order))
    engine.reduce_gradients()
    assert engine.get_global_grad_norm() == near(norm)
    engine.step()
    assert engine.was_step_applied()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
def test_finite_gradients_step_however_large(ctx: RankContext, stage: int) -> None:
    """Only what is not finite is skipped; here only the norm is beyond fp32."""
    house = rig.House(numel=16)
    engine = rig.start(ctx, house, stage, config={"gradient_clipping": 1.0})
    engine.backward(engine(1.5e38))
    engine.step()
    assert engine.was_step_applied()
    torch.testing.assert_close(
        rig.weights(engine)["w"], torch.full((16,), -0.25), rtol=1e-5, atol=0
    )


def _of_one_process(max_norm: float, order: float) -> Callable[[list[Tensor]], Tensor]:
    """What torch's own clipping makes of gradients, as one vector."""

    def clipped(gradients: list[Tensor]) -> Tensor:
        params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type=order)
        return torch.cat([param.grad for param in params if param.grad is not None])

    return clipped


@distributed(world_size=3)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("order", ORDERS)
def test_as_torch_clips_in_one_process(ctx: RankContext, stage: int, order: float) -> None:
    engine = start(ctx, "one axis", stage, {})
    gradients = run(ctx, engine)
    engine.clip_grad_norm(2.0, norm_type=order)
    engine.step()
    wanted = _of_one_process(2.0, order)(list(gradients.values()))
    found = -torch.cat(list(engine.full_state_dict().values()))
    torch.testing.assert_close(found, wanted, rtol=2**-22, atol=1e-14)
