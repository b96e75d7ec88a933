"""What a contrastive loss is given, checked before anything is computed."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

SIMILARITIES: Final = ("cos", "dot")
INTEGERS: Final = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def check_columns(
    who: str, rows: Sequence[Tensor], everything: Sequence[Tensor], most: int | None
) -> None:
    """Two columns or more, at most ``most``, and as many of the whole batch as of this rank."""
    expected = "2 or more" if most is None else str(most)
    if len(rows) < 2 or len(rows) > (most or len(rows)):
        raise ValueError(
            f"{who}: expected {expected} columns of embeddings, got {len(rows)}. "
            "Give anchors first, then their positives"
            + (", then columns of hard negatives if there are any." if most is None else ".")
        )
    if len(everything) != len(rows):
        raise ValueError(
            f"{who}: expected as many columns in everything as in rows, {len(rows)}, got "
            f"{len(everything)}. Gather every column that is in rows."
        )


def check_embeddings(
    who: str, rows: Sequence[Tensor], everything: Sequence[Tensor], first_row: int
) -> None:
    """``[m, D]`` and ``[B, D]``, of one floating dtype and device; the rows lie in the batch."""
    first = rows[0]
    if first.ndim != 2:
        raise ValueError(
            f"{who}: expected embeddings of shape [m, D], got {list(first.shape)} for rows[0]. "
            "Pool tokens first, and keep the dim of the batch even for one row."
        )
    if not first.is_floating_point():
        raise ValueError(
            f"{who}: expected embeddings of a floating dtype, got {first.dtype} for rows[0]. "
            "Convert them, for example with .float()."
        )
    batch = everything[0].shape[0] if everything[0].ndim == 2 else -1
    for name, columns, count in (("rows", rows, len(first)), ("everything", everything, batch)):
        for number, column in enumerate(columns):
            if column.ndim != 2 or column.shape[0] != count or column.shape[1] != first.shape[1]:
                shape = [count if count >= 0 else "B", first.shape[1]]
                raise ValueError(
                    f"{who}: expected shape {shape} for {name}[{number}], got "
                    f"{list(column.shape)}. Every column needs as many rows as the first, and all "
                    f"embeddings the width of rows[0].".replace("'", "")
                )
            if column.dtype != first.dtype or column.device != first.device:
                raise ValueError(
                    f"{who}: expected {first.dtype} on {first.device}, as rows[0] is, for "
                    f"{name}[{number}], got {column.dtype} on {column.device}. Convert it first."
                )
    if batch == 0:
        raise ValueError(
            f"{who}: expected a whole batch of at least one row, got none, of which there is no "
            "mean. Skip the step on all ranks, or give rows."
        )
    if first_row < 0 or first_row + len(first) > batch:
        raise ValueError(
            f"{who}: rows {first_row} to {first_row + len(first)} (first_row={first_row}) expected "
            f"within a whole batch of {batch}. Pass where this rank's rows begin in everything."
        )


def check_ids(who: str, ids: Tensor, everything: Sequence[Tensor]) -> None:
    """Integers ``[B]`` or ``[B, C - 1]``, where the embeddings are."""
    batch, candidates = len(everything[0]), len(everything) - 1
    if ids.dtype not in INTEGERS or ids.device != everything[0].device:
        raise ValueError(
            f"{who}: expected ids of an integer dtype on {everything[0].device}, got {ids.dtype} "
            f"on {ids.device}. Convert them, for example with .to({str(everything[0].device)!r})."
        )
    if ids.shape not in ((batch,), (batch, candidates)):
        raise ValueError(
            f"{who}: expected ids of the whole batch, [{batch}] or [{batch}, {candidates}], got "
            f"{list(ids.shape)}. Give one per row of everything, or one per candidate."
        )


def check_number(who: str, name: str, value: float, low: float, high: float) -> None:
    """Finite, above ``low`` and at most ``high``."""
    if not low < value <= high or value in (torch.inf, -torch.inf):
        below = "" if high == torch.inf else f" and at most {high}"
        above = "" if low == -torch.inf else f" above {low}"
        raise ValueError(
            f"{who}: expected a finite {name}{above}{below}, got {value}. "
            f"Choose another {name}, or leave it out for the default."
        )


def check_choices(who: str, similarity: str, tile: int) -> None:
    """The settings that all losses have."""
    if similarity not in SIMILARITIES:
        raise ValueError(
            f"{who}: expected similarity {' or '.join(map(repr, SIMILARITIES))}, got "
            f'{similarity!r}. "dot" multiplies the embeddings as they are, "cos" normalises them.'
        )
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
        raise ValueError(
            f"{who}: expected a tile of 1 or more rows and columns, got {tile!r}. "
            "Leave it out for the default."
        )
