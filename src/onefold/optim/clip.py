"""Station 4, norm and clip. From: ``grad/reduce`` (divided shards). To: ``optim/step``.

Source: gradient clipping by global norm, Pascanu et al. (arXiv:1211.5063) sec. 3.2; the small
constant is that of ``torch.nn.utils.clip_grad_norm_``.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch

from onefold.unit import Unit
from onefold.wire.control import Control

_SMALL: Final = 1e-6


def global_norm(units: Sequence[Unit], control: Control) -> float:
    """The 2-norm of all reduced gradients, each counted once, the same on every rank.

    Squares are summed in fp64, over ranks in rank order, and the root is rounded to fp32.

    Communication: one exchange of one number, where gradients are sharded.
    """
    square = 0.0
    is_sharded = False
    for unit in units:
        is_sharded = is_sharded or unit.layout.num_shards > 1
        shard = unit.gradients.grad_shard
        if shard is not None:
            square += float(torch.linalg.vector_norm(shard, dtype=torch.float64)) ** 2
    if is_sharded:
        square = sum(row[0] for row in control.gather_floats([square]))
    root = math.sqrt(square) if square >= 0 else square  # nan stays nan
    return float(torch.tensor(root, dtype=torch.float32))


def clip(units: Sequence[Unit], norm: float, max_norm: float) -> float:
    """Scale every reduced gradient so that the global norm is at most ``max_norm``.

    Returns:
        The factor that was applied; 1.0 where nothing was.
    """
    factor = min(1.0, max_norm / (norm + _SMALL)) if max_norm > 0 else 1.0
    if factor != 1.0:
        for unit in units:
            shard = unit.gradients.grad_shard
            if shard is not None:
                shard.mul_(factor)
    return factor
