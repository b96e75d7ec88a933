"""Full parameters: readable and writable on every rank for a moment, and full state dicts."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from onefold.errors import RankMismatchError
from onefold.experts import reduce_groups_of
from onefold.names import names_of, persistent_buffers
from onefold.unit import Unit
from onefold.wire.collectives import Collectives
from onefold.wire.control import Control
from onefold.wire.grid import DENSE


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
    whole: dict[str, Tensor] = {}
    for group in whole_tensors(module, units, dense, control):
        whole |= group
    state: dict[str, Tensor] = {}
    for name, first in names_of(module).items():
        if first in whole:
            state[name] = whole[first]
    return state | whole  # the experts of other ranks


def whole_tensors(
    module: nn.Module, units: Sequence[Unit], dense: Collectives, control: Control
) -> Iterator[dict[str, Tensor]]:
    """Copies on the CPU of all that ``full_state_dict`` has, by first name, a unit at a time.

    A collective: every rank takes all of it.
    """
    for unit in units:
        unit.hold()
        copies = _by_name(unit, "cpu")
        unit.release()
        yield copies if unit.spec.reduce_group == DENSE else _of_all_holders(copies, units, control)
    buffers, of_experts = _buffers_of(module)
    for name, buffer in buffers.items():
        theirs = buffer.clone()
        dense.broadcast(theirs, name)
        yield {name: theirs.cpu()}
    if reduce_groups_of(module):
        copies = {name: buffer.to("cpu", copy=True) for name, buffer in of_experts.items()}
        yield _of_all_holders(copies, units, control)


def layout_of(module: nn.Module, units: Sequence[Unit], control: Control) -> dict[str, Tensor]:
    """The tensors that ``whole_tensors`` gives, in its order, on meta.

    Communication: one exchange per unit of experts.
    """
    found: dict[str, Tensor] = {}
    for unit in units:
        own = _by_name(unit, "meta")
        found |= own if unit.spec.reduce_group == DENSE else _of_all_holders(own, units, control)
    buffers, of_experts = _buffers_of(module)
    found |= {name: buffer.to("meta") for name, buffer in buffers.items()}
    if reduce_groups_of(module):
        own = {name: buffer.to("meta") for name, buffer in of_experts.items()}
        found |= _of_all_holders(own, units, control)
    return found


def _by_name(unit: Unit, device: str) -> dict[str, Tensor]:
    return {
        slot.name: param.detach().to(device, copy=True)
        for slot, param in zip(unit.slots, unit.params, strict=True)
    }


def _buffers_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The persistent buffers: those that all ranks have, and those of this rank's experts."""
    experts = reduce_groups_of(module)
    dense: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    for name, buffer in persistent_buffers(module).items():
        (own if id(buffer) in experts else dense)[name] = buffer.detach()
    return dense, own


def _of_all_holders(
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
