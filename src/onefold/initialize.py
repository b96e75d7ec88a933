"""``initialize``: from a model, an optimizer and a config to an engine whose ranks agree."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from onefold.config import Config
from onefold.dataloader import build_dataloader, check_dataloader
from onefold.engine import Engine
from onefold.errors import RankMismatchError, describe
from onefold.experts import expert_parallel_modules, reduce_groups_of
from onefold.optim.elementwise import check_elementwise
from onefold.optim.entries import build_optimizer, build_scheduler
from onefold.optim.master import check_optimizer
from onefold.param.materialise import check_meta, place_units
from onefold.parts import Parts
from onefold.plan import Plan, build_plan
from onefold.unit import Unit
from onefold.wire.all_to_all import AllToAll, connect
from onefold.wire.buffer import Arena
from onefold.wire.collectives import Collectives
from onefold.wire.control import Control
from onefold.wire.grid import DENSE, Cut, ReduceGroup
from onefold.wire.ledger import Ledger
from onefold.wire.mesh import DeviceMesh, World, build_mesh, join_world, leave_world

log = logging.getLogger(__name__)

ParamsOrGroups = Iterable[Tensor] | Iterable[dict[str, Any]]
OptimizerFactory = Callable[[ParamsOrGroups], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


class Initialized(NamedTuple):
    """What ``initialize`` returns, in DeepSpeed's order."""

    engine: Engine
    optimizer: Optimizer
    dataloader: "StatefulDataLoader[Any] | None"
    lr_scheduler: LRScheduler | None


class _Request(NamedTuple):
    """What the user passed."""

    model: nn.Module
    optimizer: Optimizer | OptimizerFactory | None
    model_parameters: ParamsOrGroups | None
    lr_scheduler: LRScheduler | SchedulerFactory | None
    training_data: "Dataset[Any] | DataLoader[Any] | None"
    elementwise: bool


class _Prepared(NamedTuple):
    """What one rank made of it."""

    config: Config
    optimizer: Optimizer
    plan: Plan
    lr_scheduler: LRScheduler | None
    dataloader: "StatefulDataLoader[Any] | None"


def initialize(  # noqa: PLR0913 (DeepSpeed's signature)
    *,
    model: nn.Module,
    optimizer: Optimizer | OptimizerFactory | None = None,
    model_parameters: ParamsOrGroups | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    lr_scheduler: LRScheduler | SchedulerFactory | None = None,
    training_data: "Dataset[Any] | DataLoader[Any] | None" = None,
    mesh: DeviceMesh | None = None,
    elementwise: bool = False,
) -> Initialized:
    """Put a model and its optimizer under an engine.

    What can be wrong on one rank is found before the first collective, and raised on all ranks.

    Args:
        model: on the CPU, on this rank's GPU, or on the meta device; cast to bf16 or fp16 if the
            config says so. Rank 0's parameters and buffers win; of experts, those of the first rank
            that holds them.
        optimizer: a torch optimizer without state, whose param groups are re-pointed in place; or
            a callable that makes one from ``model_parameters``; or None for the config's entry.
        model_parameters: parameters or param groups; default all that require gradients.
        config: DeepSpeed's JSON keys, as a mapping, a path, or a ``Config``.
        lr_scheduler: a torch scheduler of that optimizer, or a callable that makes one from it;
            the engine steps it after every real step. None for the config's entry, if any.
        training_data: a dataset, returned as a loader of this rank's micro batches, or a
            ``torchdata`` StatefulDataLoader; its place in the data is saved with the engine.
        mesh: the data-parallel ranks; default all ranks on one axis. With two axes named
            "replicate" and "shard" the ZeRO shards lie along "shard". An axis of experts is named
            as their ``ExpertParallel`` says.
        elementwise: the optimizer is none of torch's elementwise classes, and its update of an
            element depends on nothing but this element's gradient and state all the same.

    Returns:
        ``(engine, optimizer, dataloader, lr_scheduler)``.

    Raises:
        ValueError: a setting, the model, or the optimizer cannot be used.
        RankMismatchError: ranks were given different things, or another rank failed.
    Communication: one exchange, one broadcast per unit and buffer.
    Memory: where parameters are Shard, one unit above the 1/W that stays.
    Source: the signature is that of DeepSpeed's ``initialize``.
    """
    request = _Request(model, optimizer, model_parameters, lr_scheduler, training_data, elementwise)
    loaded, error = _load(config)
    device = torch.device("cpu")
    if isinstance(model, nn.Module):
        device = _device_of(model)
    else:  # exchanged like any other error, so that no rank waits for this one
        error = error or ValueError(
            f"initialize(model=): expected a torch.nn.Module, got {type(model).__name__}. Give "
            "every model an engine of its own, and an engine's model as engine.module."
        )
    world = join_world(mesh, device, loaded.timeout_s)
    try:
        prepared = _prepare_together(request, loaded, error, world)
        return _assemble(model, prepared, world, Arena(device))
    except BaseException:
        leave_world(world)
        raise


