"""What was decided at construction, in words and numbers, on one screen.

Legend: W ranks on the shard axis, N padded elements of a unit, S = N / W.
"""

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Final

import torch

from onefold.plan import Plan
from onefold.unit import UnitSpec
from onefold.wire.mesh import Group, Mesh
from onefold.wire.placements import Placement
from onefold.wire.transports.native import MAX_ORDERED_RANKS

_IN_RANK_ORDER: Final = "added in rank order, one after another: the same bits in every run"
_PAIRWISE: Final = "pairs of ranks exchange slices"
_HOW: Final = {"cross-memory": "owners read their peers' memory", "direct": _PAIRWISE}
"""Of the transports whose owners of slices add in rank order."""

COLUMNS: Final = 100
SMALL_MESSAGE_BYTES: Final = 16 << 10
"""Below this a message costs its latency and not its bytes, on any network."""


def explain(plan: Plan, meshes: Sequence[Mesh], rank: int, num_ranks: int) -> str:
    """A readable account of an engine; see ``Engine.explain``.

    Args:
        plan: what was decided.
        meshes: one for each of ``plan.groups``, in their order.
        rank: this rank.
        num_ranks: of the engine.
    """
    home = [f"{kind} {placement.value}" for kind, placement in _home(plan)]
    sections = {
        f"rank {rank} of {num_ranks}": [
            f"dense parameters: {plan.num_shards} shard(s) x {plan.num_replicas} replica(s)",
            f"at home: {', '.join(home)}",
        ],
        "units": list(_units(plan)),
    }
    for reduce_group, mesh in zip(plan.groups, meshes, strict=True):
        units = [u for u in plan.units if u.reduce_group == reduce_group and u.is_trainable]
        axes = [*_axis("shard", mesh.shard, units), *_axis("replicate", mesh.replicate, units)]
        if units and axes:
            sections[f"reduction of {reduce_group.name} gradients"] = axes
    sections["memory of this rank"] = list(_memory(plan))
    sections["sent by this rank per step of n backwards"] = list(_traffic(plan))
    lines: list[str] = []
    for title, items in sections.items():
        lines.append(title)
        for item in items:
            lines += wrap(item, COLUMNS, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(lines)


def _home(plan: Plan) -> Iterator[tuple[str, Placement]]:
    yield "parameters", plan.home.parameter
    yield "gradients", plan.home.gradient
    yield "optimizer", plan.home.optimizer


def _units(plan: Plan) -> Iterator[str]:
    kinds: dict[tuple[object, ...], list[UnitSpec]] = {}
    for unit in plan.units:
        kind = (unit.dtype, unit.accumulation_dtype, unit.wire_dtype, unit.is_trainable)
        kinds.setdefault(kind, []).append(unit)
    for units in kinds.values():
        first = units[0]
        params = sum(len(unit.slots) for unit in units)
        whole = sum(unit.layout.numel for unit in units)
        padding = 1 - sum(sum(unit.layout.numels) for unit in units) / max(1, whole)
        sizes = _spread([unit.layout.numel * unit.dtype.itemsize for unit in units])
        line = (
            f"{len(units)} of {_name(first.dtype)} and {sizes}, {params} parameter(s), "
            f"{padding:.1%} padding; "
        )
        if first.is_trainable:
            line += (
                f"gradients in {_name(first.accumulation_dtype)}, on the wire in "
                f"{_name(first.wire_dtype)}, masters in {_name(first.master_dtype)}"
            )
        else:
            line += "frozen"
        yield line


# -- the wire ------------------------------------------------------------------------------------


def _axis(name: str, group: Group, units: Sequence[UnitSpec]) -> Iterator[str]:
    if group.transport is None:
        return
    yield f"{name}: {group.size} ranks, transport {group.transport.name} ({_why(group)})"
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[UnitSpec]] = {}
    for unit in units:
        # What is handed to the wire: full gradients, then their sum over the shard axis.
        source = unit.accumulation_dtype if name == "shard" else unit.master_dtype
        is_narrow = not source == unit.wire_dtype == unit.master_dtype
        kinds.setdefault((unit.wire_dtype, unit.master_dtype, is_narrow), []).append(unit)
    for (wire, sum_dtype, is_narrow), alike in kinds.items():
        yield f"{_algorithm(name, group, wire, sum_dtype, is_narrow=is_narrow)}"
        if is_narrow and group.transport.name == "native":
            yield from _messages(name, group.size, alike)


