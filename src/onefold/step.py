"""Step: the order of stations 4 to 6, between the gradients that are home and the next forward.

``optimizer.step()`` is the user's own; what comes before and after it hangs on torch's step hooks.
A step that is skipped passes through it with no gradients, so that nothing of the optimizer moves.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from onefold.errors import StateError
from onefold.grad.exchange import Place
from onefold.optim import master
from onefold.optim.accumulation import Accumulation
from onefold.optim.clip import clip, global_norm
from onefold.optim.elementwise import is_of_torch
from onefold.optim.scaler import LossScaler
from onefold.param.publish import Publisher, cut_waves
from onefold.parts import Parts
from onefold.transaction import Transaction
from onefold.unit import Unit

log = logging.getLogger(__name__)


class Stepper:
    """Everything an engine does around the update of its optimizer.

    Attributes:
        norm: of the averaged gradient before clipping; None before the first reduction.
        clip_factor: what clipping multiplied the gradients of the last step with.
        global_steps: real steps.
        skipped_steps: steps that were dropped because a gradient was not finite.
        micro_steps: calls of ``step()``, on and off the boundary.
        masters: the pieces that the optimizer updates.
        was_applied: the last ``step()`` was on the boundary, and not skipped.
    """

    def __init__(
        self,
        parts: Parts,
        transaction: Transaction,
        accumulation: Accumulation,
        scaler: LossScaler,
        publish_order: Sequence[Unit],
        lr_scheduler: LRScheduler | None,
    ) -> None:
        self.norm: float | None = None
        self.clip_factor = 1.0
        self.global_steps = 0
        self.skipped_steps = 0
        self.micro_steps = 0
        self.was_applied = False
        self._config = parts.config
        self._control = parts.world.control
        self._units = [unit for unit in parts.units if unit.spec.is_trainable]
        self._transaction = transaction
        self._accumulation = accumulation
        self._scaler = scaler
        # torch's own classes keep all of their state per parameter, step counts included.
        self._waves = cut_waves(publish_order, is_elementwise=is_of_torch(type(parts.optimizer)))
        self._publisher = Publisher()
        self._lr_scheduler = lr_scheduler
        self.masters = master.Masters(parts.optimizer, self._units)
        self._clipped_by_hand: tuple[float, float] | None = None  # norm before, factor
        self._is_stepping = False
        self._is_skipping = False

    def adopt(self, drop: Callable[[], None], at_end: Callable[[], None]) -> list[RemovableHandle]:
        """Make the optimizer's own methods the engine's.

        Args:
            drop: what ``zero_grad`` adds.
            at_end: called after every step on the boundary.
        """

        def after_step() -> None:
            if self._is_stepping:
                self._after()
                at_end()

        return master.adopt(
            self.masters.optimizer, drop=drop, before_step=self._before, after_step=after_step
        )

    def resume(self, global_steps: int, skipped_steps: int, micro_steps: int) -> None:
        """Count on from where another run was."""
        self.global_steps = global_steps
        self.skipped_steps = skipped_steps
        self.micro_steps = micro_steps

    def hide(self) -> None:
        """Take the gradients away from the optimizer's pieces."""
        self.masters.hide()
        self._clipped_by_hand = None

    def reduce(self, place: Place) -> None:
        """Bring every gradient home, averaged, and take the norm."""
        self._transaction.reduce(place)
        self.norm = global_norm(self._units, self._control, self._config.norm_order)

    def show_to_scaler(self) -> None:
        """Let a ``torch.amp.GradScaler`` look at the reduced gradients; see ``Masters``."""
        assert self.norm is not None
        self.masters.show_to_scaler(is_finite=math.isfinite(self.norm))

    def clip(self, max_norm: float, order: float) -> float:
        """Clip the reduced gradients by hand; the norm before."""
        norm = global_norm(self._units, self._control, order)
        self._clipped_by_hand = norm, clip(self._units, norm, max_norm)
        return norm

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise StateError(
                "step(closure): the closure's backward would come after the reduction. Run the "
                "backward first and call step() without arguments."
            )
        self._transaction.refuse_inside("step()")
        self._is_stepping = self._accumulation.is_boundary
        self.micro_steps += 1
        self.was_applied = False
        if not self._is_stepping:
            self._accumulation.count()
            self.masters.hide()
            return
        self.reduce(Place.STEP)
        assert self.norm is not None
        self._is_skipping = not math.isfinite(self.norm) and self._drops(self.norm)
        if self._is_skipping:
            self.masters.hide()
        else:
            self.clip_factor = clip(self._units, self.norm, self._config.gradient_clipping)
            self._update_all_but_the_last()
        if self._clipped_by_hand is not None:
            self.norm, factor = self._clipped_by_hand
            self.clip_factor *= factor
        self._scaler.update(self._is_skipping)

    def _update_all_but_the_last(self) -> None:
        """Every wave is published while the next is updated; the last is torch's to update."""
        for wave in self._waves[:-1]:
            self.masters.update(wave)
            self._publisher.start(wave)
        self.masters.expose(self._waves[-1])

    def _drops(self, norm: float) -> bool:
        """Whether a step whose gradient is not finite is dropped, alike on all ranks."""
        text = f"step(): the gradient norm over all ranks is {norm} at step {self.global_steps}"
        policy = "skip" if self._scaler.is_active else self._config.on_nonfinite
        if policy == "raise":
            raise FloatingPointError(
                f"{text}. The gradients are still there to be looked at; call zero_grad() on every "
                "rank to go on."
            )
        if policy == "ignore":
            log.warning("%s; stepping all the same", text)
            return False
        self.skipped_steps += 1
        count, scale = self.skipped_steps, self._scaler.scale
        log.warning("%s; skipped, as %d so far, at a loss scale of %g", text, count, scale)
        return True

    def _after(self) -> None:
        self.was_applied = not self._is_skipping
        self._is_stepping = False
        if self.was_applied:
            self._publisher.start(self._waves[-1])
            self._publisher.finish()
        self.hide()
        self._transaction.end_step()
        self._accumulation.end_step()
        if self.was_applied:
            self.global_steps += 1
            if self._lr_scheduler is not None:
                self._lr_scheduler.step()
