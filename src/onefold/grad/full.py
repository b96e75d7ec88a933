"""Reading one parameter's averaged full gradient after its reduction."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onefold.errors import StateError
from onefold.grad.reduce import Reducer
from onefold.unit import Unit
from onefold.wire.control import Control


def full_grad(
    param: nn.Parameter,
    units: Sequence[Unit],
    reducer: Reducer,
    control: Control,
    divisor: float,
) -> Tensor | None:
    """See ``Engine.full_grad``; ``divisor`` is what the sum is, or will be, divided by."""
    unit, index = _find(param, units)
    gradients = unit.gradients
    pending = gradients.collect() or reducer.is_in_flight(unit) or gradients.grad_part is not None
    is_pending, is_touched = control.largest([int(pending), int(gradients.touched[index])])
    if is_pending:
        raise StateError(
            f"full_grad({unit.slots[index].name}): gradients of unit {unit.name} are still pending,"
            " so there is no average yet. Leave the window, or call reduce_gradients(), first."
        )
    if not is_touched:
        return None
    gradients.divide(divisor)
    assert gradients.grad_shard is not None
    flat = unit.gather(gradients.grad_shard)
    return unit.views_of(flat)[index].clone()


def _find(param: nn.Parameter, units: Sequence[Unit]) -> tuple[Unit, int]:
    for unit in units:
        for index, own in enumerate(unit.params):
            if own is param:
                return unit, index
    raise ValueError(
        f"full_grad(param): expected a trainable parameter of the engine's module, got a tensor of "
        f"shape {tuple(torch.as_tensor(param).shape)}. Pass the module's own nn.Parameter, one that"
        " stands in the optimizer's param groups."
    )
