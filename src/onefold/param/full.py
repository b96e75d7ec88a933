"""Full parameters: readable and writable on every rank for a moment, and full state dicts."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from onefold.errors import RankMismatchError
from onefold.experts import reduce_groups_of
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
        _compare(
            units, control.gather([(_holder(u), d) for u, d in zip(units, after, strict=True)])
        )
        for unit, old, new in zip(units, before, after, strict=True):
            if old != new:
                unit.keep_writes()
    finally:
        for unit in units:
            unit.release()


def _compare(units: Sequence[Unit], by_rank: Sequence[Sequence[tuple[int, str]]]) -> None:
    for index, unit in enumerate(units):
        first: dict[int, tuple[int, str]] = {}
        for rank, (holder, digest) in enumerate(row[index] for row in by_rank):
            seen_on, expected = first.setdefault(holder, (rank, digest))
            if digest != expected:
                raise RankMismatchError(
                    f"full_parameters(): the parameters of unit {unit.name} differ between rank "
                    f"{seen_on} and rank {rank} at the end of the with-block. Write the same values"
                    " on every rank, or write them on rank 0 and broadcast."
                )


def _holder(unit: Unit) -> int:
    """Which of the experts of its axis this rank holds; 0 for dense parameters."""
    return unit.wire.mesh.expert.rank


def _digest(unit: Unit) -> str:
    """A checksum of what ``param_full`` holds, padding included."""
    # A copy: numpy would pin the storage, which must stay resizable.
    raw = unit.param_full.view(torch.uint8).to("cpu", copy=True).numpy()
    return hashlib.blake2b(raw.data, digest_size=16).hexdigest()


def full_state_dict(
    module: nn.Module, units: Sequence[Unit], dense: Collectives, control: Control
) -> dict[str, Tensor]:
    """What ``module.state_dict()`` would hold on an unsharded rank 0, on the CPU of every rank.

    Tied parameters appear under each of their names. Buffers are rank 0's. Experts of all ranks are
    there: under their own names where these differ between ranks, else joined along dim 0.

    Communication: one all-gather per sharded unit, one broadcast per persistent buffer; experts go
    over the control group, from every rank to every rank.
    Memory: the model on the host, and one unit on the device.
    """
    copies: dict[int, Tensor] = {}
    for unit in units:
        unit.hold()
        for param in unit.params:
            copies[id(param)] = param.detach().to("cpu", copy=True)
        unit.release()
    state: dict[str, Tensor] = {}
    local: dict[str, Tensor] = {}
    experts = reduce_groups_of(module)
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in child._parameters.items():
            if param is not None:
                target = local if id(param) in experts else state
                target[dot + name] = copies[id(param)]
        for name, buffer in child._buffers.items():
            if buffer is None or name in child._non_persistent_buffers_set:
                continue
            if id(buffer) in experts:
                local[dot + name] = buffer.detach().to("cpu", copy=True)
            else:
                theirs = buffer.detach().clone()
                dense.broadcast(theirs, dot + name)
                state[dot + name] = theirs.cpu()
    if experts:
        state.update(_all_experts(local, units, control))
    return state


def _all_experts(
    local: dict[str, Tensor], units: Sequence[Unit], control: Control
) -> dict[str, Tensor]:
    """The experts of all holders, given this rank's."""
    own = max(_holder(unit) for unit in units)
    by_holder: dict[int, dict[str, Tensor]] = {}
    for holder, theirs in control.gather((own, local)):
        by_holder.setdefault(holder, theirs)
    parts: dict[str, list[Tensor]] = {}
    for _, theirs in sorted(by_holder.items()):
        for name, tensor in theirs.items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(same) if len(same) > 1 else same[0] for name, same in parts.items()}