def _assemble(model: nn.Module, prepared: _Prepared, world: World, arena: Arena) -> Initialized:
    """Make the groups and buffers, send rank 0's values home, and start the engine."""
    config, plan, ledger = prepared.config, prepared.plan, Ledger()
    wires: dict[ReduceGroup, Collectives] = {}
    exchanges: list[AllToAll] = []
    for group in plan.groups:
        cut = world.grid.cut(group, world.rank, shards=plan.home.shards_optimizer)
        wires[group] = Collectives(
            build_mesh(world, cut, arena, transport=config.transport, timeout_s=config.timeout_s),
            ledger,
        )
        if group.expert_axis:
            exchange = _connect_experts(model, group, cut, world, ledger, config.timeout_s)
            exchanges.append(exchange)
    host_arena = Arena(torch.device("cpu"), is_pinned=arena.device.type == "cuda")
    units = tuple(Unit(spec, wires[spec.reduce_group], arena, host_arena) for spec in plan.units)
    place_units(model, units, is_source=world.rank == 0)
    reduce_groups = reduce_groups_of(model)
    for name, buffer in model.named_buffers():
        if plan.model_dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.to(plan.model_dtype)
        wires[reduce_groups.get(id(buffer), DENSE)].broadcast(buffer, name)
    if world.rank == 0:
        _announce(prepared)
    parts = Parts(
        module=model,
        config=config,
        plan=plan,
        world=world,
        ledger=ledger,
        wires=tuple(wires.values()),
        exchanges=tuple(exchanges),
        arena=arena,
        units=units,
        optimizer=prepared.optimizer,
        dataloader=prepared.dataloader,
    )
    engine = Engine(parts, prepared.lr_scheduler)
    return Initialized(engine, prepared.optimizer, prepared.dataloader, prepared.lr_scheduler)


def _connect_experts(
    model: nn.Module, group: ReduceGroup, cut: Cut, world: World, ledger: Ledger, timeout_s: float
) -> AllToAll:
    """One exchange for all expert-parallel modules of one axis."""
    ranks = tuple(world.ranks[position] for position in cut.expert.members)
    exchange = connect(ranks, timeout_s, ledger)
    for _, experts in expert_parallel_modules(model):
        if (experts.axis, experts.size) == (group.expert_axis, group.expert_size):
            experts.connect(exchange)
    return exchange


def _prepare_together(
    request: _Request, config: Config, error: Exception | None, world: World
) -> _Prepared:
    """Prepare on every rank, and return only if every rank may go on."""
    prepared: _Prepared | None = None
    if error is None:
        try:
            prepared = _prepare(request, config.resolve_batch(world.size), world)
        except Exception as found:
            error = found
    _agree(world.control, prepared, error)
    assert prepared is not None
    return prepared


def _load(config: object) -> tuple[Config, Exception | None]:
    """The config, or the default one and what was wrong; a bad config must not be a hang."""
    try:
        return Config.load(config), None  # type: ignore[arg-type]
    except Exception as error:
        return Config(), error


def _prepare(request: _Request, config: Config, world: World) -> _Prepared:
    """Everything that needs no other rank."""
    model = request.model
    check_meta(model)
    optimizer = _make_optimizer(request, config)
    check_elementwise(optimizer, elementwise=request.elementwise)
    _keep_local_experts(model, optimizer, world)
    names = {id(param): name for name, param in model.named_parameters()}
    check_optimizer(optimizer, names)
    trainable = [param for group in optimizer.param_groups for param in group["params"]]
    plan = build_plan(model, config, trainable, world.grid)
    scheduler = _make_scheduler(config, request.lr_scheduler, optimizer)
    data = request.training_data
    loader = None if data is None else _make_loader(config, data, world)
    return _Prepared(config, optimizer, plan, scheduler, loader)


