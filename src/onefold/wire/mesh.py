"""Mesh: this rank's groups, made once per engine.

Legend: W ranks on the ``shard`` axis, R on the ``replicate`` axis. Where the optimizer's home is
Replicate the data-parallel ranks are the replicate axis (W = 1), else the shard axis (R = 1).

Each engine makes its own groups, so that several engines may interleave within one backward: one
data group for the collectives of the plan, and one control group on gloo for the tiny exchanges.
The control group's timeout exceeds the data group's, so that a data collective that never ends is
reported through the exchange.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from onefold.wire.buffer import Arena
from onefold.wire.control import Control
from onefold.wire.transports import DirectTransport, NativeTransport, Transport

__all__ = ["DeviceMesh", "Group", "Mesh", "World", "build_mesh", "join_world", "leave_world"]

MAX_DIRECT_RANKS: Final = 64
"""Above this many ranks the pairwise transport opens too many connections."""


@dataclass(slots=True)
class Group:
    """The ranks of one mesh axis; ``transport`` is None where there is nobody to talk to."""

    rank: int
    size: int
    transport: Transport | None = None


@dataclass(frozen=True, slots=True)
class World:
    """The data-parallel ranks of one engine, and the control group over them."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    control: Control
    owns_default_group: bool
    """This engine made the default process group, so ``destroy`` ends it."""


@dataclass(slots=True)
class Mesh:
    """The axes that the plan's collectives run over. Exactly one of them may exceed size 1."""

    shard: Group
    replicate: Group
    process_group: dist.ProcessGroup | None
    connect: Callable[[], tuple[dist.ProcessGroup, Transport]] | None = None

    def rebuild(self) -> None:
        """Replace the data group after one of its collectives failed; on every rank together."""
        if self.connect is None:
            return
        self.destroy()
        self.process_group, transport = self.connect()
        for group in (self.shard, self.replicate):
            if group.transport is not None:
                group.transport = transport

    def destroy(self) -> None:
        """Free the data group."""
        if self.process_group is not None:
            dist.destroy_process_group(self.process_group)
            self.process_group = None


def join_world(device_mesh: DeviceMesh | None, device: torch.device, timeout_s: float) -> World:
    """Find or make the default process group, and make the engine's control group.

    Args:
        device_mesh: one axis, the data-parallel ranks; None means every rank.
        device: where the parameters are.
        timeout_s: seconds a data collective may take; the control group gets twice that and more.
    Communication: group creation only.
    """
    owns_default_group = not dist.is_initialized()
    if owns_default_group:
        _make_default_group(device, timeout_s)
    ranks = _data_parallel_ranks(device_mesh)
    group = _new_group(ranks, 2 * timeout_s + 60, backend="gloo")
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    return World(rank, size, ranks, Control(group, rank, size), owns_default_group)


def leave_world(world: World) -> None:
    """Free the control group, and the default group if ``join_world`` made it."""
    world.control.destroy()
    if world.owns_default_group and dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(
    world: World, arena: Arena, *, shards: bool, transport: str, timeout_s: float
) -> Mesh:
    """Make the data group and choose its transport.

    Args:
        world: the data-parallel ranks.
        arena: where the transport leases its receive buffers.
        shards: the ranks form the ``shard`` axis, else the ``replicate`` axis.
        transport: ``auto`` (direct on gloo, native elsewhere and above 64 ranks), ``direct`` or
            ``native``.
        timeout_s: seconds a data collective may take.
    """
    alone = Group(rank=0, size=1)
    if world.size == 1:
        return Mesh(alone, alone, None)
    make = _choose(transport, arena.device, world.size)

    def connect() -> tuple[dist.ProcessGroup, Transport]:
        group = _new_group(world.ranks, timeout_s, backend=None)
        assert group is not None
        return group, make(group, arena)

    process_group, chosen = connect()
    everyone = Group(world.rank, world.size, chosen)
    return Mesh(
        shard=everyone if shards else alone,
        replicate=alone if shards else everyone,
        process_group=process_group,
        connect=connect,
    )


def _choose(
    transport: str, device: torch.device, size: int
) -> Callable[[dist.ProcessGroup, Arena], Transport]:
    fits = device.type == "cpu" and size <= MAX_DIRECT_RANKS
    if transport == "direct" and not fits:
        raise ValueError(
            f"onefold.transport: direct serves CPU buffers and at most {MAX_DIRECT_RANKS} ranks, "
            f"got {device.type} and {size} ranks. Use 'auto' or 'native'."
        )
    if transport == "native" or not fits:
        return lambda group, _arena: NativeTransport(group)
    return DirectTransport


def _make_default_group(device: torch.device, timeout_s: float) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _data_parallel_ranks(device_mesh: DeviceMesh | None) -> tuple[int, ...]:
    if device_mesh is None:
        return tuple(range(dist.get_world_size()))
    if device_mesh.ndim != 1:
        raise ValueError(
            f"initialize(mesh=): expected a DeviceMesh of one axis (the data-parallel ranks), got "
            f"{device_mesh.ndim} axes {device_mesh.mesh_dim_names}. Pass the axis, mesh['dp']."
        )
    return tuple(int(rank) for rank in device_mesh.mesh.tolist())


def _new_group(
    ranks: tuple[int, ...], timeout_s: float, backend: str | None
) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    everyone = len(ranks) == dist.get_world_size()
    group = dist.new_group(
        list(ranks),
        timeout=timedelta(seconds=timeout_s),
        backend=backend,
        use_local_synchronization=not everyone,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group
