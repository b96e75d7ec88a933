"""Materialise: give a model that was built under ``torch.device("meta")`` its first weights.

Rank 0 initialises module after module with its own random numbers, in ``modules()`` order, and
sends a unit to its home as soon as all its modules are done; so no rank ever holds more than the
root block and one other.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from onefold.unit import Unit


def check_meta(module: nn.Module) -> None:
    """Refuse a meta model that cannot be given its first weights here.

    Raises:
        ValueError: names every module without ``reset_parameters`` or Hugging Face's
            ``_init_weights``, and every non-persistent buffer.
    """
    problems: list[str] = []
    for name, child in module.named_modules():
        own = [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]
        on_meta = [key for key, tensor in own if tensor.is_meta]
        if on_meta and _initialiser(module, child) is None:
            problems.append(
                f"module {name or '(root)'} ({type(child).__name__}) has no reset_parameters()"
            )
        problems += [
            f"buffer {name + '.' if name else ''}{key} is not persistent, so nothing says how to "
            "fill it"
            for key in on_meta
            if key in child._non_persistent_buffers_set
        ]
    if problems:
        raise ValueError(
            "initialize(model=) on the meta device: "
            + "; ".join(problems)
            + ". Add reset_parameters(), or build the model on a real device."
        )


def place_units(module: nn.Module, units: Sequence[Unit], *, is_source: bool) -> None:
    """Send every unit's first values from rank 0 to their homes.

    Args:
        module: the user's model.
        units: all units.
        is_source: this is rank 0.
    Communication: one broadcast of N elements per unit, in an order all ranks share.
    """
    waiting = {unit.index: {id(p) for p in unit.params if p.is_meta} for unit in units}
    for unit in units:
        if not waiting[unit.index]:
            unit.place()
    if not any(waiting.values()):
        return
    unit_of = {id(param): unit for unit in units for param in unit.params}
    for child in module.modules():
        own = [param for param in child._parameters.values() if param is not None]
        fresh = [param for param in own if id(param) in unit_of and param.is_meta]
        _materialise(child, fresh, unit_of)
        initialise = _initialiser(module, child)
        if is_source and initialise is not None and (fresh or _buffers(child)):
            with torch.no_grad():
                initialise()
        for unit in {unit_of[id(param)].index: unit_of[id(param)] for param in fresh}.values():
            waiting[unit.index] -= {id(param) for param in fresh}
            if not waiting[unit.index]:
                unit.settle_home()


def _materialise(child: nn.Module, fresh: Sequence[nn.Parameter], unit_of: dict[int, Unit]) -> None:
    """Give meta parameters and buffers of one module memory; parameters keep their identity."""
    for param in fresh:
        unit = unit_of[id(param)]
        unit.allocate()
        view = unit.views[next(i for i, own in enumerate(unit.params) if own is param)]
        # A meta tensor's data cannot be assigned; swapping keeps the object the user holds. .data
        # has a version counter of its own: a gather into the flat buffer is no write to it.
        real = nn.Parameter(view.data, requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, real)
    for name, buffer in child._buffers.items():
        if buffer is not None and buffer.is_meta:
            child._buffers[name] = torch.empty_like(buffer, device=_device(unit_of))


def _buffers(child: nn.Module) -> list[Tensor]:
    return [buffer for buffer in child._buffers.values() if buffer is not None]


def _device(unit_of: dict[int, Unit]) -> torch.device:
    return next(iter(unit_of.values())).spec.device


def _initialiser(module: nn.Module, child: nn.Module) -> Callable[[], object] | None:
    """How ``child`` fills its own parameters and buffers."""
    reset = getattr(child, "reset_parameters", None)
    by_model = getattr(module, "_init_weights", None)
    if callable(by_model):
        return lambda: by_model(child)
    return reset if callable(reset) else None
