"""Model files: one model as safetensors, in one file or several, as Hugging Face's loaders read it.

    model.safetensors                       or, cut by size,
    model-00001-of-00003.safetensors ...    and
    model.safetensors.index.json            which file has which tensor

A tensor that has several names is written under the first; the header's metadata says which other
names it has, as ``safetensors.torch.load_model`` expects. Files get their names when all of them
are on the disk, so a reader never meets half a model.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from onefold.state.files import write_tensors

FORMAT: Final = {"format": "pt"}


def write_model(
    path: Path,
    layout: Mapping[str, Tensor],
    values: Callable[[str], Tensor],
    *,
    tied: Mapping[str, str],
    max_shard_bytes: int | None,
) -> list[Path]:
    """Write one model; what an earlier one left under the same names goes.

    Args:
        path: of the file; with several, their names are made from it.
        layout: shapes and dtypes, as tensors on meta, in the order in which they are written.
        values: called once per name, in that order; contiguous, of that shape and dtype.
        tied: further names, and the name in ``layout`` of each.
        max_shard_bytes: largest file, unless one tensor is larger; None for one file.

    Returns:
        The files with tensors.

    Raises:
        OSError: of the file system; files that were there before are as they were.
    Memory: what ``values`` returns, and a few MB.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    shards = _cut(layout, max_shard_bytes)
    stem, count = path.name.removesuffix(path.suffix), len(shards)
    names = [path.name]
    if count > 1:
        names = [f"{stem}-{i + 1:05d}-of-{count:05d}{path.suffix}" for i in range(count)]
    fresh = [path.parent / f".{name}.saving" for name in names]
    try:
        for one, shard in zip(fresh, shards, strict=True):
            one.unlink(missing_ok=True)
            aliases = {name: first for name, first in tied.items() if first in shard}
            write_tensors(one, shard, FORMAT | aliases, lambda name, _: values(name))
    except BaseException:
        for one in fresh:
            one.unlink(missing_ok=True)
        raise
    index = path.with_name(f"{path.name}.index.json")
    for old in (path, index, *path.parent.glob(f"{stem}-*-of-*{path.suffix}")):
        old.unlink(missing_ok=True)
    for one, name in zip(fresh, names, strict=True):
        one.rename(path.parent / name)
    if count > 1:
        index.write_text(_index_of(names, shards))
    return [path.parent / name for name in names]


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype``, if it is floating point."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _cut(layout: Mapping[str, Tensor], max_bytes: int | None) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in layout.items():
        if shards[-1] and max_bytes is not None and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _index_of(names: list[str], shards: list[dict[str, Tensor]]) -> str:
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"
