"""Full parameters: readable and writable on every rank for a moment, and full state dicts."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from onefold.errors import RankMismatchError
from onefold.unit import Unit
from onefold.wire.collectives import Collectives
from onefold.wire.control import Control


@contextmanager
def full_parameters(units: Sequence[Unit], control: Control) -> Iterator[None]:
    """Every parameter whole on every rank; writes inside reach the masters.

    Raises:
        RankMismatchError: the parameters differ between ranks at the end; raised on every rank.
    Communication: one all-gather per sharded unit, and one exchange at the end.
    Memory: all parameters.
    """
    for unit in units:
        unit.holds += 1
        unit.start_unshard()
    try:
        for unit in units:
            unit.finish_unshard()
        before = [_digest(unit) for unit in units]
        yield
        after = [_digest(unit) for unit in units]
        changed = [index for index in range(len(units)) if before[index] != after[index]]
        _compare(units, control.gather([after[index] for index in range(len(units))]))
        for index in changed:
            units[index].keep_writes()
    finally:
        for unit in units:
            unit.release()


def _compare(units: Sequence[Unit], by_rank: Sequence[Sequence[str]]) -> None:
    for rank, digests in enumerate(by_rank):
        for unit, digest, expected in zip(units, digests, by_rank[0], strict=True):
            if digest != expected:
                raise RankMismatchError(
                    f"full_parameters(): the parameters of unit {unit.name} differ between rank 0 "
                    f"and rank {rank} at the end of the with-block. Write the same values on every "
                    "rank, or write them on rank 0 and broadcast."
                )


def _digest(unit: Unit) -> str:
    """A checksum of what ``param_full`` holds, padding included."""
    # A copy: numpy would pin the storage, which must stay resizable.
    raw = unit.param_full.view(torch.uint8).to("cpu", copy=True).numpy()
    return hashlib.blake2b(raw.data, digest_size=16).hexdigest()


def full_state_dict(
    module: nn.Module, units: Sequence[Unit], collectives: Collectives
) -> dict[str, Tensor]:
    """What ``module.state_dict()`` would hold on an unsharded rank 0, on the CPU of every rank.

    Tied parameters appear under each of their names. Buffers are rank 0's.

    Communication: one all-gather per sharded unit, one broadcast per persistent buffer.
    Memory: the model on the host, and one unit on the device.
    """
    copies: dict[int, Tensor] = {}
    for unit in units:
        unit.hold()
        for param in unit.params:
            copies[id(param)] = param.detach().to("cpu", copy=True)
        unit.release()
    state: dict[str, Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in child._parameters.items():
            if param is not None:
                state[dot + name] = copies[id(param)]
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                theirs = buffer.detach().clone()
                collectives.broadcast(theirs, dot + name)
                state[dot + name] = theirs.cpu()
    return state
