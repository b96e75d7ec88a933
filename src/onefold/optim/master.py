"""Masters: the user's own torch optimizer, re-pointed to this rank's pieces.

The optimizer keeps its object, its class (a subclass of it, see below) and its param groups; each
parameter in them is replaced, in place, by this rank's piece of it: a 1-D view of the unit's
``master``, possibly empty. Elementwise update rules cannot tell the difference.

``zero_grad`` has no hook in torch, so the optimizer's class becomes a subclass that also drops what
is pending; see docs/design/optimizer-class.md.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from onefold.errors import StateError
from onefold.unit import Unit
from onefold.wire.layout import Piece

_DROP: "WeakKeyDictionary[Optimizer, Callable[[], None]]" = WeakKeyDictionary()
"""What an engine's optimizer does beside its own ``zero_grad``."""


class _DropsPending(Optimizer):
    """Mixed in front of the user's optimizer class."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient of the engine, pending or reduced, then the optimizer's own."""
        drop = _DROP.get(self)
        if drop is not None:
            drop()
        super().zero_grad(set_to_none)


class Masters:
    """The pieces of one rank, in the optimizer's param groups.

    Attributes:
        pieces: those of each trainable unit, by its index, in the order of its parameters.
    """

    def __init__(self, optimizer: Optimizer, units: Sequence[Unit]) -> None:
        self.optimizer = optimizer
        self._groups = optimizer.param_groups
        self.pieces: dict[int, list[Tensor]] = {}
        self._exposed: Sequence[Unit] = ()
        self._update = _own_step(type(optimizer))
        piece_of: dict[int, Tensor] = {}
        for unit in units:
            pieces = self.pieces.setdefault(unit.index, [])
            for index, slot in enumerate(unit.slots):
                offset, _, numel = unit.piece(index)
                piece = unit.master[offset : offset + numel].detach()
                pieces.append(piece)
                piece_of[id(slot.param)] = piece
                _cut_state(optimizer, slot.param, piece, unit.layout.piece(index, unit.shard_rank))
        self._units = units
        self._witness = torch.zeros(1, device=units[0].master.device if units else None)
        for group in optimizer.param_groups:
            group["params"] = [piece_of[id(param)] for param in group["params"]]
        if any(unit.spec.offloads_optimizer for unit in units):
            _use_fused(optimizer)

    def expose(self, units: Sequence[Unit]) -> None:
        """Give the pieces of ``units``, and no others, their reduced gradients.

        A piece gets None where no rank touched its parameter, so that the optimizer leaves it.
        """
        self.hide()
        self._exposed = units
        for unit in units:
            for index, piece in enumerate(self.pieces[unit.index]):
                piece.grad = unit.gradients.piece(index)

    def update(self, units: Sequence[Unit]) -> None:
        """Step ``units`` alone, inside a ``step()`` that will step others: no hook runs."""
        self.expose(units)
        self._update(self.optimizer)

    def show_to_scaler(self, is_finite: bool) -> None:
        """Expose, and add a witness: one element whose gradient is finite if every rank's is.

        A ``GradScaler`` looks at this rank's pieces alone, of which none may have a gradient; the
        witness makes all ranks see the same. It goes when the gradients do.
        """
        self.expose(self._units)
        self._witness.grad = torch.full((1,), 0.0 if is_finite else float("nan"))
        self._witness.grad = self._witness.grad.to(self._witness.device)
        params = self._groups[-1]["params"]
        if params[-1] is not self._witness:
            params.append(self._witness)

    def hide(self) -> None:
        """Take the gradients away again, so that a stray step changes nothing."""
        for unit in self._exposed:
            for piece in self.pieces[unit.index]:
                piece.grad = None
        self._exposed = ()
        self._remove_witness()

    def _remove_witness(self) -> None:
        params = self._groups[-1]["params"]
        if params[-1] is self._witness:
            params.pop()


def _own_step(cls: type[Optimizer]) -> Callable[[Optimizer], None]:
    """The update of a class without what torch wraps around it for hooks."""
    step: Any = cls.step
    own: Callable[[Optimizer], None] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return own


def _use_fused(optimizer: Optimizer) -> None:
    """Let torch's fused kernels update pieces in host memory, unless the user chose otherwise."""
    for group in optimizer.param_groups:
        has_choice = group.get("foreach") is not None or group.get("differentiable")
        if "fused" in group and group["fused"] is None and not has_choice:
            group["fused"] = True


def check_optimizer(optimizer: Optimizer, names: dict[int, str]) -> None:
    """Refuse an optimizer that cannot be re-pointed.

    Args:
        optimizer: the user's.
        names: the model's parameters, by ``id``.

    Raises:
        ValueError: it has state already, or holds a tensor that is no parameter of the model.
    """
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise ValueError(
            f"initialize(optimizer=): this {type(optimizer).__name__} has already stepped; its "
            "state belongs to whole parameters. Pass a fresh one and load a checkpoint after."
        )
    for position, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(
                    f"initialize(optimizer=): param group {position} holds a tensor of shape "
                    f"{tuple(param.shape)} that is no parameter of the model. Build the optimizer "
                    "from model.parameters() of the model that you pass."
                )


def _cut_state(optimizer: Optimizer, param: Tensor, piece: Tensor, part: Piece) -> None:
    """Some optimizers (Adagrad) make their state when they are built; cut it like the parameter."""
    if param not in optimizer.state:
        return
    first, end = part.param_offset, part.param_offset + part.numel
    optimizer.state[piece] = {
        key: value.flatten()[first:end].clone()
        if isinstance(value, Tensor) and value.shape == param.shape
        else value
        for key, value in optimizer.state.pop(param).items()
    }


def adopt(
    optimizer: Optimizer,
    *,
    drop: Callable[[], None],
    before_step: Callable[[tuple[Any, ...], dict[str, Any]], None],
    after_step: Callable[[], None],
) -> list[torch.utils.hooks.RemovableHandle]:
    """Make the optimizer's own methods the engine's.

    Args:
        optimizer: the user's, re-pointed.
        drop: what ``zero_grad`` does besides.
        before_step: called with step's arguments.
        after_step: called after the update.
    """
    own = type(optimizer)
    adopted = type(own.__name__, (_DropsPending, own), {"__module__": own.__module__})
    optimizer.__class__ = adopted
    _DROP[optimizer] = drop

    def refuse(_optimizer: Optimizer) -> None:
        raise StateError(
            "optimizer.state_dict(): every rank holds other pieces of the state, so one rank's "
            "dict is not a checkpoint. Use engine.save_checkpoint()."
        )

    return [
        optimizer.register_step_pre_hook(lambda _o, args, kwargs: before_step(args, kwargs)),
        optimizer.register_step_post_hook(lambda _o, _args, _kwargs: after_step()),
        optimizer.register_state_dict_pre_hook(refuse),
    ]


def release(optimizer: Optimizer) -> None:
    """Stop forwarding ``zero_grad`` to an engine that was destroyed."""
    _DROP.pop(optimizer, None)
