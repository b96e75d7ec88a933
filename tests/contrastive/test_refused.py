"""What a loss refuses, and what it says then."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onefold.contrastive import InfoNCE, SigLIP

SETTINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "scale of 0": (lambda: InfoNCE(0), r"InfoNCE\(\): expected a finite scale above 0, got 0"),
    "scale of nan": (lambda: InfoNCE(float("nan")), "got nan"),
    "infinite scale": (lambda: InfoNCE(float("inf")), "got inf"),
    "learnable above the maximum": (
        lambda: InfoNCE(101.0, learnable_scale=True),
        "finite scale above 0 and at most 100.0, got 101.0",
    ),
    "similarity": (
        lambda: InfoNCE(similarity="euclidean"),  # type: ignore[arg-type]
        "expected similarity 'cos' or 'dot', got 'euclidean'",
    ),
    "tile of 0": (lambda: InfoNCE(tile=0), "expected a tile of 1 or more rows and columns, got 0"),
    "tile that is no int": (lambda: SigLIP(tile=2.0), "got 2.0"),  # type: ignore[arg-type]
    "tile that is a bool": (lambda: SigLIP(tile=True), "got True"),
    "negative scale": (lambda: SigLIP(-1.0), r"SigLIP\(\): expected a finite scale"),
    "bias": (lambda: SigLIP(bias=float("nan")), "expected a finite bias, got nan"),
    "infinite bias": (lambda: SigLIP(bias=-float("inf")), "expected a finite bias, got -inf"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    make, message = SETTINGS[name]
    with pytest.raises(ValueError, match=message):
        make()


def made(rows: int = 4, width: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(rows, width, dtype=dtype)


def parts(rows: list[Tensor], everything: list[Tensor], first_row: int = 0, **more: Any) -> Any:
    return lambda: InfoNCE().partial(rows, everything, first_row, **more)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "one column": (
        lambda: InfoNCE()(made()),
        r"InfoNCE.forward\(\): expected 2 or more columns of embeddings, got 1. .*hard negatives",
    ),
    "hard negatives of SigLIP": (
        lambda: SigLIP()(made(), made(), made()),
        r"SigLIP.forward\(\): expected 2 columns of embeddings, got 3",
    ),
    "other columns": (
        parts([made()] * 2, [made()] * 3),
        r"InfoNCE.partial\(\): expected as many columns in everything as in rows, 2, got 3",
    ),
    "one dim": (lambda: InfoNCE()(torch.zeros(4), torch.zeros(4)), r"\[m, D\], got \[4\]"),
    "integers": (
        lambda: InfoNCE()(made(dtype=torch.int64), made(dtype=torch.int64)),
        "floating dtype, got torch.int64 for rows",
    ),
    "fewer rows": (
        lambda: InfoNCE()(made(), made(3)),
        r"expected shape \[4, 3\] for rows\[1\], got \[3, 3\]",
    ),
    "width": (
        lambda: InfoNCE()(made(), made(width=2)),
        r"expected shape \[4, 3\] for rows\[1\], got \[4, 2\]",
    ),
    "width of everything": (
        parts([made(2)] * 2, [made(), made(width=2)]),
        r"expected shape \[4, 3\] for everything\[1\], got \[4, 2\]",
    ),
    "rows of everything": (
        parts([made(2)] * 2, [made(), made(5)]),
        r"expected shape \[4, 3\] for everything\[1\], got \[5, 3\]",
    ),
    "dims of everything": (
        parts([made(2)] * 2, [torch.zeros(4), made()]),
        r"expected shape \[B, 3\] for everything\[0\], got \[4\]",
    ),
    "dtype": (
        lambda: InfoNCE()(made(), made(dtype=torch.bfloat16)),
        r"expected torch.float32 on cpu, as rows\[0\] is, for rows\[1\], got torch.bfloat16 on cpu",
    ),
    "device": (
        lambda: InfoNCE()(made(), made().to("meta")),
        r"for rows\[1\], got torch.float32 on meta",
    ),
    "empty batch": (lambda: InfoNCE()(made(0), made(0)), "at least one row, got none"),
    "first row": (
        parts([made(2)] * 2, [made()] * 2, 3),
        r"rows 3 to 5 \(first_row=3\) expected within a whole batch of 4",
    ),
    "negative first row": (parts([made(2)] * 2, [made()] * 2, -1), "first_row=-1"),
    "ids that are not integers": (
        lambda: InfoNCE()(made(), made(), ids=torch.zeros(4)),
        "expected ids of an integer dtype on cpu, got torch.float32 on cpu",
    ),
    "ids of this rank": (
        parts([made(2)] * 2, [made()] * 2, ids=torch.zeros(2, dtype=torch.int64)),
        r"expected ids of the whole batch, \[4\] or \[4, 1\], got \[2\]",
    ),
    "ids of other candidates": (
        lambda: InfoNCE()(made(), made(), ids=torch.zeros(4, 2, dtype=torch.int64)),
        r"\[4\] or \[4, 1\], got \[4, 2\]",
    ),
    "both": (
        lambda: InfoNCE()(made(), made(), ids=torch.arange(4), false_negatives=lambda *_: None),
        "expected ids or false_negatives, got both",
    ),
    "false negatives of another shape": (
        lambda: SigLIP(tile=3)(
            made(), made(), false_negatives=lambda *_: torch.zeros(4, dtype=torch.bool)
        ),
        r"for 3 rows and 3 columns expected bool \[3, 3\], got torch.bool \[4\]",
    ),
    "false negatives of another dtype": (
        lambda: InfoNCE()(made(), made(), false_negatives=lambda *_: torch.zeros(4, 4)),
        r"expected bool \[4, 4\], got torch.float32 \[4, 4\]",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_false_negatives_that_raise_in_backward_are_heard() -> None:
    """It is called once per tile and pass."""
    calls = []

    def false_negatives(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) > 4:
            raise KeyError("gone")

    loss = InfoNCE(tile=2)(
        made().requires_grad_(), made().requires_grad_(), false_negatives=false_negatives
    )
    assert len(calls) == 4
    with pytest.raises(KeyError, match="gone"):
        loss.backward()
