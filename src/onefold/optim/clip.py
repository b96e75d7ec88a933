"""Station 4, norm and clip. From: ``grad/reduce`` (divided shards). To: ``optim/master``.

Every element counts once: a shard that several ranks hold alike is counted by the first of them.

Source: gradient clipping by global norm, Pascanu et al. (arXiv:1211.5063) sec. 3.2; the small
constant is that of ``torch.nn.utils.clip_grad_norm_``.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from onefold.unit import Unit
from onefold.wire.control import Control

_SMALL: Final = 1e-6
_CHUNK_NUMEL: Final = 1 << 19


def global_norm(units: Sequence[Unit], control: Control, order: float = 2.0) -> float:
    """The norm of all reduced gradients, the same on every rank.

    Args:
        units: trainable units.
        control: the control group.
        order: p >= 1 of the p-norm, or inf for the largest magnitude.

    Returns:
        Powers are summed in fp64, over ranks in rank order, and the root is rounded to fp32; inf or
        nan where a gradient is not finite.

    Communication: one exchange of one number, where ranks hold different gradients.
    """
    meshes = [unit.wire.mesh for unit in units]
    differs = any(mesh.shard.size > 1 or len(mesh.expert.members) > 1 for mesh in meshes)
    shards = [
        shard
        for unit, mesh in zip(units, meshes, strict=True)
        if (shard := unit.gradients.grad_shard) is not None
        if mesh.replicate.rank == 0 or not differs
    ]
    total = _joined(_norms(shards, order), order)
    if differs:
        total = _joined(control.gather_floats([total])[:, 0], order)
    rounded = float(torch.tensor(total, dtype=torch.float32))
    return total if math.isinf(rounded) else rounded  # finite beyond fp32 is still finite


def _norms(shards: Sequence[Tensor], order: float) -> Tensor:
    """Each shard's norm: ``[len(shards)]`` fp64 in host memory, brought there by one copy."""
    if not shards:
        return torch.zeros(0, dtype=torch.float64)
    norms = torch.stack([_fp64_norm(shard, order) for shard in shards]).cpu()
    if math.isfinite(order):
        # Powers of a high order leave fp64: once more, relative to the largest element.
        for index in (~(norms.isfinite() & (norms > 0))).nonzero()[:, 0].tolist():
            norms[index] = _scaled_norm(shards[index], order)
    return norms


def _scaled_norm(shard: Tensor, order: float) -> float:
    largest = float(shard.abs().max()) if shard.numel() else 0.0
    if not math.isfinite(largest) or largest == 0:
        return largest
    scaled = shard.to(torch.float64) / largest
    return largest * float(torch.linalg.vector_norm(scaled, order))


def _fp64_norm(shard: Tensor, order: float) -> Tensor:
    """The norm with every element widened to fp64, 0-dim, on the shard's device."""
    if shard.device.type != "cpu" or not shard.numel():
        norm: Tensor = torch.linalg.vector_norm(shard, order, dtype=torch.float64)
        return norm
    # A CPU kernel that widens as it goes takes seven times as long as this.
    wide = torch.empty(min(shard.numel(), _CHUNK_NUMEL), dtype=torch.float64)
    norms = [
        torch.linalg.vector_norm(wide[: chunk.numel()].copy_(chunk), order)
        for chunk in shard.split(_CHUNK_NUMEL)
    ]
    joined: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    return joined


def _joined(norms: Tensor, order: float) -> float:
    """The norm of norms ``[K]``; nan if one is nan."""
    largest = float(norms.amax()) if norms.numel() else 0.0
    if math.isinf(order) or largest == 0 or not math.isfinite(largest):
        return largest
    # A running sum adds one after another, on every machine; sum() may not.
    total = float((norms / largest).pow(order).cumsum(0)[-1])
    return float(largest * total ** (1.0 / order))


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
