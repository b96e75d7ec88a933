"""Snapshot: what one rank has to write.

A shard that several replicas hold is cut among them, so that every element is written once and all
ranks write equally much, at every stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from onefold.errors import StateError
from onefold.state.index import ParamEntry
from onefold.state.plain import encode
from onefold.unit import Unit


class Held(NamedTuple):
    """One parameter as this rank holds it."""

    name: str
    unit: Unit
    position: int
    """In its unit."""
    piece: Tensor
    """This rank's elements ``[K]``, a view of the unit's master; the optimizer's own tensor where
    it is trainable."""
    begin: int
    """Where they begin in the parameter."""


class ParamRow(NamedTuple):
    """What a rank tells of one parameter."""

    name: str
    holder: int
    """Which of the experts of its axis; 0 for dense parameters."""
    entry: ParamEntry
    """With this rank's part alone, and the shape of this rank's experts."""


class Snapshot(NamedTuple):
    """What a rank writes, by file, and what it tells of it."""

    master: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rows: list[ParamRow]


def held_by(units: Sequence[Unit], pieces: Mapping[int, Sequence[Tensor]]) -> Iterator[Held]:
    """Every parameter, with this rank's elements of it.

    Args:
        units: all of the engine's.
        pieces: those of the trainable units, by unit index.
    """
    for unit in units:
        for index, slot in enumerate(unit.slots):
            offset, begin, numel = unit.piece(index)
            piece = unit.master[offset : offset + numel]
            if unit.index in pieces:
                piece = pieces[unit.index][index]
            yield Held(slot.name, unit, index, piece, begin)


def take(
    units: Sequence[Unit], pieces: Mapping[int, Sequence[Tensor]], optimizer: Optimizer, rank: int
) -> Snapshot:
    """Views of everything that ``rank`` writes.

    Raises:
        StateError: the optimizer keeps something that is neither elementwise nor plain data.
    """
    for unit in units:
        unit.check_storage()
        if unit.is_unsharded and unit.was_written():
            unit.keep_writes()
    group_of = {
        id(param): position
        for position, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    found = Snapshot({}, {}, [])
    for held in held_by(units, pieces):
        mesh, slot, spec = held.unit.wire.mesh, held.unit.slots[held.position], held.unit.spec
        numel, replica, num_replicas = held.piece.numel(), mesh.replicate.rank, mesh.replicate.size
        first, end = numel * replica // num_replicas, numel * (replica + 1) // num_replicas
        if end > first:
            found.master[held.name] = held.piece.detach()[first:end]
        states, scalars = _state_of(optimizer, held)
        for key, state in states.items():
            if end > first:
                found.optimizer[f"{held.name}/{key}"] = state[first:end]
        entry = ParamEntry(
            shape=tuple(slot.size),
            stride=slot.stride,
            dtype=dtype_text(held.piece.dtype),
            model_dtype=dtype_text(spec.dtype),
            is_trainable=spec.is_trainable,
            group=group_of.get(id(held.piece)),
            parts=((rank, held.begin + first, end - first),),
            state={key: dtype_text(state.dtype) for key, state in states.items()},
            scalars=scalars,
        )
        found.rows.append(ParamRow(held.name, mesh.expert.rank, entry))
    return found


def _state_of(optimizer: Optimizer, held: Held) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The elementwise states of a piece, and the others in JSON's terms."""
    states: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for key, value in optimizer.state.get(held.piece, {}).items():
        if isinstance(value, Tensor) and value.shape == held.piece.shape:
            states[key] = value.detach()
        elif isinstance(value, Tensor) and value.dim():
            raise StateError(
                f"save_checkpoint(): state {key!r} of parameter {held.name} has shape "
                f"{tuple(value.shape)} on this rank's piece of {held.piece.numel()} elements; "
                "expected one number, or one per element, because pieces are cut anew on load."
            )
        else:
            scalars[key] = encode(value, f"optimizer state {key!r} of {held.name}")
    return states, scalars


def dtype_text(dtype: torch.dtype) -> str:
    """As the index has it: ``float32``."""
    return str(dtype).removeprefix("torch.")
