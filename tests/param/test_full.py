"""full_parameters() and full_state_dict()."""

import pytest
import torch
from torch import nn

import onefold
from tests.harness import RankContext, distributed
from tests.rig import STAGES, House, Tower, assert_ranks_equal, start, weights, x_of


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_writes_reach_the_masters(ctx: RankContext, stage: int) -> None:
    model = House()
    engine = start(ctx, model, stage)
    with engine.full_parameters(), torch.no_grad():
        model.w.fill_(4.0)
    assert torch.equal(weights(engine)["w"], torch.full((7,), 4.0))
    engine.backward(engine(x_of(0, 1)))  # the same on every rank: the average is 2
    engine.step()
    assert torch.equal(weights(engine)["w"], torch.full((7,), 2.0))
    assert_ranks_equal(engine)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_different_writes_are_refused_on_every_rank(ctx: RankContext, stage: int) -> None:
    model = Tower()
    engine = start(ctx, model, stage)
    with pytest.raises(onefold.RankMismatchError, match="differ between rank 0 and rank 1"):  # noqa: SIM117
        with engine.full_parameters(), torch.no_grad():
            model.head.bias.fill_(float(ctx.rank))


@distributed(world_size=2)
def test_an_array_of_a_parameter_does_not_pin_its_memory(ctx: RankContext) -> None:
    model = House()
    engine = start(ctx, model, 3)
    with engine.full_parameters():
        array = model.w.detach().numpy()
        assert array.sum() == 0
    engine.backward(engine(x_of(ctx.rank, 0)))
    engine.step()
    assert torch.equal(weights(engine)["w"], torch.full((7,), -6.0))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_step_inside_is_refused(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(), stage)
    engine.backward(engine(1.0))
    with engine.full_parameters(), pytest.raises(onefold.StateError, match="full_parameters"):
        engine.step()
    engine.step()


class Tied(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_full_state_dict_is_what_an_unsharded_rank_zero_would_save(
    ctx: RankContext, stage: int
) -> None:
    torch.manual_seed(ctx.rank)
    model = Tied()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = start(ctx, model, stage)
    model.seen.fill_(10.0 + ctx.rank)
    state = engine.full_state_dict()
    assert list(state) == list(wanted)
    assert torch.equal(state["seen"], torch.full((2,), 10.0)), "buffers are rank 0's"
    assert state["head.weight"] is state["embed.weight"]
    if ctx.rank == 0:
        assert torch.equal(state["embed.weight"], wanted["embed.weight"])
    assert torch.equal(model.seen, torch.full((2,), 10.0 + ctx.rank)), "buffers stay local"


@distributed(world_size=2)
def test_state_dict_of_a_sharded_module_names_the_way_out(ctx: RankContext) -> None:
    engine = start(ctx, Tower(), 3)
    with pytest.raises(onefold.StateError, match="full_state_dict"):
        engine.module.state_dict()
    with pytest.raises(onefold.StateError, match="full_parameters"):
        engine.module.load_state_dict(Tower().state_dict())
    with engine.full_parameters():
        engine.module.load_state_dict(engine.module.state_dict())
