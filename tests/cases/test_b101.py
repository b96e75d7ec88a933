"""B101. Something is kept per step (a stream, a hook, a graph, a buffer): after 50 windows there is
as much as after 10.
"""

import gc
from collections import Counter

import pytest
import torch

import onefold
from onefold.wire.ledger import Entry
from tests.cases.wire_formula import assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import STAGES, Tower, assert_ranks_equal, counts, start, x_of

WINDOWS = 50


def _alive() -> Counter[str]:
    """What the collector tracks of this test, by type; the ledger's ring of entries is bounded."""
    gc.collect()
    types = Counter(type(thing) for thing in gc.get_objects())
    types.pop(Entry, None)
    return Counter({f"{kind.__module__}.{kind.__qualname__}": n for kind, n in types.items()})


def _hooks(engine: onefold.Engine) -> int:
    """Hooks on parameters and modules."""
    total = 0
    for param in engine.module.parameters():
        for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
            total += len(hooks or ())
    for module in engine.module.modules():
        total += len(module._forward_hooks) + len(module._forward_pre_hooks)
    return total


def _run(ctx: RankContext, engine: onefold.Engine, mode: str, first: int, last: int) -> None:
    for window in range(first, last):
        with scope(engine, mode, 1):
            engine.backward(engine(torch.tensor([[window % 11]])).sum() * x_of(ctx.rank, 0))
        engine.step()


@distributed()
@pytest.mark.parametrize("mode", ["bare", "window", "armed"])
@pytest.mark.parametrize("stage", STAGES)
def test_fifty_windows_are_flat(ctx: RankContext, stage: int, mode: str) -> None:
    sgd = lambda params: torch.optim.SGD(params, lr=1e-3)  # noqa: E731
    engine = start(ctx, Tower(width=2, layers=1), stage, optimizer=sgd)
    arena = engine._transaction._arena
    mark = engine.ledger.mark()
    _run(ctx, engine, mode, 0, 10)
    _alive()  # looking makes some objects too, once
    before, hooks, peak = _alive(), _hooks(engine), arena.peak_bytes
    _run(ctx, engine, mode, 10, WINDOWS)
    grown = {name: n for name, n in (_alive() - before).items() if n >= (WINDOWS - 10) // 2}
    assert not grown, f"more objects after {WINDOWS} windows than after 10: {grown}"
    assert _hooks(engine) == hooks
    assert arena.peak_bytes == peak
    assert arena.leased_bytes == 0
    assert len(engine.ledger.recent) <= (engine.ledger.recent.maxlen or 0)
    if mode != "bare":
        assert_wire(counts(engine, mark), wire(engine, mode, steps=WINDOWS))
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", [0, 3])
def test_growth_is_seen(ctx: RankContext, stage: int) -> None:
    """Negative control: a list of losses is seen."""
    engine = start(ctx, Tower(layers=1), stage)
    before = _alive()
    kept = [engine(torch.tensor([[1, 2]])).detach() for _ in range(40)]
    assert sum((_alive() - before).values()) >= len(kept)
    assert_ranks_equal(engine)
