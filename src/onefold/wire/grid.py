"""Grid: the data-parallel ranks by named axes, and which of them hold the same parameters.

Pure arithmetic. A grid of one axis is the data-parallel ranks. With more axes, ``replicate`` is the
replicate axis and all others together are the shard axis. Expert-parallel parameters differ along
one axis, which is taken out of their reduce group; where the grid has no axis of that name, every
``size`` neighbours on the shard axis form one.

    ranks 0 1 2 3, one axis, experts over 2:    dense [0 1 2 3], experts [0 2] and [1 3]

Source: hybrid sharding, Zhao et al. (arXiv:2304.11277) sec. 3.2.2; expert parallelism, Fedus et al.
(arXiv:2101.03961) sec. 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

REPLICATE: Final = "replicate"


@dataclass(frozen=True, slots=True, order=True)
class ReduceGroup:
    """Which parameters are reduced together: dense ones, or the experts of one axis."""

    expert_axis: str = ""
    expert_size: int = 1

    @property
    def name(self) -> str:
        """For logs and errors."""
        return f"{self.expert_axis} of {self.expert_size}" if self.expert_axis else "dense"


DENSE: Final = ReduceGroup()


class Ranks(NamedTuple):
    """One rank's companions along one axis of a reduce group, as positions in the world."""

    members: tuple[int, ...]
    rank: int
    """This rank's place among them."""


class Cut(NamedTuple):
    """One reduce group as one rank sees it."""

    shard: Ranks
    replicate: Ranks
    expert: Ranks


@dataclass(frozen=True, slots=True)
class Grid:
    """``sizes`` of the named ``axes``, the last one counting fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of data-parallel ranks."""
        return prod(self.sizes)

    def check(self, groups: Sequence[ReduceGroup]) -> None:
        """Refuse axes that mean nothing and experts that do not fit.

        Raises:
            ValueError: in a grid of several axes one is neither ``replicate``, ``shard`` nor an
                expert axis; or an expert axis has another size, or does not divide the ranks.
        """
        known = {REPLICATE, "shard", *(group.expert_axis for group in groups)}
        unknown = [axis for axis in self.axes if axis not in known]
        if len(self.axes) > 1 and unknown:
            raise ValueError(
                f"initialize(mesh=): expected axes named 'replicate', 'shard' or as the model's "
                f"ExpertParallel modules say, got {self.axes}. Pass the data-parallel axes only, "
                f"for example mesh[{unknown[0]!r}]."
            )
        for group in groups:
            self._with_expert_axis(group)

    def cut(self, group: ReduceGroup, position: int, *, shards: bool) -> Cut:
        """Who reduces ``group`` with the rank at ``position``.

        Args:
            group: of parameters.
            position: this rank's in the world.
            shards: where the optimizer is not sharded everybody is on the replicate axis.
        """
        axes, sizes = self._with_expert_axis(group)
        mine = _coordinates(position, sizes)
        expert = {axis for axis, name in enumerate(axes) if name == group.expert_axis}
        replicate = set(range(len(axes))) - expert
        if shards:
            replicate &= {axis for axis, name in enumerate(axes) if self._is_replicate(name)}
        shard = set(range(len(axes))) - expert - replicate
        return Cut(
            *(_companions(mine, sizes, varying) for varying in (shard, replicate, expert)),
        )

    def _is_replicate(self, name: str) -> bool:
        return name == REPLICATE and len(self.axes) > 1

    def _with_expert_axis(self, group: ReduceGroup) -> tuple[tuple[str, ...], tuple[int, ...]]:
        if not group.expert_axis:
            return self.axes, self.sizes
        if group.expert_axis in self.axes:
            own = self.sizes[self.axes.index(group.expert_axis)]
            if own != group.expert_size:
                raise ValueError(
                    f"initialize(mesh=): axis {group.expert_axis!r} has {own} ranks, but the model "
                    f"has experts over {group.expert_size}. Give both the same size."
                )
            return self.axes, self.sizes
        split = next(
            a for a in reversed(range(len(self.axes))) if not self._is_replicate(self.axes[a])
        )
        if self.sizes[split] % group.expert_size:
            raise ValueError(
                f"initialize(model=): experts over {group.expert_size} ranks (ep_size) do not "
                f"divide the {self.sizes[split]} ranks of axis {self.axes[split]!r}. Choose a "
                "divisor."
            )
        outer = self.sizes[split] // group.expert_size
        axes = (*self.axes[: split + 1], group.expert_axis, *self.axes[split + 1 :])
        sizes = (*self.sizes[:split], outer, group.expert_size, *self.sizes[split + 1 :])
        return axes, sizes


def _coordinates(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(sizes):
        position, own = divmod(position, size)
        found.append(own)
    return tuple(reversed(found))


def _companions(mine: Sequence[int], sizes: Sequence[int], varying: set[int]) -> Ranks:
    """The ranks that differ from this one along ``varying`` only, in order."""
    members, own = [0], 0
    for axis, (place, size) in enumerate(zip(mine, sizes, strict=True)):
        places = range(size) if axis in varying else [place]
        members = [member * size + other for member in members for other in places]
        own = own * size + place
    return Ranks(tuple(members), members.index(own))