def _why(group: Group) -> str:
    if group.choice != "auto":
        return "as onefold.transport says"
    device = group.arena.device.type
    if group.transport is not None and group.transport.name == "native":
        if device != "cpu":
            return f"auto: the buffers are in {device} memory"
        return "auto: too many ranks for connections in pairs"
    return f"auto: {group.size} ranks, buffers in cpu memory"


def _algorithm(
    axis: str, group: Group, wire: torch.dtype, sum_dtype: torch.dtype, *, is_narrow: bool
) -> str:
    assert group.transport is not None
    kind = "reduce-scatter" if axis == "shard" else "all-reduce"
    if group.transport.name in _HOW:
        how = f"{_HOW[group.transport.name]}, summed in {_name(sum_dtype)}; {_IN_RANK_ORDER}"
    elif is_narrow and group.size <= MAX_ORDERED_RANKS:
        how = f"all-to-all, summed in {_name(sum_dtype)} by the owner; {_IN_RANK_ORDER}"
    elif is_narrow:
        how = (
            f"all-to-all, summed in {_name(sum_dtype)} by the owner, in one call: the same bits in "
            f"every run, but above {MAX_ORDERED_RANKS} ranks not in rank order"
        )
    elif group.size == 2:
        how = f"the backend's own {kind}; of two ranks there is one sum: the same bits in every run"
    else:
        how = (
            f"the backend's own {kind}, which adds in an order of its own (NCCL's rings and trees, "
            "for example): not in rank order, and the bits are not promised"
        )
    return f"{_name(wire)}: {how}"


def _messages(axis: str, size: int, units: Sequence[UnitSpec]) -> Iterator[str]:
    """How large the messages of an all-to-all are, and what to do where they are small."""
    slices = [
        (u.layout.shard_numel if axis == "shard" else -(-u.layout.shard_numel // size))
        * u.wire_dtype.itemsize
        for u in units
    ]
    advice = ""
    if max(slices) < SMALL_MESSAGE_BYTES:
        advice = "; that is small: make units larger, or shard over fewer ranks by mesh="
    yield f"{_spread(slices)} to each other rank{advice}"


# -- numbers -------------------------------------------------------------------------------------


def _memory(plan: Plan) -> Iterator[str]:
    device = host = reduced = window_gradients = window_parameters = 0
    for unit in plan.units:
        whole, shard = unit.layout.numel, unit.layout.shard_numel
        parameters = (shard if plan.home.shards_parameters else whole) * unit.dtype.itemsize
        masters = shard * unit.master_dtype.itemsize if unit.has_own_master else 0
        host += parameters * unit.offloads_parameters + masters * unit.offloads_optimizer
        device += parameters * (not unit.offloads_parameters)
        device += masters * (not unit.offloads_optimizer)
        if plan.home.shards_parameters:
            window_parameters += whole * unit.dtype.itemsize
        if unit.is_trainable:
            window_gradients += whole * unit.accumulation_dtype.itemsize
            reduced += shard * unit.master_dtype.itemsize
    on_host = f", and {_bytes(host)} in host memory" if host else ""
    yield (
        f"between steps: {_bytes(device)} of parameters and masters{on_host}, beside the "
        "optimizer's state"
    )
    held = f"{_bytes(window_gradients)} of gradients"
    if window_parameters:
        held += f" and {_bytes(window_parameters)} of parameters"
    yield f"a window adds: {held}, whatever n"
    yield f"until the step: {_bytes(reduced)} of reduced gradients"


def _traffic(plan: Plan) -> Iterator[str]:
    backward = plan.bytes_per_backward(1)
    gather = publish = 0
    for unit in plan.units:
        moved = unit.layout.shard_numel * (unit.layout.num_shards - 1) * unit.dtype.itemsize
        gather += moved
        publish += moved if unit.is_trainable else 0
    if plan.home.shards_parameters:
        yield f"without a window: n x {_bytes(backward)}"
        yield f"in a window: {_bytes(backward - gather)}"
    elif plan.home.shards_gradients:
        yield f"without a window: n x {_bytes(backward)} + {_bytes(publish)}"
        yield f"in a window: {_bytes(backward + publish)}"
    else:
        yield f"with or without a window: {_bytes(backward + publish)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(count: int) -> str:
    """With three digits or four, in powers of 1024."""
    if count < 1024:
        return f"{count} B"
    power = min(3, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def _spread(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return _bytes(most) if least == most else f"{_bytes(least)} to {_bytes(most)}"
