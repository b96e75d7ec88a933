"""Export: the command ``onefold export``: the model of a checkpoint as one, for others to load."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console

from onefold.cli.inspect import read_or_exit
from onefold.state.export import export_checkpoint

UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Dtype(StrEnum):
    """Of the exported model."""

    MODEL = "model"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def parse_size(text: str) -> int:
    """Bytes of ``5GB`` or ``512MiB``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"expected a size like 5GB or 512MiB, got {text!r}")
    return int(float(found[1]) * UNITS.get((found[2] or "").upper(), 1))


def run_export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, DIR/TAG, or DIR.")],
    out: Annotated[Path, typer.Argument(help="The folder to write model.safetensors into.")],
    dtype: Annotated[Dtype, typer.Option(help="'model' is that of the run.")] = Dtype.MODEL,
    max_shard_size: Annotated[
        int | None, typer.Option(parser=parse_size, help="Cut into files like 5GB; default one.")
    ] = None,
) -> None:
    """Write a checkpoint's model as safetensors, as from_pretrained() loads it."""
    folder, index = read_or_exit(checkpoint)
    files = export_checkpoint(
        folder,
        index,
        out / "model.safetensors",
        dtype=None if dtype is Dtype.MODEL else getattr(torch, dtype.value),
        max_shard_bytes=max_shard_size,
    )
    size = sum(path.stat().st_size for path in files)
    Console().print(
        f"{len(index.params)} parameters and {len(index.buffers)} buffers, {size:,} bytes, in "
        f"{', '.join(str(path) for path in files)}",
        soft_wrap=True,
        markup=False,
    )
