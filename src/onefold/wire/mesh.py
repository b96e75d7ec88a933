"""Mesh: this rank's groups, made once per engine.

Legend: W ranks on the ``shard`` axis, R on the ``replicate`` axis. Where the optimizer's home is
Replicate the data-parallel ranks are the replicate axis (W = 1), else the shard axis, unless the
user's mesh has both (``grid.py``). Experts have a mesh of their own.

Each engine makes its own groups, so that several engines may interleave within one backward: data
groups for the collectives of the plan, and one control group, for tensors in host memory, for the
tiny exchanges. The control group's timeout exceeds the data groups', so that a data collective that
never ends is reported through the exchange.
"""

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from onefold.wire.buffer import Arena
from onefold.wire.control import Control
from onefold.wire.grid import Cut, Grid, Ranks
from onefold.wire.groups import host_backend, new_group
from onefold.wire.transports import Transport, choose_transport

__all__ = [
    "DeviceMesh",
    "Group",
    "Mesh",
    "World",
    "build_mesh",
    "join_control",
    "join_world",
    "leave_world",
]

_STALE: Final = (
    "initialize(): torchrun has restarted the ranks on one store, where addresses of ranks that "
    "are gone may be found. Start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment."
)
"""Source: pytorch issues 135712 and 167288."""


@dataclass(frozen=True, slots=True)
class World:
    """The data-parallel ranks of one engine, and the control group over them."""

    rank: int
    """This rank's position in the grid."""
    grid: Grid
    ranks: tuple[int, ...]
    """Their numbers in the default process group."""
    control: Control
    owns_default_group: bool
    """This engine made the default process group, so ``destroy`` ends it."""

    @property
    def size(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.ranks)


@dataclass(slots=True)
class Group:
    """The ranks of one mesh axis; ``transport`` is None where there is nobody to talk to."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    timeout_s: float
    arena: Arena
    choice: str
    transport: Transport | None = field(init=False, default=None)
    process_group: dist.ProcessGroup | None = field(init=False, default=None)

    def connect(self) -> None:
        """Make the process group, on all of its ranks together."""
        self.process_group = new_group(self.ranks, self.timeout_s, backend=None)
        if self.process_group is not None:
            self.transport = choose_transport(
                self.process_group, self.choice, self.arena, self.timeout_s
            )

    def destroy(self) -> None:
        """Free the process group."""
        if self.transport is not None:
            self.transport.close()
        if self.process_group is not None:
            dist.destroy_process_group(self.process_group)
            self.process_group = None


@dataclass(frozen=True, slots=True)
class Mesh:
    """The two axes that one reduce group's collectives run over, and its place among experts."""

    shard: Group
    replicate: Group
    expert: Ranks

    def rebuild(self) -> None:
        """Replace the groups after a collective failed; on every rank together."""
        self.destroy()
        for group in (self.shard, self.replicate):
            group.connect()

    def destroy(self) -> None:
        """Free the groups."""
        for group in (self.shard, self.replicate):
            group.destroy()


def join_world(device_mesh: DeviceMesh | None, device: torch.device, timeout_s: float) -> World:
    """Find or make the default process group, and make the engine's control group.

    Args:
        device_mesh: the data-parallel ranks, on one or several axes; None means every rank.
        device: where the parameters are.
        timeout_s: seconds a data collective may take; the control group gets twice that and more.
    Communication: group creation only.
    """
    owns_default_group = not dist.is_initialized()
    if owns_default_group:
        _make_default_group(device, timeout_s)
    ranks, grid = _data_parallel_ranks(device_mesh)
    rank = ranks.index(dist.get_rank())
    return World(rank, grid, ranks, _new_control(ranks, timeout_s), owns_default_group)


def join_control(world: World, timeout_s: float) -> Control:
    """A further control group of the same ranks, for another thread.

    Communication: group creation only; on every rank together.
    """
    return _new_control(world.ranks, timeout_s)


def _new_control(ranks: tuple[int, ...], timeout_s: float) -> Control:
    group = new_group(ranks, 2 * timeout_s + 60, backend=host_backend())
    return Control(group, sorted(ranks).index(dist.get_rank()), len(ranks))


def leave_world(world: World) -> None:
    """Free the control group, and the default group if ``join_world`` made it."""
    world.control.destroy()
    if world.owns_default_group and dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(world: World, cut: Cut, arena: Arena, *, transport: str, timeout_s: float) -> Mesh:
    """Make the data groups of one reduce group and choose their transports.

    Args:
        world: the data-parallel ranks.
        cut: who reduces with this rank.
        arena: where transports lease their buffers.
        transport: see ``choose_transport``.
        timeout_s: seconds a data collective may take.
    """

    def group_of(axis: Ranks) -> Group:
        # torch sorts the ranks of a group, so their order in a mesh says nothing here.
        ranks = tuple(sorted(world.ranks[position] for position in axis.members))
        rank = ranks.index(world.ranks[world.rank])
        group = Group(rank, len(ranks), ranks, timeout_s, arena, transport)
        group.connect()
        return group

    return Mesh(group_of(cut.shard), group_of(cut.replicate), cut.expert)


def _make_default_group(device: torch.device, timeout_s: float) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        try:
            dist.init_process_group(backend, timeout=timeout)
        except RuntimeError as error:
            if _may_meet_the_dead():
                error.add_note(_STALE)
            raise
    else:
        store = HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _may_meet_the_dead() -> bool:
    """Whether torchrun has started these ranks again on the store of those before."""
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return is_restarted and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _data_parallel_ranks(device_mesh: DeviceMesh | None) -> tuple[tuple[int, ...], Grid]:
    if device_mesh is None:
        size = dist.get_world_size()
        return tuple(range(size)), Grid(("shard",), (size,))
    names = device_mesh.mesh_dim_names or ("shard",)
    if len(names) != device_mesh.ndim:
        raise ValueError(
            f"initialize(mesh=): expected a DeviceMesh with a name for each axis, got "
            f"{device_mesh.ndim} axes without names. Pass mesh_dim_names=('replicate', 'shard')."
        )
    ranks = tuple(int(rank) for rank in device_mesh.mesh.flatten().tolist())
    return ranks, Grid(tuple(names), tuple(device_mesh.mesh.shape))
