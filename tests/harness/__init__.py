"""Tests on several ranks: bodies run in persistent gloo workers, one pool per world size.

    from tests.harness import RankContext, distributed, pool_for

    @distributed(world_size=[1, 2, 4])
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_x(ctx: RankContext, stage: int) -> None:  # runs on every rank
        engine = ...
        ctx.cleanup(engine.destroy)

    def rank_sum(ctx: RankContext, value: int) -> int: ...

    @given(st.integers())
    def test_y(value):  # runs in the parent
        assert pool_for(2).run(rank_sum, value=value) == [...]

Importing this package starts nothing.
"""

from benchmarks.comm_log import CommLog, CommRecord
from tests.harness.context import RankContext
from tests.harness.decorator import distributed
from tests.harness.pool import WorkerError, WorkerPool, pool_for, shutdown_pools

__all__ = [
    "CommLog",
    "CommRecord",
    "RankContext",
    "WorkerError",
    "WorkerPool",
    "distributed",
    "pool_for",
    "shutdown_pools",
]
