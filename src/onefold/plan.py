"""Plan: model + config + world -> blocks, units and placements. Nothing is re-decided at run time.

A block is what is unsharded as a whole. Where parameters are Replicate a block is a bucketful of
parameters in reverse registration order; where they are Shard it is one repeated block of the
model, and everything else is the root block. A block has one unit per combination of dtype, device,
reduce group (experts differ) and trainability. The order of the units is the order in which they
are reduced (the last layer first); they are gathered in the opposite order.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from onefold.config import Config
from onefold.experts import reduce_groups_of
from onefold.unit import Slot, UnitSpec
from onefold.wire.grid import DENSE, Grid, ReduceGroup
from onefold.wire.layout import FlatLayout
from onefold.wire.placements import HOME, Placements

DEFAULT_BUCKET_BYTES: Final = 25 << 20
_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)  # no forward of their own
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Block:
    """What is unsharded as a whole.

    Attributes:
        name: the block's module, or the first parameter of its bucket.
        units: indices of its units in the plan.
        modules: whose forward needs it: its own, and owners of its parameters that are not inner.
        inner: the owners inside a repeated module, which stands for them in ``modules``.
        is_root: it holds what is in no repeated block.
    """

    name: str
    units: tuple[int, ...]
    modules: tuple[nn.Module, ...]
    inner: tuple[nn.Module, ...]
    is_root: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was decided at construction."""

    home: Placements
    blocks: tuple[Block, ...]
    units: tuple[UnitSpec, ...]
    groups: tuple[ReduceGroup, ...]
    """The reduce groups of the units; dense parameters first, whether there are any or not."""
    model_dtype: torch.dtype | None
    """What parameters and buffers are cast to; None leaves them as they are."""
    autocast_dtype: torch.dtype | None
    """What the model's forward is autocast to, if it is."""
    num_shards: int
    """Of dense parameters, as is ``num_replicas``."""
    num_replicas: int
    notes: tuple[str, ...]
    """Decisions worth a line in the log."""

    def bytes_per_backward(self, backwards: int) -> int:
        """What a rank sends for ``backwards`` backwards outside any window, step() apart.

        Per backward V for the gradients where they are Shard, and 2 V for the parameters where
        they are; once 2 V (all-reduce) or V (reduce-scatter) where gradients are Partial.
        """
        gradients = parameters = 0
        for unit in self.units:
            shard, peers = unit.layout.shard_numel, unit.layout.num_shards - 1
            if unit.is_trainable:
                whole = 2 * shard * unit.wire_dtype.itemsize * (unit.num_replicas - 1)
                gradients += shard * unit.wire_dtype.itemsize * peers
                gradients += whole // unit.num_replicas
            parameters += shard * unit.dtype.itemsize * peers
        times = backwards if self.home.shards_gradients else min(1, backwards)
        gathers = 2 * backwards if self.home.shards_parameters else 0
        return times * gradients + gathers * parameters

    def fingerprint(self) -> str:
        """A hash of names, shapes, dtypes and layouts, equal on all ranks or nothing fits."""
        digest = hashlib.blake2b(digest_size=16)
        for unit in self.units:
            for index, slot in enumerate(unit.slots):
                # Experts have other names on other ranks, and the same places.
                name = slot.name if unit.reduce_group == DENSE else f"{index}"
                digest.update(repr((name, tuple(slot.size), slot.stride)).encode())
            digest.update(repr((unit.layout, unit.dtype, unit.is_trainable, self.home)).encode())
            digest.update(repr((unit.reduce_group, unit.accumulation_dtype)).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Member:
    """A parameter on its way into a unit."""

    slot: Slot
    is_trainable: bool
    dtype: torch.dtype
    """Of the model: what the parameter will be cast to."""
    reduce_group: ReduceGroup


def build_plan(module: nn.Module, config: Config, trainable: Iterable[Tensor], grid: Grid) -> Plan:
    """Decide blocks, units and layouts.

    Args:
        module: the user's model; may be on the meta device. Of expert-parallel modules it holds
            this rank's experts.
        config: home placements, precision, bucket size, block classes.
        trainable: the parameters that stand in the optimizer's param groups.
        grid: the data-parallel ranks.

    Raises:
        ValueError: a parameter cannot be planned for (sparse gradients, dtype); names them all.
            Or the experts do not fit the ranks.
    """
    home = HOME[config.stage]
    members = _members(module, config, {id(param) for param in trainable})
    _check(module, config, members.values())
    notes = [_untrained_note(members.values())]
    found = {member.reduce_group for member in members.values()}
    reduce_groups = (DENSE, *sorted(found - {DENSE}))
    grid.check(reduce_groups)
    repeated = dict(_repeated_blocks(module, config.block_classes))
    if home.shards_parameters:
        groups = _by_repeated_block(module, repeated, members)
    else:
        bucket_numel, note = _bucket_numel(config, members.values())
        notes.append(note)
        groups = _by_bucket(module, members, bucket_numel)
    blocks, units = _units_of(module, repeated, groups, config, grid)
    told = tuple(note for note in notes if note)
    dense = grid.cut(DENSE, 0, shards=home.shards_optimizer)
    sizes = len(dense.shard.members), len(dense.replicate.members)
    model_dtype = _DTYPES.get(config.precision or "")
    autocast_dtype = _DTYPES.get(config.autocast_dtype or "")
    return Plan(home, blocks, units, reduce_groups, model_dtype, autocast_dtype, *sizes, notes=told)


def _members(module: nn.Module, config: Config, in_groups: set[int]) -> dict[int, _Member]:
    reduce_groups = reduce_groups_of(module)
    cast = _DTYPES.get(config.precision or "")
    return {
        id(param): _Member(
            _slot(name, param),
            id(param) in in_groups,
            cast if cast is not None and param.is_floating_point() else param.dtype,
            reduce_groups.get(id(param), DENSE),
        )
        for name, param in module.named_parameters()
    }


def _slot(name: str, param: nn.Parameter) -> Slot:
    stride = param.stride()
    is_dense = _is_dense(param.size(), stride)
    contiguous = torch.empty(param.size(), device="meta").stride()
    return Slot(name, param, param.size(), stride if is_dense else contiguous)


def _is_dense(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether the strides cover ``numel`` elements without gaps or overlaps."""
    expected = 1
    for step, length in sorted(zip(stride, size, strict=True)):
        if length == 1:
            continue
        if step != expected:
            return False
        expected *= length
    return True


def _check(module: nn.Module, config: Config, members: Iterable[_Member]) -> None:
    problems = [
        f"{name} ({type(child).__name__}) was built with sparse=True; expected dense gradients, "
        "because they travel in flat buffers. Build it with sparse=False."
        for name, child in module.named_modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    ]
    trains_in = {torch.float32, torch.float64, torch.bfloat16}
    if config.precision == "fp16":
        trains_in.add(torch.float16)
    narrow = _DTYPES.get(config.grad_accum_dtype or "fp32")
    for member in members:
        if not member.is_trainable:
            continue
        if member.dtype not in trains_in:
            problems.append(
                f"{member.slot.name} is trainable and of dtype {member.dtype}; expected float32, "
                "float64 or bfloat16, or float16 with fp16.enabled, which scales the loss. Convert "
                "the model with .float(), or leave the parameter out of the optimizer."
            )
        elif narrow not in (torch.float32, member.dtype):
            problems.append(
                f"data_types.grad_accum_dtype: expected fp32, or the dtype of {member.slot.name}, "
                f"{member.dtype}, got {config.grad_accum_dtype}"
            )
    if problems:
        raise ValueError("initialize(model=): " + "\n".join(problems))


def _untrained_note(members: Iterable[_Member]) -> str:
    names = [m.slot.name for m in members if not m.is_trainable and m.slot.param.requires_grad]
    if not names:
        return ""
    shown = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
    return (
        f"{len(names)} parameter(s) require gradients but stand in no param group; they are "
        f"treated as frozen: {shown}"
    )


def _bucket_numel(config: Config, members: Iterable[_Member]) -> tuple[int, str]:
    """The bucket size in elements, cut to a quarter of the model."""
    trainable = [m.slot.param for m in members if m.is_trainable]
    total = sum(param.numel() for param in trainable)
    itemsize = max((param.dtype.itemsize for param in trainable), default=4)
    wanted = config.reduce_bucket_numel or DEFAULT_BUCKET_BYTES // itemsize
    quarter = max(1, total // 4)
    if wanted <= quarter:
        return wanted, ""
    asked = "reduce_bucket_size" if config.reduce_bucket_numel else "the default bucket"
    return quarter, (
        f"{asked} of {wanted} elements is above a quarter of the model's {total}; using {quarter}"
    )


def _by_bucket(
    module: nn.Module, members: dict[int, _Member], bucket_numel: int
) -> Iterator[tuple[str, list[_Member], nn.Module]]:
    """Parameters in reverse registration order; a bucket is closed before it would overflow."""
    bucket: list[_Member] = []
    numel = 0
    buckets: list[list[_Member]] = []
    for member in reversed(members.values()):
        size = member.slot.param.numel()
        if bucket and numel + size > bucket_numel:
            buckets.append(bucket)
            bucket, numel = [], 0
        bucket.append(member)
        numel += size
    if bucket:
        buckets.append(bucket)
    for bucket in buckets:
        yield f"bucket({bucket[0].slot.name})", bucket, module


def _by_repeated_block(
    module: nn.Module, repeated: dict[str, nn.Module], members: dict[int, _Member]
) -> Iterator[tuple[str, list[_Member], nn.Module]]:
    """The last repeated block first, the root block at the end."""
    homes: dict[int, set[int]] = defaultdict(set)
    for position, block in enumerate(repeated.values()):
        for param in block.parameters():
            homes[id(param)].add(position)
    inside = {id(param) for block in repeated.values() for param in block.parameters()}
    outside = {id(child) for block in repeated.values() for child in block.modules()}
    for child in module.modules():
        if id(child) not in outside:
            for tied in child._parameters.values():
                if tied is not None and id(tied) in inside:
                    homes[id(tied)].add(-1)  # tied across the border: the root's
    inhabitants: dict[int, list[_Member]] = defaultdict(list)
    for key, member in members.items():
        places = homes.get(key, {-1})
        inhabitants[-1 if len(places) > 1 else min(places)].append(member)
    for position, (name, block) in reversed(list(enumerate(repeated.items()))):
        if own := inhabitants[position]:
            yield name, own, block
    if root := inhabitants[-1]:
        yield "root", root, module


def _repeated_blocks(
    module: nn.Module, block_classes: Sequence[str]
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are unsharded as a whole, in registration order."""
    named = set(block_classes)
    if not named:
        for child in module.modules():
            named.update(getattr(child, "_no_split_modules", None) or ())
    seen: set[int] = set()

    def visit(prefix: str, parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        is_sequence = not named and isinstance(parent, nn.ModuleList | nn.Sequential)
        for name, child in parent.named_children():
            path = f"{prefix}{name}"
            is_block = is_sequence or type(child).__name__ in named
            if is_block and not isinstance(child, _CONTAINERS):
                if id(child) not in seen and any(True for _ in child.parameters()):
                    seen.add(id(child))
                    yield path, child
            else:
                yield from visit(f"{path}.", child)

    yield from visit("", module)


def _modules_of(
    own: nn.Module, repeated: Iterable[nn.Module], members: Iterable[_Member]
) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """Of a block, the modules and the inner modules."""
    wanted = {id(member.slot.param) for member in members}

    def owns(child: nn.Module) -> bool:
        return any(id(param) in wanted for param in child._parameters.values() if param is not None)

    around = [block for block in repeated if any(map(owns, block.modules()))]
    inside = {child for block in around for child in block.modules()}.difference(around)
    owners = [child for child in own.modules() if owns(child)]
    outer = (child for child in owners if child not in inside)
    return tuple(dict.fromkeys((own, *around, *outer))), tuple(c for c in owners if c in inside)


def _units_of(
    module: nn.Module,
    repeated: dict[str, nn.Module],
    groups: Iterable[tuple[str, list[_Member], nn.Module]],
    config: Config,
    grid: Grid,
) -> tuple[tuple[Block, ...], tuple[UnitSpec, ...]]:
    blocks: list[Block] = []
    units: list[UnitSpec] = []
    for block_name, members, own in groups:
        kinds: dict[tuple[torch.dtype, torch.device, ReduceGroup, bool], list[Slot]]
        kinds = defaultdict(list)
        for member in members:
            kind = (
                member.dtype,
                _home_device(member.slot.param.device),
                member.reduce_group,
                member.is_trainable,
            )
            kinds[kind].append(member.slot)
        indices: list[int] = []
        for kind, slots in kinds.items():
            name = block_name if len(kinds) == 1 else f"{block_name}/{len(indices)}"
            indices.append(len(units))
            units.append(_unit_of(len(units), name, slots, kind, config, grid))
        is_root = HOME[config.stage].shards_parameters and own is module
        modules, inner = _modules_of(own, repeated.values(), members)
        blocks.append(Block(block_name, tuple(indices), modules, inner, is_root))
    return tuple(blocks), tuple(units)


def _unit_of(
    index: int,
    name: str,
    slots: list[Slot],
    kind: tuple[torch.dtype, torch.device, ReduceGroup, bool],
    config: Config,
    grid: Grid,
) -> UnitSpec:
    dtype, device, reduce_group, is_trainable = kind
    home = HOME[config.stage]
    cut = grid.cut(reduce_group, 0, shards=home.shards_optimizer)
    wide = torch.promote_types(dtype, torch.float32)
    is_narrow = config.grad_accum_dtype not in (None, "fp32")
    return UnitSpec(
        index=index,
        name=name,
        slots=tuple(slots),
        layout=FlatLayout.build(
            [slot.param.numel() for slot in slots],
            itemsize=dtype.itemsize,
            num_shards=len(cut.shard.members),
        ),
        dtype=dtype,
        accumulation_dtype=dtype if is_narrow else wide,
        wire_dtype=_DTYPES.get(config.communication_data_type or "", dtype),
        device=device,
        is_trainable=is_trainable,
        home=home,
        reduce_group=reduce_group,
        num_replicas=len(cut.replicate.members),
        offloads_optimizer=config.offload_optimizer and is_trainable,
        offloads_parameters=config.offload_param,
    )


def _home_device(device: torch.device) -> torch.device:
    """Where a parameter will live: a meta parameter is materialised on the accelerator, if any."""
    if device.type != "meta":
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
