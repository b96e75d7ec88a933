"""Export: a trained model, out of an engine or out of a checkpoint, for others to load."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from onefold.names import tied_names
from onefold.param.full import layout_of, whole_tensors
from onefold.parts import Parts
from onefold.state.agree import on_all_ranks
from onefold.state.files import Reader
from onefold.state.index import Index, file_of
from onefold.state.model_files import narrowed, write_model
from onefold.state.restore import read_range


def save_model(parts: Parts, path: Path, max_shard_bytes: int | None) -> list[Path]:
    """Write the module's state on rank 0, a unit at a time; see ``Engine.save_16bit_model``."""
    module, units, dense, control = parts.module, parts.units, parts.wires[0], parts.world.control
    dtype = parts.plan.model_dtype or torch.bfloat16
    layout = {
        name: torch.empty(tensor.shape, dtype=narrowed(tensor, dtype).dtype, device="meta")
        for name, tensor in layout_of(module, units, control).items()
    }
    stream = _Stream(whole_tensors(module, units, dense, control), dtype)

    def write() -> list[Path]:
        try:
            if parts.world.rank != 0:
                return []
            return write_model(
                path, layout, stream.take, tied=tied_names(module), max_shard_bytes=max_shard_bytes
            )
        finally:
            stream.drain()  # the other ranks are in its collectives, whatever happened here

    written = control.gather(on_all_ranks(control, "save_16bit_model()", write))
    return [path for theirs in written for path in theirs]


class _Stream:
    """Tensors as they come, handed out by name."""

    def __init__(self, groups: Iterator[dict[str, Tensor]], dtype: torch.dtype) -> None:
        self._groups = groups
        self._dtype = dtype
        self._here: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor:
        while name not in self._here:
            self._here = next(self._groups)
        return narrowed(self._here.pop(name), self._dtype).contiguous()

    def drain(self) -> None:
        for _ in self._groups:
            pass


def export_checkpoint(
    folder: Path,
    index: Index,
    path: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int | None,
) -> list[Path]:
    """Write the model of a checkpoint, in one process.

    Args:
        folder: a verified checkpoint.
        index: its index.
        path: of the file; see ``write_model``.
        dtype: of floating point tensors; None for those of the model that was trained.
        max_shard_bytes: see ``write_model``.

    Memory: one tensor.
    """
    layout: dict[str, Tensor] = {}
    rows = [(name, param.shape, param.model_dtype) for name, param in index.params.items()]
    rows += [(name, buffer.shape, buffer.dtype) for name, buffer in index.buffers.items()]
    for name, shape, own in rows:
        tensor = torch.empty(shape, dtype=getattr(torch, own), device="meta")
        layout[name] = tensor if dtype is None else narrowed(tensor, dtype)
    reader = Reader(folder)

    def value(name: str) -> Tensor:
        if (param := index.params.get(name)) is not None:
            flat = torch.empty(prod(param.shape), dtype=getattr(torch, param.dtype))
            read_range(param, reader, "master", name, 0, flat)
            whole = flat.as_strided(param.shape, param.stride)
        else:
            buffer = index.buffers[name]
            whole = torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype))
            reader.read_whole(file_of("master", buffer.ranks[0]), f"buffer/{name}", whole)
        return whole.to(layout[name].dtype).contiguous()

    try:
        return write_model(path, layout, value, tied=index.tied, max_shard_bytes=max_shard_bytes)
    finally:
        reader.close()
