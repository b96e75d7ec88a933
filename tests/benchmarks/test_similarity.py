"""The benchmark of contrastive losses measures what it says, on small batches."""

import math

import pytest

from benchmarks import similarity
from benchmarks.similarity import Cell, Kind, Measured, measure, measure_alone, row_of


@pytest.mark.parametrize("kind", Kind)
def test_both_ways_compute_the_same(kind: Kind) -> None:
    cell = Cell(kind, tile=24, batch=100, dim=16, threads=1, rounds=2)
    tiled, full = measure(cell), measure(cell._replace(tile=None))
    assert tiled.seconds > 0
    assert math.isclose(tiled.value, full.value, rel_tol=1e-5)


@pytest.mark.slow
def test_memory_is_that_of_a_fresh_process() -> None:
    """A full matrix of 64 MiB, of which at least three exist at a time; and one tile of 1 MiB."""
    cell = Cell(Kind.INFO_NCE, tile=512, batch=4096, dim=8, threads=1, rounds=1)
    tiled, full = measure_alone(cell), measure_alone(cell._replace(tile=None))
    assert tiled is not None
    assert full is not None
    assert full.peak_bytes > 3 * 64 * similarity.MIB
    assert tiled.peak_bytes < 64 * similarity.MIB


def test_rows() -> None:
    tiled, full = Measured(0.5, 3 << 20, 2.0), Measured(1.0, 10 << 20, 2.0)
    assert row_of(1024, tiled, full) == ["1,024", "4", "0.50", "3", "1.00", "10", "0.50", "0"]
    assert row_of(1024, tiled, None) == ["1,024", "4", "0.50", "3", "-", "-", "-", "-"]


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "available_bytes", lambda: 8 << 30)
    assert similarity.fits(8192)
    assert not similarity.fits(16385)
