"""B59: a batch encoded in chunks does not give the gradient of the batch as a whole.

Without dropout they agree to fp64's rounding, for every chunk size, also one that leaves a rest.
One tower for both columns is still one reduction per unit: columns and chunks do not multiply it.
"""

import pytest
import torch
from torch import Tensor

import onefold
from tests import rig
from tests.cases.gradcache import ROWS, Encode, columns, full_batch, grad_cache, info_nce
from tests.cases.modes import assert_num_reductions, num_units, scope
from tests.cases.test_b57 import own_gather
from tests.harness import RankContext, distributed

CHUNKS = [1, 3, ROWS]


def averaged(engine: onefold.Engine) -> dict[str, Tensor]:
    engine.reduce_gradients()
    found: dict[str, Tensor] = {}
    for name, param in engine.module.named_parameters():
        gradient = engine.full_grad(param)
        assert gradient is not None, name
        found[name] = gradient
    return found


def whole(ctx: RankContext, engine: onefold.Engine) -> dict[str, Tensor]:
    """The gradient of the same loss without any chunks, through the engine."""
    queries, documents = (engine(column) for column in columns(ctx, 0))
    engine.backward(info_nce(queries, own_gather(documents), ctx.rank * ROWS))
    return averaged(engine)


def assert_agree(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """To 1e-12: eps of fp64 times some hundred additions of terms of order 1, and some room."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.abs().sum() > 1e-3, f"{name} has no gradient to compare"
        error = (found[name] - tensor).abs().max().item()
        assert error <= 1e-12, f"{name} is off by {error}"


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("is_nested", [False, True])
@distributed(world_size=2)
def test_chunked_is_whole(ctx: RankContext, stage: int, is_nested: bool) -> None:
    engine = rig.start(ctx, Encode(0), stage)
    wanted = whole(ctx, engine)
    for chunk in CHUNKS:
        engine.zero_grad()
        mark = engine.ledger.mark()
        batch, encoders = columns(ctx, 0), [engine, engine]
        with engine.coalesce_grad_reduction() as window:
            if is_nested:
                grad_cache(encoders, batch, engine.backward, chunk=chunk, is_nested=True)
            else:
                grad_cache(encoders, batch, engine.backward, chunk=chunk)
        assert window.backwards == (1 if is_nested else 2 * -(-ROWS // chunk))
        found = averaged(engine)
        assert_num_reductions(engine, stage, mark, num_units(engine))
        assert_agree(found, wanted)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=3)
def test_chunked_is_one_process(ctx: RankContext, stage: int) -> None:
    """The other reference: all ranks' rows in one process; here by the stepped weights."""
    wanted = full_batch(ctx, [Encode(0)], keys=[0])[0]
    for chunk in CHUNKS[1:]:
        engine = rig.start(ctx, Encode(0), stage)
        mark = engine.ledger.mark()
        with engine.coalesce_grad_reduction():
            grad_cache([engine, engine], columns(ctx, 0), engine.backward, chunk=chunk)
        engine.step()
        assert_num_reductions(engine, stage, mark, num_units(engine))
        assert_agree(rig.weights(engine), wanted)


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_without_a_window_every_chunk_is_reduced(ctx: RankContext, stage: int) -> None:
    """Control: the same gradient, and one reduction per unit, chunk and column."""
    engine = rig.start(ctx, Encode(0), stage)
    wanted = whole(ctx, engine)
    engine.zero_grad()
    mark = engine.ledger.mark()
    with scope(engine, "bare", 1):
        grad_cache([engine, engine], columns(ctx, 0), engine.backward, chunk=2)
    found = averaged(engine)
    assert_num_reductions(engine, stage, mark, ROWS * num_units(engine))
    assert_agree(found, wanted)


@distributed(world_size=2)
def test_another_loss_is_noticed(ctx: RankContext) -> None:
    """Negative control: one chunk left out is far above the tolerance."""
    engine = rig.start(ctx, Encode(0), 2)
    wanted = whole(ctx, engine)
    engine.zero_grad()
    queries, documents = columns(ctx, 0)
    documents = torch.cat([documents[:-1], documents[:1]])
    with engine.coalesce_grad_reduction():
        grad_cache([engine, engine], [queries, documents], engine.backward)
    with pytest.raises(AssertionError, match="is off by"):
        assert_agree(averaged(engine), wanted)
