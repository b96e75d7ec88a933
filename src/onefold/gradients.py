"""Gradients: the gradient half of a unit, from what autograd accumulates to what is stepped on.

[Note: `.grad` is the truth]

| state    | `param.grad` is                                     | the reduced part is in  |
|----------|-----------------------------------------------------|-------------------------|
| empty    | None                                                | nowhere                 |
| bound    | a view of `grad_full` with its own version counter  | `grad_shard`, if any    |
| reduced  | a placeholder: one NaN expanded to the shape        | `grad_shard` / in flight|

While bound, autograd adds in place, in C++, straight into the buffer that goes on the wire; that a
parameter was touched is known from the version counter of its view. Before anything is sent
(``collect``) `.grad` is looked at once more, because the user may have changed it:

- None, or a placeholder that is gone: everything of that parameter since the last step is dropped;
- another tensor after a backward under ``create_graph=True``: autograd put it there; it contains
  what the view held, so it is copied over the view, never added;
- any other tensor: the user's (or autograd's, after the user had set None); it stands for
  everything, so it is copied over the view and the reduced part is dropped.

Dropping a part that is home must happen on every rank: ``drops`` counts it, and the exchange
compares the counts. A reduction that the ranks have not agreed on yet (of an armed backward) may be
on its way on some of them only: ``voids`` counts its drops, and the largest count stands.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onefold.errors import StateError
from onefold.wire.buffer import Arena

if TYPE_CHECKING:
    from onefold.unit import UnitSpec


class Gradients:
    """The gradients of one unit on one rank.

    Attributes:
        touched: per parameter, whether a backward of this rank reached it since the last step.
        touched_anywhere: the same over all ranks, as of the last exchange.
        drops: per parameter, how often a part of it that was home was dropped since the last step.
        voids: the same for parts that may still be on the wire.
        has_home: ranks agree that a reduced part exists.
        grad_full: ``[N]`` while bound.
        grad_shard: ``[S]`` after the first reduction, summed over all ranks; in host memory where
            the optimizer is offloaded.
        grad_part: ``[S]``, summed over the shard axis and still Partial over the replicate axis.
        is_pending: ``grad_full`` holds something that no reduction has taken yet.
    """

    def __init__(
        self,
        spec: "UnitSpec",
        views_of: Callable[[Tensor], list[Tensor]],
        arena: Arena,
        shard_arena: Arena,
        shard_rank: int,
    ) -> None:
        slots = spec.slots
        self._slots = slots
        self._layout = spec.layout
        self._views_of = views_of
        self._arena = arena
        self._shard_arena = shard_arena
        self._shard_rank = shard_rank
        self.dtype = spec.accumulation_dtype
        self.shard_dtype = spec.master_dtype
        nan = torch.full((), float("nan"), dtype=self.dtype, device=arena.device)
        self._placeholders = [nan.clone().expand(slot.size) for slot in slots]
        self._has_placeholder = [False] * len(slots)
        self._bound: list[Tensor] = []
        self._fresh: list[int] = []
        self._divided_by = 1.0
        self.grad_full: Tensor | None = None
        self.grad_shard: Tensor | None = None
        self.grad_part: Tensor | None = None
        self.is_pending = False
        self.touched = [False] * len(slots)
        self.touched_anywhere = [False] * len(slots)
        self.drops = [0] * len(slots)
        self.voids = [0] * len(slots)
        self.has_home = False

    def adopt(self) -> None:
        """The parameters have their dtype: let autograd accumulate in ``dtype``."""
        for slot in self._slots:
            if slot.param.dtype != self.dtype:
                found, slot.param.grad = slot.param.grad, None
                slot.param.grad_dtype = self.dtype
                slot.param.grad = None if found is None else found.to(self.dtype)

    @property
    def full_bytes(self) -> int:
        """Bytes of ``grad_full`` while bound."""
        return self._layout.numel * self.dtype.itemsize

    @property
    def part_bytes(self) -> int:
        """Bytes of ``grad_part`` while there is one."""
        return self._layout.shard_numel * self.shard_dtype.itemsize

    # -- empty or reduced -> bound ------------------------------------------------------------

    def bind(self) -> None:
        """Point every `.grad` at its view of a zeroed ``grad_full``; what it held moves along.

        Memory: N elements of the accumulation dtype until ``take`` or ``drop``.
        """
        if self.grad_full is not None:
            return
        self.grad_full = self._arena.lease(self._layout.numel, self.dtype, zeroed=True)
        # .data gives every view a version counter of its own.
        self._bound = [view.data for view in self._views_of(self.grad_full)]
        self._fresh = [view._version for view in self._bound]
        for index, (slot, view) in enumerate(zip(self._slots, self._bound, strict=True)):
            found = self._claim(index)
            if found is not None:
                _copy_dense(found, view, slot.name)
            slot.param.grad = view

    def _claim(self, index: int) -> Tensor | None:
        """What `.grad` holds of parameter ``index`` beside the reduced part."""
        found = self._slots[index].param.grad
        if not self._has_placeholder[index]:
            return found
        placeholder = self._placeholders[index]
        if found is placeholder and placeholder._version == 0:
            return None
        is_own = found is placeholder  # one element, so torch let somebody write to it
        if is_own and bool(placeholder.isnan().any()):
            raise StateError(
                f"the gradient of parameter {self._slots[index].name} was scaled in place after it "
                "had been reduced, so the scaling is lost. Scale the loss, or scale inside "
                "coalesce_grad_reduction() before anything has left."
            )
        self._clear(index)
        if is_own and not bool(placeholder.any()):  # zeroed in place
            self._slots[index].param.grad = None
            return None
        return found

    # -- bound: look, then hand over ------------------------------------------------------------

    def absorb(self, index: int) -> None:
        """Autograd has just accumulated: if it replaced `.grad`, take that over into the view."""
        found = self._slots[index].param.grad
        if found is not None and found is not self._bound[index]:
            _copy_dense(found.detach(), self._bound[index], self._slots[index].name)
            self.touched[index] = self.is_pending = True
            self._rebind(index)

    def collect(self, *, keeps_graph: bool = False) -> bool:
        """Make ``grad_full`` the truth, and say whether anything in it waits to be reduced.

        Args:
            keeps_graph: a backward ran under ``create_graph=True`` since the last flush, so another
                tensor in `.grad` is autograd's.

        Raises:
            StateError: a gradient is sparse.
        """
        if self.grad_full is None:
            for index, slot in enumerate(self._slots):
                if self._has_placeholder[index]:
                    if self._claim(index) is not None:
                        self.bind()
                        break
                elif slot.param.grad is not None:
                    self.bind()
                    break
            else:
                return False
        for index, (slot, view) in enumerate(zip(self._slots, self._bound, strict=True)):
            found = slot.param.grad
            if found is view:
                if view._version == self._fresh[index]:
                    continue
            elif found is None:
                view.zero_()
                self._clear(index)
                self._rebind(index)
                continue
            else:
                if not keeps_graph:
                    self._clear(index)
                _copy_dense(found.detach(), view, slot.name)
            self.touched[index] = self.is_pending = True
            self._rebind(index)
        return self.is_pending

    def _rebind(self, index: int) -> None:
        self._fresh[index] = self._bound[index]._version
        self._slots[index].param.grad = self._bound[index]

    def take(self) -> Tensor:
        """Hand ``grad_full`` ``[N]`` to a reduction, which gives it back to the arena.

        A rank with nothing pending hands over zeros. `.grad` is a placeholder afterwards.
        """
        buffer = self.grad_full
        if buffer is None:
            buffer = self._arena.lease(self._layout.numel, self.dtype, zeroed=True)
        self._has_placeholder = [True] * len(self._slots)
        self._unbind()
        return buffer

    def nothing(self) -> Tensor:
        """A zeroed lease to take part in a reduction with; what is pending stays pending."""
        return self._arena.lease(self._layout.numel, self.dtype, zeroed=True)

    def release(self) -> None:
        """Nothing is pending: give ``grad_full`` back."""
        if self.grad_full is not None:
            self._arena.give_back(self.grad_full)
            self._unbind()

    def _unbind(self) -> None:
        self.grad_full = None
        self.is_pending = False
        self._bound = []
        for index, slot in enumerate(self._slots):
            slot.param.grad = self._placeholders[index] if self._has_placeholder[index] else None

    # -- the reduced part -----------------------------------------------------------------------

    def add_reduced(self, summed: Tensor, voids: Sequence[int]) -> None:
        """Add a finished reduction's ``summed`` ``[S]``, a lease that now belongs here.

        Args:
            summed: this rank's slice of the sum over all ranks, in the dtype of the shard.
            voids: ``voids`` as it was when the reduction was started; parameters that were dropped
                since are left out.
        """
        self._void(summed, voids)
        if self.grad_shard is not None:
            self.divide(1.0)
            self.grad_shard.add_(summed.to(self.grad_shard.device))
            self._arena.give_back(summed)
        elif self._shard_arena is self._arena:
            self.grad_shard = summed
        else:
            self.grad_shard = self._shard_arena.lease(summed.numel(), summed.dtype)
            # Ordered before the next use of ``summed``; the host waits in ``Arena.settle``.
            self.grad_shard.copy_(summed, non_blocking=True)
            self._arena.give_back(summed)

    def add_part(self, summed: Tensor, voids: Sequence[int]) -> None:
        """The same for a sum over the shard axis alone, which ``take_part`` hands on."""
        self._void(summed, voids)
        if self.grad_part is None:
            self.grad_part = summed
        else:
            self.grad_part.add_(summed)
            self._arena.give_back(summed)

    def take_part(self) -> Tensor | None:
        """Hand ``grad_part`` ``[S]`` over, to be summed over the replicate axis."""
        part, self.grad_part = self.grad_part, None
        return part

    def _void(self, summed: Tensor, voids: Sequence[int]) -> None:
        self.has_home = True
        for index, (before, now) in enumerate(zip(voids, self.voids, strict=True)):
            if before != now:
                self._piece_of(summed, index).zero_()

    def divide(self, divisor: float) -> None:
        """Make ``grad_shard`` the sum over ranks divided, once, by ``divisor``."""
        if self.grad_shard is None or divisor == self._divided_by:
            return
        if self._divided_by != 1.0:
            self.grad_shard.mul_(self._divided_by)
        if divisor != 1.0:
            # A tensor, not a number: with a number CUDA multiplies by the reciprocal.
            self.grad_shard.div_(self.grad_shard.new_tensor(divisor))
        self._divided_by = divisor

    def piece(self, index: int) -> Tensor | None:
        """This rank's part of parameter ``index``'s reduced gradient; None if there is none."""
        if self.grad_shard is None or not self.touched_anywhere[index]:
            return None
        piece = self._piece_of(self.grad_shard, index)
        return piece if piece.numel() else None

    def _piece_of(self, shard: Tensor, index: int) -> Tensor:
        offset, _, numel = self._layout.piece(index, self._shard_rank)
        return shard[offset : offset + numel]

    def _clear(self, index: int) -> None:
        self.touched[index] = False
        if self._has_placeholder[index]:
            self._count_drop(index)
            self._arena.settle()  # a copy that is still under way would land on the zeros
            for reduced in (self.grad_shard, self.grad_part):
                if reduced is not None:
                    self._piece_of(reduced, index).zero_()

    def _count_drop(self, index: int) -> None:
        self.voids[index] += 1
        if self.has_home:
            self.drops[index] += 1
        self._reset_placeholder(index)

    def _reset_placeholder(self, index: int) -> None:
        self._has_placeholder[index] = False
        if self._placeholders[index]._version:  # somebody zeroed it in place
            fresh = torch.full((), float("nan"), dtype=self.dtype, device=self._arena.device)
            self._placeholders[index] = fresh.expand(self._slots[index].size)

    # -- everything -> empty ------------------------------------------------------------------

    def drop(self) -> None:
        """Forget everything since the last step, pending, reduced or on the wire."""
        if self.grad_full is not None:
            self._arena.give_back(self.grad_full)
        if self.grad_shard is not None:
            self._shard_arena.give_back(self.grad_shard)
            self.grad_shard = None
        if self.grad_part is not None:
            self._arena.give_back(self.grad_part)
            self.grad_part = None
        for index, has_placeholder in enumerate(self._has_placeholder):
            if has_placeholder:
                self._count_drop(index)
        self._unbind()
        self._divided_by = 1.0
        self.touched = [False] * len(self._slots)
        self.touched_anywhere = [False] * len(self._slots)

    def end_step(self) -> None:
        """The step has consumed the gradients, on every rank alike."""
        self.drop()
        self.drops = [0] * len(self._slots)
        self.voids = [0] * len(self._slots)
        self.has_home = False


def _copy_dense(found: Tensor, view: Tensor, name: str) -> None:
    if found.layout is not torch.strided:
        raise StateError(
            f"parameter {name} got a {found.layout} gradient: flat buffers are dense. Build the "
            "layer with sparse=False."
        )
    view.copy_(found)
