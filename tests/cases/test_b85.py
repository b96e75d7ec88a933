"""B85. A state that can only be loaded by as many ranks as saved it: the full state dict of one
world size and stage goes into any other, and training goes on as if nothing had happened.
"""

import pytest
import torch
from torch import Tensor

import onefold
from tests.cases.gradcache import assert_state
from tests.cases.wire_formula import assert_wire, scope, wire
from tests.harness import RankContext, pool_for
from tests.rig import Tower, assert_ranks_equal, counts, start, weights

STEPS = 3
BATCH = 12  # of all ranks together
LR = 0.1


def _tower(seed: int) -> Tower:
    torch.manual_seed(seed)
    return Tower(width=5, layers=2)


def _tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (BATCH, 3), generator=generator)


def _loss(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def _steps(ctx: RankContext, engine: onefold.Engine, first: int) -> None:
    mode = "window" if first else "bare"
    mark = engine.ledger.mark()
    for step in range(first, first + STEPS):
        with scope(engine, mode, 1):
            own = _tokens(step).chunk(ctx.world_size)[ctx.rank]
            engine.backward(_loss(engine(own)))
        engine.step()
    if mode == "window":
        assert_wire(counts(engine, mark), wire(engine, mode, steps=STEPS))
    assert_ranks_equal(engine)


def _sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)  # type: ignore[arg-type]


def save(ctx: RankContext, stage: int) -> dict[str, Tensor]:
    """Train three steps from seed 0, on this rank's part of the batches."""
    engine = start(ctx, _tower(0), stage, optimizer=_sgd)
    _steps(ctx, engine, 0)
    return engine.full_state_dict()


def resume(
    ctx: RankContext, stage: int, state: dict[str, Tensor], is_loaded_first: bool
) -> dict[str, Tensor]:
    """Load into a fresh model, before the engine (rank 0 only) or into it; three more steps."""
    model = _tower(10 + ctx.rank)
    if is_loaded_first and ctx.rank == 0:
        model.load_state_dict(state)
    engine = start(ctx, model, stage, optimizer=_sgd)
    if not is_loaded_first:
        with engine.full_parameters():
            engine.module.load_state_dict(state)
    for name, tensor in weights(engine).items():
        assert torch.equal(tensor, state[name]), name
    _steps(ctx, engine, STEPS)
    return weights(engine)


def _reference() -> dict[str, Tensor]:
    model = _tower(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        _loss(model(_tokens(step))).backward()
        optimizer.step()
    return model.state_dict()


MOVES = [(2, 3, 1, 0), (2, 3, 3, 2), (2, 2, 4, 3), (3, 1, 2, 3), (4, 3, 2, 1), (1, 0, 4, 3)]


@pytest.mark.parametrize("is_loaded_first", [False, True], ids=["into engine", "before engine"])
@pytest.mark.parametrize(("ranks", "stage", "then_ranks", "then_stage"), MOVES)
def test_another_world_size_and_stage(
    ranks: int, stage: int, then_ranks: int, then_stage: int, is_loaded_first: bool
) -> None:
    saved = pool_for(ranks).run(save, stage=stage)
    for state in saved[1:]:
        for name, tensor in state.items():
            assert torch.equal(tensor, saved[0][name]), f"{name} of the saved state differs"
    resumed = pool_for(then_ranks).run(
        resume, stage=then_stage, state=saved[0], is_loaded_first=is_loaded_first
    )
    wanted = _reference()
    for state in resumed:
        assert_state(state, wanted)
