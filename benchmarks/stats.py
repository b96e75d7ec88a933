"""Statistics: medians of paired ratios, with an interval that assumes nothing about the noise."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A median and an interval for it; ``confidence`` is what the interval reaches."""

    median: float
    low: float
    high: float
    confidence: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_of(values: Sequence[float]) -> Estimate:
    """The median with the narrowest symmetric pair of order statistics that reaches 95%.

    Fewer than six values cannot reach it; then the interval is all of them, and says what it is
    worth.

    Source: the sign test, inverted; David and Nagaraja, "Order Statistics", sec. 7.1.
    """
    ordered = sorted(values)
    count = len(ordered)
    skipped = 0  # from either end
    while 2 * (skipped + 1) < count and _coverage(count, skipped + 1) >= CONFIDENCE:
        skipped += 1
    return Estimate(
        statistics.median(ordered),
        ordered[skipped],
        ordered[count - 1 - skipped],
        _coverage(count, skipped),
        count,
    )


def _coverage(count: int, skipped: int) -> float:
    """Probability that the true median lies between the two order statistics."""
    outside = sum(math.comb(count, k) for k in range(skipped + 1))
    return float(max(0.0, 1 - 2 * outside / 2**count))


def paired(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate | None:
    """The median ratio over rounds that have both; None if there is none."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=False)]
    return median_of(ratios) if ratios else None
