"""Merge: what all ranks tell of their parts, as the index has it."""

from collections import defaultdict
from collections.abc import Iterable
from math import prod

from onefold.errors import CheckpointError
from onefold.state.index import ParamEntry
from onefold.state.snapshot import ParamRow


def merge_rows(rows_by_rank: Iterable[Iterable[ParamRow]]) -> dict[str, ParamEntry]:
    """One entry per parameter.

    Experts that have the same name on all ranks of their axis are one parameter, joined along dim 0
    in the order of the ranks; those with names of their own are parameters of their own.

    Raises:
        CheckpointError: the parts do not cover a parameter.
    """
    by_name: dict[str, list[ParamRow]] = defaultdict(list)
    for rows in rows_by_rank:
        for row in rows:
            by_name[row.name].append(row)
    return {name: _entry(name, rows) for name, rows in by_name.items()}


def _entry(name: str, rows: list[ParamRow]) -> ParamEntry:
    holders = sorted({row.holder for row in rows})

    def begin_of(row: ParamRow) -> tuple[bool, int, int]:
        ((_, begin, numel),) = row.entry.parts
        return numel == 0, holders.index(row.holder), begin

    first = min(rows, key=begin_of).entry
    local = prod(first.shape)
    parts = [
        (rank, begin + holders.index(row.holder) * local, numel)
        for row in rows
        for rank, begin, numel in row.entry.parts
        if numel
    ]
    parts.sort(key=lambda part: part[1])
    shape = first.shape
    if len(holders) > 1:
        if not shape or first.stride[0] * shape[0] != local:
            raise CheckpointError(
                f"save_checkpoint(): experts {name} have shape {shape} and strides {first.stride} "
                "on each rank; expected dim 0 to be the outermost one in memory, because they are "
                "joined along it. Make the parameter contiguous."
            )
        shape = (shape[0] * len(holders), *shape[1:])
    end = 0
    for _, begin, numel in parts:
        if begin != end:
            break
        end += numel
    if end != prod(shape):
        raise CheckpointError(
            f"save_checkpoint(): {name} of {prod(shape)} elements: the parts of all ranks leave a "
            f"gap or overlap at element {end}. Report this with the model's layout."
        )
    return first.model_copy(update={"shape": shape, "parts": tuple(parts)})
