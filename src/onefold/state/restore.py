"""Restore: a checkpoint's tensors into this rank's pieces, whatever cut them when it was saved."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from onefold.state.files import TensorReader
from onefold.state.index import Index, ParamEntry, file_of
from onefold.state.plain import decode
from onefold.state.snapshot import Held

_HOW: Final = {"foreach", "fused", "capturable", "differentiable"}
"""How the optimizer computes; belongs to this run, not to the checkpoint."""


class Wanted(NamedTuple):
    """What of a checkpoint is loaded."""

    include: Sequence[str]
    exclude: Sequence[str]
    optimizer: bool
    """With the optimizer's states and param group settings."""
    scheduler: bool
    """With the scheduler's state."""
    progress: bool = True
    """With counters, loss scale, random number generators and the place in the data."""

    def has(self, name: str) -> bool:
        """Whether the parameter or buffer ``name`` is loaded."""
        return any(fnmatchcase(name, each) for each in self.include) and not any(
            fnmatchcase(name, each) for each in self.exclude
        )


def what_differs(
    index: Index, names: Sequence[str], held: Sequence[Held], optimizer: Optimizer, wanted: Wanted
) -> list[str]:
    """Why the checkpoint does not fit the engine; a line each.

    Args:
        index: the checkpoint's.
        names: of all parameters, experts of other ranks too.
        held: this rank's.
        optimizer: the engine's.
        wanted: what is to be loaded.
    """
    problems = []
    there, here = {n for n in index.params if wanted.has(n)}, {n for n in names if wanted.has(n)}
    for title, missing in (
        ("in the model and not in the checkpoint", here - there),
        ("in the checkpoint and not in the model", there - here),
    ):
        if missing:
            problems.append(f"{title}: {', '.join(sorted(missing))}")
    for one in held:
        if one.name in here & there:
            entry, slot = index.params[one.name], one.unit.slots[one.position]
            if tuple(slot.size) not in (entry.shape, _local_shape(entry, one)):
                problems.append(
                    f"{one.name}: shape {tuple(slot.size)} in the model, {entry.shape} in the "
                    "checkpoint"
                )
    if wanted.optimizer:
        problems += _group_differences(index, held, optimizer, wanted)
    return problems


def _group_differences(
    index: Index, held: Sequence[Held], optimizer: Optimizer, wanted: Wanted
) -> list[str]:
    name = type(optimizer).__name__
    if index.optimizer != name:
        return [f"the optimizer is {name}, and was {index.optimizer}"]
    if len(index.groups) != len(optimizer.param_groups):
        return [f"{len(optimizer.param_groups)} param groups, and there were {len(index.groups)}"]
    groups = {
        id(param): position
        for position, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    return [
        f"{one.name}: in param group {groups.get(id(one.piece))}, and was in {entry.group}"
        for one in held
        if wanted.has(one.name)
        and (entry := index.params.get(one.name)) is not None
        and entry.is_trainable
        and groups.get(id(one.piece)) not in (None, entry.group)
    ]


def fill(
    index: Index, reader: TensorReader, held: Held, optimizer: Optimizer, wanted: Wanted
) -> None:
    """Load one parameter's elements, and its optimizer states, into this rank's piece.

    Memory: a few MB; where the parameter's strides are others than when it was saved, all of it.
    """
    entry = index.params[held.name]
    _read(entry, reader, "master", held.name, held, held.piece.detach())
    if not wanted.optimizer or not held.unit.spec.is_trainable:
        return
    here = optimizer.state.pop(held.piece, {})
    if not held.piece.numel() or not (entry.state or entry.scalars):
        return  # the optimizer is never shown an empty piece
    state: dict[str, Any] = {}
    for key, text in entry.state.items():
        dtype = held.piece.dtype if text == entry.dtype else getattr(torch, text)
        own = here.get(key)  # filled in place: freed and made again, it would cost its size twice
        if not isinstance(own, Tensor) or own.shape != held.piece.shape or own.dtype != dtype:
            own = torch.empty_like(held.piece, dtype=dtype, requires_grad=False)
        _read(entry, reader, "optimizer", f"{held.name}/{key}", held, own)
        state[key] = own
    for key, value in entry.scalars.items():
        state[key] = _on_its_device(decode(value), held.piece, optimizer)
    optimizer.state[held.piece] = state


def set_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give the param groups the settings that were saved."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key in _HOW:
                continue
            if isinstance(group.get(key), Tensor):
                group[key].copy_(torch.as_tensor(decode(value)))
            else:
                group[key] = decode(value)


def _read(
    entry: ParamEntry,
    reader: TensorReader,
    kind: Literal["master", "optimizer"],
    name: str,
    held: Held,
    out: Tensor,
) -> None:
    slot = held.unit.slots[held.position]
    numel = prod(slot.size)
    is_joined = tuple(slot.size) != entry.shape
    base = held.unit.wire.mesh.expert.rank * numel if is_joined else 0
    if tuple(slot.stride) == entry.stride:
        read_range(entry, reader, kind, name, base + held.begin, out)
        return
    whole = torch.empty(numel, dtype=out.dtype)
    read_range(entry, reader, kind, name, base, whole)
    there = whole.as_strided(slot.size, entry.stride)
    here = torch.empty_strided(slot.size, slot.stride, dtype=out.dtype).copy_(there)
    out.copy_(here.as_strided((numel,), (1,))[held.begin : held.begin + out.numel()])


def read_range(
    entry: ParamEntry,
    reader: TensorReader,
    kind: Literal["master", "optimizer"],
    name: str,
    begin: int,
    out: Tensor,
) -> None:
    """Fill ``out`` ``[K]`` with elements ``begin`` to ``begin + K`` of a parameter.

    Args:
        entry: the parameter's.
        reader: of the checkpoint.
        kind: the files to read.
        name: the tensor's in these.
        begin: in the order in which they lie in memory.
        out: on any device.
    """
    end = begin + out.numel()
    for rank, first, numel in entry.parts:
        low, high = max(begin, first), min(end, first + numel)
        if low < high:
            reader.read(file_of(kind, rank), name, low - first, out[low - begin : high - begin])


def _local_shape(entry: ParamEntry, held: Held) -> tuple[int, ...]:
    """The shape of this rank's experts, if ``entry`` is those of all ranks."""
    num_holders = len(held.unit.wire.mesh.expert.members)
    return (entry.shape[0] // num_holders, *entry.shape[1:]) if entry.shape else ()


def _on_its_device(value: Any, piece: Tensor, optimizer: Optimizer) -> Any:
    """A step count lies with its parameter where the kernels read it there, else on the CPU."""
    if not isinstance(value, Tensor):
        return value
    group = next(g for g in optimizer.param_groups if any(p is piece for p in g["params"]))
    return value.to(piece.device) if group.get("capturable") or group.get("fused") else value
