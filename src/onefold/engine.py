"""Engine: the order of calls. No tensor arithmetic here; each station is a file of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from onefold.backward import Backwards
from onefold.explain import explain
from onefold.grad.exchange import Place
from onefold.grad.full import full_grad
from onefold.grad.window import GradWindow, NoSync
from onefold.optim import master
from onefold.optim.accumulation import Accumulation
from onefold.optim.scaler import LossScaler
from onefold.param.autocast import Autocast
from onefold.param.full import full_parameters, full_state_dict
from onefold.param.hooks import ModuleHooks
from onefold.param.unshard import Unsharder
from onefold.parts import Parts
from onefold.state.checkpointed import Checkpointed
from onefold.state.loader import Loader
from onefold.state.saver import Saver
from onefold.step import Stepper
from onefold.transaction import Transaction
from onefold.wire.ledger import Ledger


class Engine(Checkpointed):
    """One model, its optimizer and its data-parallel ranks.

    Attributes:
        module: the user's model; calling it, or any submodule, is as good as calling the engine.
        optimizer: the user's torch optimizer, over this rank's pieces of the masters.
        lr_scheduler: stepped after every real step; None if the caller steps its own.
        device: where the parameters are.
        ledger: every data collective, counted.
        plan: blocks and units, as decided at construction.
        loss_scaler: the loss scale; fixed at 1.0 but for fp16.
    """

    def __init__(self, parts: Parts, lr_scheduler: LRScheduler | None = None) -> None:
        self.module = parts.module
        self.optimizer = parts.optimizer
        self.lr_scheduler = lr_scheduler
        self.device = parts.arena.device
        self.ledger: Ledger = parts.ledger
        self.loss_scaler = LossScaler(parts.config.loss_scale)
        self.plan = parts.plan
        self._world = parts.world
        self.parts = parts
        self._units = parts.units
        self._trainable = [unit for unit in parts.units if unit.spec.is_trainable]
        managed = parts.config.managed_gradient_accumulation
        self._accumulation = Accumulation(
            parts.config.gradient_accumulation_steps if managed else None,
            num_ranks=parts.mean_over,
        )
        self._backwards = Backwards(wants_scaled=self.loss_scaler.is_active)
        self._autocast = Autocast(parts.module, parts.plan.autocast_dtype, self.device.type)
        unsharder = Unsharder(parts.plan.blocks, parts.units)
        self._module_hooks = ModuleHooks(parts, unsharder, self._backwards)
        self._transaction = Transaction(
            parts, self._backwards, self._accumulation, unsharder, self._divisor
        )
        published = [unit for unit in unsharder.gather_order if unit.spec.is_trainable]
        self._stepper = Stepper(
            parts, self._transaction, self._accumulation, self.loss_scaler, published, lr_scheduler
        )
        carried = parts, self._stepper, self._transaction, self.loss_scaler, lr_scheduler
        self._saver, self._loader = Saver(*carried), Loader(*carried)
        self._optimizer_hooks = self._stepper.adopt(drop=self._drop, at_end=self._saver.poll)

    @property
    def last_window(self) -> GradWindow | None:
        """The report of the last outermost window that ended; None before the first."""
        return self._transaction.last_window

    @property
    def clip_factor(self) -> float:
        """What clipping multiplied the gradients of the last step with; 1.0 for nothing."""
        return self._stepper.clip_factor

    # -- forward and backward ------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> "Engine":
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """Set the module's evaluation mode."""
        return self.train(False)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Accumulate the gradients of ``loss``; the same as ``loss.backward()``, and it counts.

        Args:
            loss: a scalar that requires a gradient. Under fp16 it is scaled here, and only there.
            retain_graph: as in torch.
            scale_wrt_gas: the step divides by the micro-steps taken; False leaves that out for the
                whole step.

        Returns:
            The loss for logging, detached: divided by ``gradient_accumulation_steps`` unless
            ``scale_wrt_gas`` is False.

        Raises:
            ValueError: ``loss`` is not a scalar that requires a gradient.
            StateError: ``scale_wrt_gas`` differs from an earlier backward of the same step.
        Communication: inside a scope none, unless this backward is armed. Outside, where gradients
            are Shard, one reduction per completed unit; where parameters are Shard, one all-gather
            per unit used.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"backward(loss): expected a scalar that requires a gradient, got shape "
                f"{tuple(loss.shape)} with requires_grad={loss.requires_grad}. Reduce the loss to "
                "one number, and compute it from the engine's forward with gradients enabled."
            )
        self._accumulation.note_backward(scale_wrt_gas)
        scaled = self._scaled(loss)
        with self._backwards.running(scaled):
            scaled.backward(retain_graph=retain_graph)
        steps = self._accumulation.steps if scale_wrt_gas else None
        return loss.detach() / (steps or 1)

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale, for ``engine.scale(loss).backward()``.

        Under fp16 every outermost backward must begin with this or with ``engine.backward``;
        backwards nested in one that did are scaled by what flows into them. Otherwise the scale is
        1 and this changes nothing. The scale changes in ``step()`` only, so it is the same for all
        backwards of a step; ``step()`` divides it out.

        Args:
            loss: any tensor that requires a gradient; scaled in fp32 or wider.
        """
        scaled = self._scaled(loss)
        if self.loss_scaler.is_active:
            self._backwards.watch_scaled(scaled)
        return scaled

    def _scaled(self, loss: Tensor) -> Tensor:
        if not self.loss_scaler.is_active:
            return loss
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.loss_scaler.scale

    def _divisor(self) -> float:
        """What the sum of all gradients is divided by, once."""
        return self._accumulation.divisor * self.loss_scaler.scale

    # -- scopes --------------------------------------------------------------------------------

    def coalesce_grad_reduction(
        self,
        *,
        backwards: int | None = None,
        across: Literal["replicate"] | None = None,
        max_bytes: int | None = None,
    ) -> GradWindow:
        """A window: any number of backwards, on any rank, and one reduction per unit.

        Where gradients are Shard the reduction happens at the end of the outermost window, else in
        ``step()``. Parameters stay unsharded while it is open. If the body raises on any rank,
        everything since the last step is dropped on all ranks.

        Args:
            backwards: how many outermost backwards there will be, if known; the last one then
                hides the reductions behind itself. Where gradients are Partial, and several windows
                of one step share one reduction, say it in the last window only.
            across: "replicate" defers the sum over the replicate axis of a two-axis mesh alone:
                where gradients are Shard every backward still reduces over the shard axis as it
                goes, so all ranks run the same backwards through the same units, and parameters
                are not resident. The window holds 1/W of the gradients.
            max_bytes: the most that is held above what is held between steps; the same on all
                ranks. Parameters are kept first, then gradients; each backward gathers or reduces
                what does not fit, as outside of windows, so through that all ranks run the same
                backwards. Nothing is armed unless all fits on the wire at once. A scope inside
                without a limit keeps everything. ``budget.py`` says what is counted. No effect
                where gradients are Partial.

        Returns:
            A context manager that yields itself, a ``GradWindow``, as report.

        Raises:
            ValueError: ``backwards`` is below 1; ``across`` with one of the others, or on a mesh
                without a replicate axis, where gradients are Shard; or ``max_bytes`` is below the
                least possible, which the message says.
            WindowAborted: at the end, on every rank but those whose own error propagates.
            RankMismatchError: ranks stand at different places, or ``max_bytes`` differs.
        Communication: entry: with ``max_bytes`` one exchange; one all-gather per sharded unit that
            is kept. End: one exchange, one reduction per pending unit where gradients are Shard.
        Memory: all gradients in the accumulation dtype, and all parameters; or ``max_bytes``.
        """
        kept = self._transaction.budget.of_window(backwards, across, max_bytes)
        return GradWindow(self._transaction.open, self._transaction.close, kept, backwards)

    def no_sync(self) -> NoSync:
        """A scope whose gradients stay local, also after its end, until the next reduction.

        Communication: entry: one all-gather per sharded unit. End: none.
        Memory: as a window; the gradients stay until they are reduced.
        """
        everything = self._transaction.budget.everything
        return NoSync(self._transaction.open, self._transaction.close, everything)

    # -- reduction and step --------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Reduce whatever is pending and divide; ``step()`` begins with this.

        Afterwards ``full_grad``, the norm and the gradients of the optimizer's pieces can be read
        (and unscaled, by ``torch.amp.GradScaler``). Until the step the optimizer's last param group
        holds one element more, whose gradient is NaN if any rank's is not finite, so that ranks
        agree about skipping. Backwards that follow before the step cost the sum one rounding more.

        Raises:
            StateError: inside an open scope or a backward, or a backward has failed.
        Communication: one exchange, one reduction per pending unit, one exchange for the norm.
        """
        self._transaction.refuse_inside("reduce_gradients()")
        self._stepper.reduce(Place.REDUCE_GRADIENTS)
        self._stepper.show_to_scaler()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Reduce what is pending, and clip the averaged gradient; for loops that clip by hand.

        Args:
            max_norm: largest norm over all parameters, experts and shards, each counted once.
            norm_type: order of the norm; 1 or above, or inf.

        Returns:
            The norm before clipping.

        Raises:
            ValueError: ``max_norm`` is not above 0, or ``norm_type`` below 1.
            StateError: inside an open scope or a backward, or a backward has failed.
        Communication: that of ``reduce_gradients``, and one exchange.
        """
        if not max_norm > 0 or not norm_type >= 1:
            raise ValueError(
                f"clip_grad_norm(): expected max_norm above 0 and norm_type of 1 or above, got "
                f"{max_norm} and {norm_type}."
            )
        self._transaction.refuse_inside("clip_grad_norm()")
        self._stepper.reduce(Place.REDUCE_GRADIENTS)
        return self._stepper.clip(max_norm, norm_type)

    def step(self) -> None:
        """End a micro-step; on the boundary reduce, clip, update and publish.

        The same as ``optimizer.step()``, and it also steps the scheduler given to ``initialize``
        after a real step. If a gradient is not finite on any rank, the step is skipped on all: the
        gradients are dropped, and weights, optimizer and scheduler stay as they are.

        Raises:
            StateError: inside an open scope or a backward; a backward has failed since the last
                ``zero_grad()``; a window was aborted and no backward has run since; a parameter's
                storage was replaced; under fp16, too many steps in a row were skipped with the
                scale at its floor.
            RankMismatchError: ranks stand at different places.
            FloatingPointError: a gradient is not finite, and ``onefold.on_nonfinite`` is "raise".
        Communication: off the boundary none. On it, that of ``reduce_gradients`` and one
            all-gather per unit that is Replicate over sharded masters.
        """
        self.optimizer.step()

    # -- dropping ------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drop every gradient since the last step, pending or reduced.

        Once something was reduced it must be called on every rank.
        """
        self.optimizer.zero_grad()

    def _drop(self) -> None:
        self._transaction.drop()
        self._stepper.hide()

    # -- accumulation boundary -----------------------------------------------------------------

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide by hand whether the next ``step()`` steps; ``step()`` clears it.

        True also says that the next outermost backward is the last, so that its reductions hide
        behind it.
        """
        self._accumulation.set_boundary(is_boundary)
        if self._transaction.keeper.window is not None:
            self._transaction.watch_if_armed()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step()`` steps."""
        return self._accumulation.is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` changed the weights: on the boundary, and not skipped."""
        return self._stepper.was_applied

    # -- reading -------------------------------------------------------------------------------

    def explain(self) -> str:
        """What was decided at construction, in words, on one screen; the same until ``destroy``.

        Ranks and axes; units with their sizes in bytes and dtypes; for every axis the transport and
        why, by what algorithm gradients are summed, and whether in rank order; bytes that this rank
        holds, and sends per step, with a window and without.

        Communication: none.
        """
        meshes = [wire.mesh for wire in self.parts.wires]
        return explain(self.plan, meshes, self._world.rank, self._world.size)

    def get_global_grad_norm(self) -> float | None:
        """The norm of the averaged gradient before clipping; None before the first step.

        Of order ``onefold.norm_order``, 2 unless told otherwise, or as the last ``clip_grad_norm``
        said; ``clip_factor`` is what was made of it.
        """
        return self._stepper.norm

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        """The averaged full gradient of one parameter, in its shape, on every rank.

        Args:
            param: a trainable parameter of the module.

        Returns:
            A copy, in the accumulation dtype; None if no rank has touched the parameter since the
            last step.

        Raises:
            ValueError: ``param`` is not a trainable parameter.
            StateError: gradients of its unit are still pending on some rank.
        Communication: one exchange and, over a shard axis, one all-gather of the unit's gradient.
        """
        reducer = self._transaction.reducer
        if self.plan.home.shards_gradients and not self._transaction.keeper.units:
            reducer.finish_all()  # reduced as they went, and on their way
        return full_grad(param, self._trainable, reducer, self._world.control, self._divisor())

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Every parameter whole on every rank; the same writes on all ranks reach the masters.

        Raises:
            RankMismatchError: at the end, if the parameters differ between ranks.
        Communication: one all-gather per sharded unit, one exchange.
        Memory: all parameters.
        """
        self._transaction.num_full += 1
        try:
            with full_parameters(self._units, self._world.control):
                yield
        finally:
            self._transaction.num_full -= 1

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's whole ``state_dict`` on the CPU of every rank; buffers are rank 0's.

        Communication: one all-gather per sharded unit, one broadcast per persistent buffer.
        Memory: the model on the host, one unit on the device.
        """
        return full_state_dict(self.module, self._units, self.parts.wires[0], self._world.control)

    def destroy(self) -> None:
        """Take the engine off the module and the optimizer, and free its groups.

        The parameters stay where they are: sharded ones stay freed. An asynchronous save is waited
        for, and its error raised when all is freed.
        """
        self._module_hooks.detach()
        self._autocast.detach()
        self._transaction.detach()
        for handle in self._optimizer_hooks:
            handle.remove()
        master.release(self.optimizer)
        try:
            self._saver.close()
        finally:
            self.parts.disconnect()
