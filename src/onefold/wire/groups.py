"""Process groups over some of the ranks, under names that are never used twice.

[Note: names of groups] torch derives the name of a group that only its members make from their
ranks and from the number of groups that are alive. A group made after another over the same ranks
was destroyed gets the same name, and finds that one's addresses in the store: an engine that is
destroyed and made again would not connect. And ranks with different numbers of groups would wait
for one another under different names. So the name is chosen here: a hash of the ranks,
and how many groups over them this process has made before; all members have made the same ones.
"""

import hashlib
from collections import Counter
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_made: Final[Counter[tuple[int, ...]]] = Counter()


def new_group(
    ranks: tuple[int, ...], timeout_s: float, backend: str | None
) -> dist.ProcessGroup | None:
    """Make a group over ``ranks``, on all of them together; None for one rank.

    Args:
        ranks: numbers in the default group. As in torch, a member's rank is its place in their
            ascending order.
        timeout_s: seconds one of its collectives may take.
        backend: None for the default group's.
    """
    if len(ranks) == 1:
        return None
    ordered = sorted(ranks)
    timeout = timedelta(seconds=timeout_s)
    if len(ordered) == dist.get_world_size():
        group = dist.new_group(ordered, timeout=timeout, backend=backend)
        assert isinstance(group, dist.ProcessGroup)
        return group
    _made[tuple(ordered)] += 1
    # The store sees the name in every key, and thousands of ranks would make a long one.
    digest = hashlib.blake2b(repr(ordered).encode(), digest_size=16).hexdigest()
    default = c10d._get_default_group()
    default_backend, store = c10d._world.pg_map[default]
    name = f"onefold_{digest}_{_made[tuple(ordered)]}"
    made, _ = c10d._new_process_group_helper(
        len(ordered),
        ordered.index(dist.get_rank()),
        ordered,
        c10d.Backend(backend or default_backend),
        store,
        c10d.GroupName(name),
        timeout=timeout,
        device_id=default.bound_device_id,
    )
    assert isinstance(made, dist.ProcessGroup)
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ordered)}
    return made


def host_backend() -> str:
    """The backend for tensors in host memory: the default group's own, or gloo if it has none."""
    config = c10d.BackendConfig(c10d.Backend(dist.get_backend_config()))
    backend: str = config.get_device_backend_map().get("cpu", "gloo")
    return backend