def _keep_local_experts(model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Drop the experts of other ranks from the model and from the param groups."""
    for _, experts in expert_parallel_modules(model):
        if experts.size == 1:
            continue
        group = ReduceGroup(experts.axis, experts.size)
        world.grid.check([group])
        own = world.grid.cut(group, world.rank, shards=False).expert.rank
        foreign = {id(param) for param in experts.foreign(own)}
        for param_group in optimizer.param_groups:
            kept = [param for param in param_group["params"] if id(param) not in foreign]
            for param in param_group["params"]:
                if id(param) in foreign:
                    optimizer.state.pop(param, None)
            param_group["params"] = kept
        experts.keep_local(own)


def _make_optimizer(request: _Request, config: Config) -> Optimizer:
    optimizer, params = request.optimizer, request.model_parameters
    if isinstance(optimizer, Optimizer):
        return optimizer
    if params is None:
        params = [param for param in request.model.parameters() if param.requires_grad]
    if optimizer is not None:
        made = optimizer(params)
        if not isinstance(made, Optimizer):
            raise ValueError(
                f"initialize(optimizer=): expected the callable to return a torch optimizer, got "
                f"{type(made).__name__}."
            )
        return made
    if config.optimizer is None:
        raise ValueError(
            "initialize(): no optimizer. Expected an optimizer argument or an 'optimizer' entry in "
            "the config, got neither. Pass torch.optim.AdamW(model.parameters()), for example."
        )
    return build_optimizer(config.optimizer, params)


def _make_scheduler(
    config: Config, lr_scheduler: LRScheduler | SchedulerFactory | None, optimizer: Optimizer
) -> LRScheduler | None:
    if lr_scheduler is None:
        return build_scheduler(config.scheduler, optimizer) if config.scheduler else None
    scheduler = lr_scheduler if isinstance(lr_scheduler, LRScheduler) else lr_scheduler(optimizer)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "initialize(lr_scheduler=): this scheduler belongs to another optimizer. Build it from "
            "the one that you pass."
        )
    return scheduler


def _make_loader(
    config: Config, data: "Dataset[Any] | DataLoader[Any]", world: World
) -> "StatefulDataLoader[Any]":
    if isinstance(data, DataLoader):
        return check_dataloader(data)
    if config.train_micro_batch_size_per_gpu is None:
        raise ValueError(
            "initialize(training_data=): expected train_micro_batch_size_per_gpu in the config, "
            "got none. Set it, or build your own DataLoader."
        )
    return build_dataloader(data, config.train_micro_batch_size_per_gpu, world.rank, world.size)


def _agree(control: Control, prepared: _Prepared | None, error: Exception | None) -> None:
    """Exchange errors and fingerprints; return only if every rank may go on."""
    reason = None if error is None else describe(error)
    prints = None
    if prepared is not None:
        prints = (
            prepared.config.fingerprint(),
            prepared.plan.fingerprint(),
            _digest(_optimizer_described(prepared)),  # every rank gets that of every other
        )
    rows = control.gather((reason, prints))
    if error is not None:
        raise error
    for rank, (theirs, _) in enumerate(rows):
        if theirs is not None:
            raise RankMismatchError(f"initialize(): rank {rank} cannot start: {theirs}")
    kinds = ("config", "model or param groups", "optimizer")
    for rank, (_, theirs) in enumerate(rows):
        for what, mine, first in zip(kinds, theirs, rows[0][1], strict=True):
            if mine != first:
                assert prepared is not None
                differences = control.gather(_described(prepared))
                raise RankMismatchError(
                    f"initialize(): rank {rank} was given another {what} than rank 0: "
                    + _first_difference(differences[0], differences[rank])
                    + ". Build the same model and pass the same config on every rank."
                )


def _digest(lines: list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _optimizer_described(prepared: _Prepared) -> list[str]:
    """Class, settings and members of every param group."""
    names = {
        # Experts have other names on other ranks, and the same places.
        id(slot.param): slot.name if unit.reduce_group == DENSE else f"{unit.index}/{index}"
        for unit in prepared.plan.units
        for index, slot in enumerate(unit.slots)
    }
    groups = [
        {
            key: [names[id(param)] for param in value] if key == "params" else repr(value)
            for key, value in group.items()
        }
        for group in prepared.optimizer.param_groups
    ]
    return [type(prepared.optimizer).__name__, *(f"param group {group}" for group in groups)]


def _described(prepared: _Prepared) -> list[str]:
    settings = [f"{key}={value!r}" for key, value in prepared.config.model_dump().items()]
    params = [
        f"{slot.name} {tuple(slot.size)} {unit.dtype} "
        f"{'trainable' if unit.is_trainable else 'frozen'}"
        for unit in prepared.plan.units
        for slot in unit.slots
    ]
    return settings + params + _optimizer_described(prepared)


def _first_difference(mine: list[str], theirs: list[str]) -> str:
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return f"{one!r} on rank 0, {other!r} there"
    return f"{len(mine)} entries on rank 0, {len(theirs)} there"


def _announce(prepared: _Prepared) -> None:
    for note in (*prepared.config.notes, *prepared.plan.notes):
        log.info("%s", note)
    for unit in prepared.plan.units:
        kind = "trainable" if unit.is_trainable else "frozen"
        log.info(
            "unit %d %s: %d parameter(s), %s, N %d, S %d, %s",
            unit.index,
            unit.name,
            len(unit.slots),
            kind,
            unit.layout.numel,
            unit.layout.shard_numel,
            unit.dtype,
        )


def _device_of(model: nn.Module) -> torch.device:
    """Where the engine's buffers lie: the accelerator if any parameter does, else the CPU."""
    devices = {param.device for param in model.parameters()} - {torch.device("meta")}
    if not devices and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
