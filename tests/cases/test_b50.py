"""B50. A replayed or recomputed forward must see the same random numbers as the first one, and
neither the engine nor a window may draw or disturb any.
"""

import copy

import pytest
import torch

from tests.cases.gradcache import (
    ROWS,
    Encode,
    assert_state,
    columns,
    grad_cache,
    info_nce,
    num_chunks,
)
from tests.cases.wire_formula import MODES, assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import STAGES, assert_ranks_equal, counts, gathered, start, weights


def _reference(ctx: RankContext, model: Encode, states: list[torch.Tensor]) -> dict:
    """The full batch in one process, with every rank's own masks, drawn chunk by chunk."""
    queries: list[torch.Tensor] = []
    documents: list[torch.Tensor] = []
    for rank, state in enumerate(states):
        torch.set_rng_state(state)
        for column, rows in zip(columns(ctx, 0, rank), (queries, documents), strict=True):
            rows.append(torch.cat([model(part) for part in column.split(2)]))
    everything = torch.cat(documents)
    losses = [info_nce(own, everything, rank * ROWS) for rank, own in enumerate(queries)]
    torch.stack(losses).mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return model.state_dict()


@distributed()
@pytest.mark.parametrize(
    ("mode", "recomputes"),
    [("bare", False), ("bare", True), ("window", True), ("no_sync", False)],
)
@pytest.mark.parametrize("stage", STAGES)
def test_masks_are_replayed(ctx: RankContext, stage: int, mode: str, recomputes: bool) -> None:
    model = Encode(0, dropout=0.5)
    reference = copy.deepcopy(model)
    model.recomputes = recomputes
    engine = start(ctx, model, stage)
    torch.manual_seed(100 + ctx.rank)
    begin = torch.get_rng_state()
    mark = engine.ledger.mark()
    with scope(engine, mode, 1):
        grad_cache([engine, engine], columns(ctx, 0), engine.backward, is_nested=True)
    engine.step()
    found = counts(engine, mark)
    after = torch.get_rng_state()
    wanted = _reference(ctx, reference, gathered(begin))
    assert_state(weights(engine), wanted)
    assert_ranks_equal(engine)
    passes = num_chunks()
    expected = wire(engine, mode, backwards=passes, forwards=2 * passes)
    if mode == "bare" and stage == 3:  # test_b54 counts those; a recompute may gather again
        del expected["all_gather"], found["all_gather"]
    assert_wire(found, expected)

    # The state is that of a run that encoded once, replayed nothing and had no engine.
    torch.set_rng_state(begin)
    for column in columns(ctx, 0):
        for part in column.split(2):
            reference(part)
    assert torch.equal(torch.get_rng_state(), after)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_draws_nothing(ctx: RankContext, stage: int) -> None:
    model = Encode(0)
    torch.manual_seed(7 + ctx.rank)
    before = torch.get_rng_state()
    engine = start(ctx, model, stage)
    for mode in MODES:
        with scope(engine, mode):
            engine.backward(engine(columns(ctx, 0)[0]).sum())
        engine.step()
    assert_ranks_equal(engine)
    assert torch.equal(torch.get_rng_state(), before)


@distributed()
@pytest.mark.parametrize("stage", [0, 3])
def test_fresh_masks_are_seen(ctx: RankContext, stage: int) -> None:
    """Negative control: other masks give another gradient, far above the tolerance."""
    states = []
    for seed in (1, 2):
        model = Encode(0, dropout=0.5)
        engine = start(ctx, model, stage)
        torch.manual_seed(seed)
        with engine.coalesce_grad_reduction():
            grad_cache([engine, engine], columns(ctx, 0), engine.backward)
        engine.step()
        states.append(weights(engine)["layers.0.weight"])
    assert (states[0] - states[1]).abs().max() > 1e-6
