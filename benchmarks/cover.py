"""Cover: few rows in which every pair of values of two factors meets at least once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def pairs_of(row: Row) -> set[Pair]:
    """The pairs of values that meet in ``row``."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def cover(
    factors: Mapping[str, Sequence[Any]],
    *,
    is_valid: Callable[[Row], bool] = lambda _: True,
    cost: Callable[[Row], float] = lambda _: 1.0,
    covered: Iterable[Pair] = (),
) -> list[Row]:
    """Rows that, with ``covered``, contain every pair that any valid row contains.

    Greedy: the row with the most new pairs for its cost comes next.

    Args:
        factors: name to values, which are hashable.
        is_valid: whether a row can be run at all.
        cost: of a row, above 0.
        covered: pairs that need no row.
    """
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    left = {index: pairs_of(row) for index, row in enumerate(rows) if is_valid(row)}
    costs = {index: cost(rows[index]) for index in left}
    done = set(covered)
    chosen: list[Row] = []
    while True:
        left = {index: new for index, pairs in left.items() if (new := pairs - done)}
        if not left:
            return chosen
        best = max(left, key=lambda index: len(left[index]) / costs[index])
        chosen.append(rows[best])
        done |= left[best]
