"""B55. A cached loss where gradients or parameters are sharded: the gradient must be that of the
full batch, with recomputed activations, nested replays and outer accumulation as well.
"""

import pytest

from tests.cases.gradcache import Encode, assert_state, columns, full_batch, grad_cache
from tests.cases.wire_formula import assert_wire, num_trainable, reduction_kind, scope
from tests.harness import RankContext, distributed
from tests.rig import STAGES, assert_ranks_equal, counts, start, weights


@distributed()
@pytest.mark.parametrize(("is_nested", "recomputes"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("stage", STAGES)
def test_the_full_batch(ctx: RankContext, stage: int, is_nested: bool, recomputes: bool) -> None:
    wanted = full_batch(ctx, [Encode(0)], keys=[0, 1])
    model = Encode(0)
    model.recomputes = recomputes
    engine = start(ctx, model, stage, config={"gradient_accumulation_steps": 2})
    mark = engine.ledger.mark()
    for key in range(2):
        with engine.coalesce_grad_reduction():
            grad_cache([engine, engine], columns(ctx, key), engine.backward, is_nested=is_nested)
        engine.step()
    units = num_trainable(engine)
    rounds = 2 if stage >= 2 else 1  # one per window where gradients are Shard
    expected = {reduction_kind(engine): rounds * units}
    if stage:
        expected["all_gather"] = 2 * len(engine.plan.units) if stage == 3 else units
    assert_wire(counts(engine, mark), expected)
    assert_state(weights(engine), wanted[0])
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("mode", ["bare", "window"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_towers_in_every_mode(ctx: RankContext, stage: int, mode: str) -> None:
    """Bare, a nested replay through two engines; and a second step on the stepped weights."""
    towers = [Encode(1), Encode(2)]
    engines = [start(ctx, Encode(1), stage), start(ctx, Encode(2), stage)]
    for key in range(2):
        wanted = full_batch(ctx, towers, keys=[key])
        with scope(engines[0], mode), scope(engines[1], mode):
            grad_cache(engines, columns(ctx, key), engines[0].backward, is_nested=True)
        for engine, state in zip(engines, wanted, strict=True):
            engine.step()
            assert_state(weights(engine), state)
            assert_ranks_equal(engine)
        for tower in towers:
            tower.zero_grad()
    assert [engine.global_steps for engine in engines] == [2, 2]
