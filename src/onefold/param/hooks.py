"""Module hooks: what a forward and the backward through it mean for the parameters they need.

The model, repeated modules and every module that owns parameters carry the same pair of forward
hooks, so that a call of the model, of a block or of any submodule is equally right; the outermost
such forward is a pass, in which the order of blocks is seen. The hook after forward leaves hooks on
the outputs, which hold the block before its backward; before the outermost forward of a block hooks
are left on its inputs, which release it after. Where nothing will be freed when a forward ends (in
a window, or because parameters are Replicate) a pass leaves hooks for all blocks inside it, because
its backward may come when the window has been closed, and forwards directly inside it leave some,
because it may itself run a backward from them; none deeper inside. There the modules inside a
repeated one (inner modules) need no hooks, and carry none once everything has arrived: a call of
Python between two kernels costs far more than the same call in a loop.

An input was made before the block's forward, so autograd, which runs the latest node first, has run
all of the block when the gradient of any non-leaf input is complete. Where no input needs a
gradient the block is released at the end of the backward.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onefold.backward import NOT_RUNNING, Backwards, current_task
from onefold.errors import StateError
from onefold.param.unshard import Unsharder
from onefold.parts import Parts
from onefold.unit import Unit


class ModuleHooks:
    """The forward hooks of one engine's modules."""

    def __init__(
        self,
        parts: Parts,
        unsharder: Unsharder,
        backwards: Backwards,
    ) -> None:
        blocks, units = parts.plan.blocks, parts.units
        self._unsharder = unsharder
        self._backwards = backwards
        self._running: list[nn.Module] = []  # forwards whose first hook has run, outermost first
        self._settled_task = NOT_RUNNING  # a backward that has nothing to ask for any more
        self._inside: dict[int, int] = {}  # uses of resident blocks in the pass that runs
        self._depth: dict[int, int] = dict.fromkeys(range(len(blocks)), 0)
        # Numbers the outermost forwards of each block: one's input may be the other's output.
        self._uses: dict[int, int] = dict.fromkeys(range(len(blocks)), 0)
        self._handles: list[RemovableHandle] = []
        self._inner_handles: list[RemovableHandle] = []
        # The model may own no parameters, and then belongs to no block.
        self._blocks_of: dict[nn.Module, list[int]] = {parts.module: []}
        self._freed: dict[nn.Module, list[Unit]] = {parts.module: []}
        self._freeing = {  # blocks
            index
            for index, block in enumerate(blocks)
            if any(units[i].frees_parameters for i in block.units)
        }
        for index, block in enumerate(blocks):
            for module in (*block.modules, *block.inner):
                self._blocks_of.setdefault(module, []).append(index)
                freed = [units[i] for i in block.units if units[i].frees_parameters]
                self._freed.setdefault(module, []).extend(freed)
        # Dynamo must run these hooks and not trace them: they send, wait, and move storages.
        self._before: Any = torch.compiler.disable(self._before_forward)
        self._after: Any = torch.compiler.disable(self._after_forward)
        outer = {parts.module}.union(*(block.modules for block in blocks))
        self._inner = self._blocks_of.keys() - outer
        for module in outer:
            self._handles += self._attach(module)
        for module in self._blocks_of:
            self._handles += self._guard(module)
        self._hook_inner()
        if any(unit.frees_parameters for unit in units):
            # Dynamo does not guard on hooks: what it compiled before would run without these.
            torch.compiler.reset()
        backwards.on_end.append(unsharder.end_backward)
        unsharder.on_leave.append(self._hook_inner)

    def detach(self) -> None:
        """Take every hook off the user's modules."""
        for handle in self._handles + self._inner_handles:
            handle.remove()
        self._handles.clear()
        self._inner_handles.clear()

    def _attach(self, module: nn.Module) -> list[RemovableHandle]:
        return [
            module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def _guard(self, module: nn.Module) -> list[RemovableHandle]:
        return [
            module.register_state_dict_pre_hook(self._before_state_dict),
            module.register_load_state_dict_pre_hook(self._before_load),
        ]

    def _hook_inner(self) -> None:
        """Inner modules carry hooks as long as something must be gathered or will be freed."""
        is_needed = not self._unsharder.has_everything()
        if is_needed and not self._inner_handles:
            for module in self._inner:
                self._inner_handles += self._attach(module)
        elif not is_needed and self._inner_handles:
            for handle in self._inner_handles:
                handle.remove()
            self._inner_handles.clear()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        blocks = self._blocks_of[module]
        is_outermost = not self._running
        self._running.append(module)
        if not is_outermost and self._is_nested(blocks):
            for block in blocks:
                self._depth[block] += 1
            return
        if self._backwards.observe() == NOT_RUNNING:  # else this is a recompute or a replay
            self._backwards.settle()
            if is_outermost:
                self._unsharder.start_pass(blocks)
        if is_outermost:
            self._inside = {}
            if module not in self._inner:  # whose own second hook is yet to run
                self._hook_inner()
        watches = torch.is_grad_enabled()
        for block in blocks:
            if not self._depth[block]:
                self._uses[block] += 1
                if block in self._unsharder.resident:
                    self._inside[block] = self._uses[block]
                elif watches:
                    # Now, not after: a forward may put its outputs into a dict that it was given.
                    self._watch_inputs(block, args, kwargs)
            self._depth[block] += 1
            self._unsharder.hold(block)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._running or self._running[-1] is not module:
            return  # a hook before ours raised, or this one came while the forward ran
        blocks = self._blocks_of[module]
        self._running.pop()
        for block in blocks:
            self._depth[block] -= 1
        is_nested = self._is_nested(blocks)
        is_outermost = not self._running
        is_near = len(self._running) <= 1
        if torch.is_grad_enabled() and (is_near or not self._stay(blocks)):
            uses = [(block, self._uses[block]) for block in blocks]
            uses += self._inside.items() if is_outermost else ()
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(_BeforeBackward(self, uses))
        if not is_nested:
            for block in blocks:
                self._unsharder.release(block)

    def _is_nested(self, blocks: Sequence[int]) -> bool:
        """A forward around this one holds all of ``blocks`` already."""
        return all(self._depth[block] for block in blocks)

    def _stay(self, blocks: Sequence[int]) -> bool:
        """Nothing of ``blocks`` is freed when their forward ends."""
        resident = self._unsharder.resident
        return all(block in resident or block not in self._freeing for block in blocks)

    def _watch_inputs(self, block: int, args: Any, kwargs: Any) -> None:
        seen = {id(t): t for t in _tensors((args, kwargs)) if t.requires_grad and not t.is_leaf}
        for tensor in seen.values():
            tensor.register_hook(_AfterBackward(self, block, self._uses[block]))

    def before_backward(self, uses: Sequence[tuple[int, int]]) -> None:
        """The gradient of an output is known: the backward of these uses of blocks is next."""
        if current_task() == self._settled_task:
            return
        task = self._backwards.observe_gradient()
        makes_graph = torch.is_grad_enabled()  # create_graph
        for block, use in uses:
            self._unsharder.hold_for_backward(block, use, task)
            if makes_graph:
                self._unsharder.keep(block)
        if not makes_graph and self._unsharder.has_everything():
            self._settled_task = task  # which ends before the scope that keeps everything here

    def after_backward(self, block: int, use: int) -> None:
        """The gradient of an input is known: the backward of this use of ``block`` is over."""
        self._unsharder.release_after_backward(block, use, self._backwards.observe())

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._refuse_freed(module, "state_dict()", "engine.full_state_dict()")

    def _before_load(self, module: nn.Module, *_rest: Any) -> None:
        self._refuse_freed(
            module, "load_state_dict()", "it inside 'with engine.full_parameters():'"
        )

    def _refuse_freed(self, module: nn.Module, call: str, remedy: str) -> None:
        for unit in self._freed[module]:
            if not unit.is_unsharded:
                raise StateError(
                    f"{call} of a sharded module: the parameters of unit {unit.name} are freed on "
                    f"this rank. Call {remedy} on every rank instead."
                )


class _BeforeBackward:
    """Tensor hook on an output. A class, so that no frame of the forward is kept alive."""

    __slots__ = ("_hooks", "_uses")

    def __init__(self, hooks: ModuleHooks, uses: Sequence[tuple[int, int]]) -> None:
        self._hooks = hooks
        self._uses = uses

    def __call__(self, _grad: Tensor) -> None:
        self._hooks.before_backward(self._uses)


class _AfterBackward:
    """Tensor hook on an input."""

    __slots__ = ("_block", "_hooks", "_use")

    def __init__(self, hooks: ModuleHooks, block: int, use: int) -> None:
        self._hooks = hooks
        self._block = block
        self._use = use

    def __call__(self, _grad: Tensor) -> None:
        self._hooks.after_backward(self._block, self._use)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested containers, dataclasses and plain output objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
