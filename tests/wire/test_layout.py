"""FlatLayout: pure arithmetic, over random sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.wire.layout import ALIGNMENT_BYTES, FlatLayout

NUMELS = st.lists(st.integers(0, 200), min_size=1, max_size=12)
SHARDS = st.integers(1, 9)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


@given(NUMELS, ITEMSIZES, SHARDS)
def test_starts_and_cuts_are_aligned_and_nothing_overlaps(
    numels: list[int], itemsize: int, num_shards: int
) -> None:
    layout = FlatLayout.build(numels, itemsize=itemsize, num_shards=num_shards)
    assert all(offset * itemsize % ALIGNMENT_BYTES == 0 for offset in layout.offsets)
    assert layout.shard_numel * itemsize % ALIGNMENT_BYTES == 0
    assert layout.numel == layout.shard_numel * num_shards
    ends = [start + numel for start, numel in zip(layout.offsets, numels, strict=True)]
    assert all(end <= start for end, start in zip(ends, layout.offsets[1:], strict=False))
    assert ends[-1] <= layout.numel


@given(NUMELS, ITEMSIZES, SHARDS)
def test_pieces_cover_every_parameter_once(
    numels: list[int], itemsize: int, num_shards: int
) -> None:
    layout = FlatLayout.build(numels, itemsize=itemsize, num_shards=num_shards)
    for index, numel in enumerate(numels):
        covered: list[int] = []
        for rank in range(num_shards):
            piece = layout.piece(index, rank)
            flat = rank * layout.shard_numel + piece.shard_offset
            if piece.numel:
                assert flat - layout.offsets[index] == piece.param_offset
            covered += range(piece.param_offset, piece.param_offset + piece.numel)
        assert covered == list(range(numel))


@given(NUMELS, ITEMSIZES, SHARDS)
def test_padding_is_bounded(numels: list[int], itemsize: int, num_shards: int) -> None:
    layout = FlatLayout.build(numels, itemsize=itemsize, num_shards=num_shards)
    step = ALIGNMENT_BYTES // itemsize
    assert layout.numel < sum(numels) + step * (len(numels) + num_shards)


def test_overlapping_parameters_are_refused() -> None:
    with pytest.raises(AssertionError, match="overlap"):
        FlatLayout((0, 1), (2, 2), 16, 1)
