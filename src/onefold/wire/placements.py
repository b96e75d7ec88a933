"""Placements: where a tensor that data parallelism knows about lives on the mesh.

A ZeRO stage is three *home* placements and nothing else (``HOME``). A collective is a change of
placement: Partial -> Shard is a reduce-scatter, Partial -> Replicate an all-reduce, Shard ->
Replicate an all-gather, and Replicate -> Shard frees memory and sends nothing.

Source: ZeRO (arXiv:1910.02054) sec. 5; the three names are those of ``torch.distributed.tensor``.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Placement(Enum):
    """One tensor's placement over the ranks that share its data."""

    REPLICATE = "replicate"
    """Every rank holds all of it."""
    PARTIAL = "partial"
    """Every rank holds its own unreduced term of the sum."""
    SHARD = "shard"
    """Rank r holds slice r."""


@dataclass(frozen=True, slots=True)
class Placements:
    """The home placements of one ZeRO stage, and how its mesh is laid out."""

    parameter: Placement
    gradient: Placement
    """Between backwards, outside any window."""
    optimizer: Placement

    @property
    def shards_parameters(self) -> bool:
        """Parameters are freed between uses (stage 3)."""
        return self.parameter is Placement.SHARD

    @property
    def shards_gradients(self) -> bool:
        """A backward reduces as it goes (stages 2 and 3)."""
        return self.gradient is Placement.SHARD

    @property
    def shards_optimizer(self) -> bool:
        """The data-parallel ranks are the ``shard`` axis; else they are the ``replicate`` axis."""
        return self.optimizer is Placement.SHARD


_R, _P, _S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD

HOME: Final[tuple[Placements, ...]] = (
    Placements(parameter=_R, gradient=_P, optimizer=_R),
    Placements(parameter=_R, gradient=_P, optimizer=_S),
    Placements(parameter=_R, gradient=_S, optimizer=_S),
    Placements(parameter=_S, gradient=_S, optimizer=_S),
)
"""Home placements, indexed by ZeRO stage."""
