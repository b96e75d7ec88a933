"""How a case runs its backwards, and what must cross the wire then."""

from collections.abc import Iterator
from contextlib import contextmanager

import onefold
from tests.harness import RankContext
from tests.rig import x_of

MODES = ["bare", "window", "armed", "no_sync"]
SCOPES = ["window", "armed", "no_sync"]


@contextmanager
def scope(engine: onefold.Engine, mode: str, backwards: int = 1) -> Iterator[None]:
    """Where the backwards of one step run; ``backwards`` outermost ones are announced if armed."""
    if mode == "bare":
        yield
    elif mode == "no_sync":
        with engine.no_sync():
            yield
    else:
        declared = backwards if mode == "armed" else None
        with engine.coalesce_grad_reduction(backwards=declared):
            yield


def run_house(ctx: RankContext, engine: onefold.Engine, mode: str, backwards: int) -> None:
    """The house rig's backwards 0 .. n-1 of this rank, in one scope."""
    with scope(engine, mode, backwards):
        for k in range(backwards):
            engine.backward(engine(x_of(ctx.rank, k)))


def num_trainable(engine: onefold.Engine) -> int:
    """Units with gradients."""
    return sum(unit.is_trainable for unit in engine.plan.units)


def reduction_kind(engine: onefold.Engine) -> str:
    """The collective that takes a gradient home."""
    return "reduce_scatter" if engine.plan.home.shards_optimizer else "all_reduce"


def wire(
    engine: onefold.Engine,
    mode: str,
    *,
    backwards: int = 1,
    forwards: int | None = None,
    steps: int = 1,
    scopes: int | None = None,
) -> dict[str, int]:
    """Data collectives by kind of ``steps`` steps, where every pass uses every unit.

    Reductions: one per trainable unit and backward where gradients are Shard and nothing is open;
    one per trainable unit and flush else, and where gradients are Partial the only flush is step().
    Gathers: one per unit and forward or backward where parameters are Shard and nothing is open,
    one per unit and scope else; where only the optimizer is Shard, one per trainable unit and step.

    Args:
        engine: any.
        mode: what is open during the backwards.
        backwards: per step.
        forwards: per step; as many as backwards if not given.
        steps: how often.
        scopes: outermost scopes, over all steps; one per step if not given.
    """
    if engine.plan.num_shards * engine.plan.num_replicas == 1:
        return {}
    home = engine.plan.home
    scopes = steps if scopes is None else scopes
    flushes = steps
    if home.shards_gradients and mode != "no_sync":
        flushes = backwards * steps if mode == "bare" else scopes
    expected = {reduction_kind(engine): flushes * num_trainable(engine)}
    if home.shards_parameters:
        passes = steps * (backwards + (backwards if forwards is None else forwards))
        expected["all_gather"] = len(engine.plan.units) * (passes if mode == "bare" else scopes)
    elif home.shards_optimizer:
        expected["all_gather"] = steps * num_trainable(engine)
    return {kind: count for kind, count in expected.items() if count}


def assert_wire(found: dict[str, int], expected: dict[str, int]) -> None:
    """Equal counts of equal kinds."""
    assert found == expected, f"collectives {found}, by the formula {expected}"
