"""What a test body knows about its rank."""

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class RankContext:
    """The first argument of every body that runs on ranks.

    Attributes:
        rank: this worker's rank in the default process group.
        world_size: its size.
        device: where tensors of the test belong.
    """

    def __init__(self, rank: int, world_size: int, stack: contextlib.ExitStack) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cpu")
        self._stack = stack

    def cleanup(self, function: Callable[..., object], *args: object) -> None:
        """Call ``function(*args)`` when the body has ended or failed, last registered first."""
        self._stack.callback(function, *args)

    def new_group(self, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        """A gloo group of ``ranks`` (default: all), destroyed after the test.

        Collective over the whole world, as ``dist.new_group`` is. A rank outside of ``ranks`` gets
        torch's ``GroupMember.NON_GROUP_MEMBER``.
        """
        group = dist.new_group(None if ranks is None else list(ranks), backend="gloo")
        if isinstance(group, dist.ProcessGroup):
            self.cleanup(dist.destroy_process_group, group)
        return group

    def device_mesh(self, *sizes: int, names: Sequence[str]) -> DeviceMesh:
        """A DeviceMesh over all ranks, whose groups are destroyed after the test."""
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names))
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            if group is not dist.group.WORLD:  # that of an axis of all ranks
                self.cleanup(dist.destroy_process_group, group)
        return mesh

    def data(
        self,
        *shape: int,
        key: int = 0,
        rank: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Normal numbers that depend on ``key`` and on the rank alone.

        Different on every rank, because equal data cannot show a missing reduction; a reference
        that trains on the concatenated batch gets another rank's data by naming it.
        """
        generator = torch.Generator().manual_seed(
            1_000_003 * key + (self.rank if rank is None else rank)
        )
        return torch.randn(shape, generator=generator, dtype=dtype).to(self.device)
