"""Grid: pure arithmetic, over random shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.wire.grid import DENSE, Grid, ReduceGroup

SIZES = st.integers(1, 4)


@given(SIZES, SIZES, SIZES, st.booleans(), st.booleans())
def test_every_rank_agrees_and_groups_tile_the_world(
    replicas: int, shards: int, experts: int, shards_optimizer: bool, is_named: bool
) -> None:
    """Groups of one axis partition the ranks; the three axes of a reduce group span them."""
    if is_named:
        grid = Grid(("replicate", "shard", "expert"), (replicas, shards, experts))
    else:
        grid = Grid(("replicate", "shard"), (replicas, shards * experts))
    for group in (DENSE, ReduceGroup("expert", experts)):
        grid.check([group, ReduceGroup("expert", experts)])
        cuts = [grid.cut(group, rank, shards=shards_optimizer) for rank in range(grid.size)]
        for axis in ("shard", "replicate", "expert"):
            for rank, cut in enumerate(cuts):
                own = getattr(cut, axis)
                assert own.members[own.rank] == rank
                assert list(own.members) == sorted(own.members)
                for other in own.members:
                    assert getattr(cuts[other], axis).members == own.members
        sizes = [len(getattr(cuts[0], axis).members) for axis in ("shard", "replicate", "expert")]
        assert sizes[0] * sizes[1] * sizes[2] == grid.size
        if not shards_optimizer:
            assert sizes[0] == 1
        elif group == DENSE:
            assert sizes[:2] == [shards * experts, replicas]
        assert sizes[2] == (1 if group == DENSE else experts)


def test_neighbours_share_the_experts_of_a_layer() -> None:
    grid = Grid(("shard",), (4,))
    group = ReduceGroup("expert", 2)
    assert [grid.cut(group, r, shards=True).expert.members for r in range(4)] == [
        (0, 1),
        (0, 1),
        (2, 3),
        (2, 3),
    ]
    assert [grid.cut(group, r, shards=True).shard.members for r in range(4)] == [
        (0, 2),
        (1, 3),
        (0, 2),
        (1, 3),
    ]
    assert [grid.cut(group, r, shards=True).expert.rank for r in range(4)] == [0, 1, 0, 1]


def test_one_axis_is_the_data_parallel_ranks_whatever_its_name() -> None:
    for name in ("replicate", "dp", "shard"):
        grid = Grid((name,), (3,))
        grid.check([DENSE])
        assert grid.cut(DENSE, 1, shards=True).shard.members == (0, 1, 2)
        assert grid.cut(DENSE, 1, shards=False).replicate.members == (0, 1, 2)


@pytest.mark.parametrize(
    ("grid", "group", "text"),
    [
        (Grid(("shard",), (4,)), ReduceGroup("expert", 3), "do not divide the 4 ranks"),
        (Grid(("replicate", "shard"), (3, 4)), ReduceGroup("expert", 3), "do not divide the 4"),
        (Grid(("shard", "expert"), (2, 2)), ReduceGroup("expert", 4), "has 2 ranks"),
        (Grid(("pipeline", "shard"), (2, 2)), DENSE, "expected axes named"),
    ],
)
def test_what_does_not_fit_is_refused(grid: Grid, group: ReduceGroup, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        grid.check([group])
