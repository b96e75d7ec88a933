"""Models built on the meta device get rank 0's first weights, block by block."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import RankContext, distributed
from tests.rig import STAGES, Tower, gathered, start


def reset_tower(seed: int) -> dict[str, torch.Tensor]:
    """What rank 0's random numbers give when module after module is reset."""
    model = Tower(dtype=torch.float32)
    torch.manual_seed(seed)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_first_weights_are_rank_zeros(ctx: RankContext, stage: int) -> None:
    wanted = reset_tower(seed=5)
    with torch.device("meta"):
        model = Tower(dtype=torch.float32)
    params = list(model.parameters())
    torch.manual_seed(5 + ctx.rank)
    engine = start(ctx, model, stage)
    assert all(param is known for param, known in zip(model.parameters(), params, strict=True)), (
        "parameters must stay the user's own objects"
    )
    state = engine.full_state_dict()
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name
    tokens = torch.arange(8).reshape(2, 4)
    engine.backward(engine(tokens).sum())
    engine.step()
    changed = engine.full_state_dict()
    assert not torch.equal(changed["head.weight"], state["head.weight"])


class WithBuffer(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.zeros(2), persistent=persistent)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Parameter(torch.zeros(3))


@distributed(world_size=2)
def test_what_nobody_can_fill_is_refused_by_name(ctx: RankContext) -> None:
    with torch.device("meta"):
        bare, buffered = nn.Sequential(nn.Linear(2, 2), Bare()), WithBuffer(persistent=False)
    with pytest.raises(ValueError, match=r"module 1 \(Bare\) has no reset_parameters"):
        start(ctx, bare, 3)
    with pytest.raises(ValueError, match="buffer table is not persistent"):
        start(ctx, buffered, 3)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_persistent_buffers_are_filled_and_broadcast(ctx: RankContext, stage: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    engine = start(ctx, model, stage)
    buffers = dict(model.named_buffers())
    assert torch.equal(buffers["1.running_var"], torch.ones(3))
    assert int(buffers["1.num_batches_tracked"]) == 0
    engine.backward(engine(ctx.data(4, 3)).sum())
    engine.step()


class InitByModel(nn.Module):
    """As Hugging Face models do: one method of the root fills every module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.constant_(module.bias, 7.0)


@distributed(world_size=2)
def test_init_weights_of_the_root_is_used(ctx: RankContext) -> None:
    with torch.device("meta"):
        model = InitByModel()
    state = start(ctx, model, 3).full_state_dict()
    assert torch.equal(state["layers.1.bias"], torch.full((3,), 7.0))
    assert state["layers.0.weight"].abs().sum() > 0
    for other in gathered(state):
        assert torch.equal(other["layers.0.weight"], state["layers.0.weight"])


@distributed(world_size=2)
def test_no_rank_holds_the_whole_model(ctx: RankContext) -> None:
    from onefold.unit import Unit

    peaks: list[int] = []
    units: list[Unit] = []

    class Watched(nn.Linear):
        def reset_parameters(self) -> None:
            live = [u for u in units if u.param_full.untyped_storage().nbytes()]
            peaks.append(sum(unit.layout.numel for unit in live))

    original = Unit.__init__

    def remember(unit: Unit, *args: Any) -> None:
        original(unit, *args)
        units.append(unit)

    setattr(Unit, "__init__", remember)  # noqa: B010 (mypy knows no other way)
    ctx.cleanup(setattr, Unit, "__init__", original)
    with torch.device("meta"):
        model = nn.Sequential(*(Watched(8, 8) for _ in range(6)))
    peaks.clear()
    start(ctx, model, 3)
    one_block = max(unit.layout.numel for unit in units)
    if ctx.rank == 0:
        assert max(peaks) <= 2 * one_block
