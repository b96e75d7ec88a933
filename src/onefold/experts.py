"""Experts: modules whose parameters are different ones on each rank of a mesh axis.

Data parallelism holds every parameter on every rank. Below an ``ExpertParallel`` it does not: rank
p of the axis holds the experts that only it (and its replicas) computes with, and rows of the batch
travel to them. The mark is a module of the tree, so whatever keeps the tree keeps the mark: a deep
copy, a pickle, ``state_dict``, the meta device, activation checkpointing.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onefold.errors import StateError
from onefold.wire.all_to_all import AllToAll
from onefold.wire.grid import ReduceGroup

DEFAULT_AXIS = "expert"


class ExpertParallel(nn.Module):
    """Says that the parameters of ``experts`` are different ones on each rank of a mesh axis.

    A layer of one's own becomes expert-parallel by holding its experts in one of these and sending
    their input and output through ``all_to_all.exchange``; ``onefold.moe.MoE`` is such a layer.

    A gradient of an expert is summed over the ranks that hold this expert (the data-parallel ranks
    at the same place of the axis) and divided by the number of *all* data-parallel ranks, like any
    other: what came through the exchange is already the sum over the ranks of the axis. So the loss
    is written as the mean over a rank's own batch, as always, and the gradient is that of the mean
    over ranks.

    Args:
        experts: what this rank holds, or ``NumberedExperts``: all of them, of which
            ``keep_local`` leaves this rank's.
        size: number of ranks on the axis; a divisor of the number of data-parallel ranks.
        axis: the axis's name. Modules with the same name and size share one exchange.

    Attributes:
        experts: the module.
        size: as given.
        axis: as given.

    Raises:
        ValueError: ``size`` is below 1, or does not divide the number of ``NumberedExperts``.
    """

    def __init__(self, experts: nn.Module, *, size: int, axis: str = DEFAULT_AXIS) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"ExpertParallel(size=): expected at least 1 rank, got {size}.")
        if isinstance(experts, NumberedExperts) and experts.total % size:
            raise ValueError(
                f"ExpertParallel(size={size}): expected a divisor of the {experts.total} experts, "
                "because every rank holds equally many. Change one of the two."
            )
        self.experts = experts
        self.size = size
        self.axis = axis
        self._all_to_all: AllToAll | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``experts``, which are this rank's; nothing is exchanged here."""
        return self.experts(*args, **kwargs)

    @property
    def all_to_all(self) -> AllToAll:
        """The exchange with the other ranks of the axis.

        Raises:
            StateError: the axis has several ranks and the module is not under an engine.
        """
        if self._all_to_all is not None:
            return self._all_to_all
        if self.size == 1:
            return AllToAll(0, 1)
        raise StateError(
            f"ExpertParallel: the experts lie on {self.size} ranks of the axis {self.axis!r} that "
            "are not connected. Call onefold.initialize(model=...) on every rank before the first "
            "forward; a copy or an unpickled module has to go through it, too."
        )

    def connect(self, all_to_all: AllToAll) -> None:
        """Use ``all_to_all``, and keep the experts of its rank; an engine calls this.

        Raises:
            ValueError: it is over another number of ranks.
            StateError: see ``keep_local``.
        """
        if all_to_all.size != self.size:
            raise ValueError(
                f"ExpertParallel.connect(): expected an exchange of {self.size} ranks, got "
                f"{all_to_all.size}."
            )
        self.keep_local(all_to_all.rank)
        self._all_to_all = all_to_all

    def disconnect(self) -> None:
        """Forget the exchange, which belongs to the engine."""
        self._all_to_all = None

    def foreign(self, rank: int) -> list[nn.Parameter]:
        """The parameters that ``keep_local(rank)`` would drop; take them out of the optimizer."""
        if not isinstance(self.experts, NumberedExperts):
            return []
        return list(self.experts.foreign(rank, self.size))

    def keep_local(self, rank: int) -> None:
        """Drop the experts of the other ranks of the axis; nothing to do if that is done.

        Args:
            rank: this rank's place on the axis.

        Raises:
            StateError: this rank's experts were dropped before, for another rank.
        """
        if isinstance(self.experts, NumberedExperts):
            self.experts.keep(rank, self.size)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of the mark."""
        return f"size={self.size}, axis={self.axis!r}"

    def __getstate__(self) -> dict[str, Any]:
        # For copies and pickles: a connection belongs to one engine of one process.
        return {**self.__dict__, "_all_to_all": None}


class NumberedExperts(nn.ModuleDict):
    """Experts of one layer under their numbers in the whole layer.

    Every rank builds all of them, so that start values do not depend on how many ranks there are;
    ``keep`` leaves experts ``[p * total / size, (p + 1) * total / size)`` on rank p. Names in
    ``state_dict`` stay as they were: the union over the ranks of the axis is the whole layer.

    Args:
        experts: modules of their own, which map ``[rows, H]`` to ``[rows, H]``.

    Attributes:
        total: number of experts in the whole layer.

    Raises:
        ValueError: there is none, or two of them share a parameter.
    Memory: all experts until ``keep``; build large ones on the meta device.
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__({str(number): expert for number, expert in enumerate(experts)})
        self.total = len(self)
        if not self.total:
            raise ValueError("NumberedExperts: expected at least one expert, got none.")
        owner: dict[nn.Parameter, str] = {}
        for number, expert in self.items():
            for param in expert.parameters():
                if owner.setdefault(param, number) != number:
                    raise ValueError(
                        f"experts {owner[param]} and {number} share a parameter of shape "
                        f"{tuple(param.shape)}; expected experts of their own. Make a new module "
                        "for each."
                    )

    def forward(self, rows: Tensor) -> Tensor:
        """Run every expert that is here, each on its own rows.

        Experts run also where all their rows are padding, so that every parameter gets a gradient.

        Args:
            rows: ``[experts here, R, H]``, in the order of their numbers.

        Returns:
            The same shape.

        Raises:
            ValueError: the input is for another number of experts, or an expert changed the shape.
        """
        if rows.shape[0] != len(self):
            raise ValueError(
                f"NumberedExperts: expected rows for the {len(self)} experts {list(self)}, got "
                f"shape {tuple(rows.shape)}."
            )
        outputs = []
        for (number, expert), own in zip(self.items(), rows.unbind(), strict=True):
            output = expert(own)
            if output.shape != own.shape:
                raise ValueError(
                    f"expert {number} ({type(expert).__name__}): expected an output of the shape "
                    f"of its input, {tuple(own.shape)}, got {tuple(output.shape)}."
                )
            outputs.append(output)
        return torch.stack(outputs)

    def foreign(self, rank: int, size: int) -> Iterator[nn.Parameter]:
        """The parameters that ``keep(rank, size)`` would drop."""
        kept = self._numbers_of(rank, size)
        for number, expert in self.items():
            if number not in kept:
                yield from expert.parameters()

    def keep(self, rank: int, size: int) -> None:
        """Drop the experts that are not those of ``rank`` among ``size`` ranks.

        Raises:
            StateError: some of this rank's are not here.
        """
        kept = self._numbers_of(rank, size)
        missing = [number for number in kept if number not in self]
        if missing:
            raise StateError(
                f"NumberedExperts: place {rank} of {size} holds experts {kept}, but {missing} were "
                f"dropped before; here are {list(self)}. Build the model anew for another mesh."
            )
        for number in [number for number in self if number not in kept]:
            del self[number]

    def _numbers_of(self, rank: int, size: int) -> list[str]:
        each = self.total // size
        return [str(number) for number in range(rank * each, (rank + 1) * each)]


def expert_parallel_modules(module: nn.Module) -> list[tuple[str, ExpertParallel]]:
    """Every ``ExpertParallel`` of a model with its name, in registration order.

    Raises:
        ValueError: one lies in another, or an expert's parameter is also one outside, which would
            have to be equal on all ranks and different on each.
    """
    found = [(name, m) for name, m in module.named_modules() if isinstance(m, ExpertParallel)]
    inside: dict[nn.Parameter, tuple[str, str, int]] = {}
    for name, marked in found:
        for path, child in marked.named_modules():
            if child is not marked and isinstance(child, ExpertParallel):
                raise ValueError(
                    f"{name or 'the model'} is an ExpertParallel that contains another, "
                    f"{path}; expected them side by side, because a parameter is reduced over the "
                    "ranks of one axis. Take the inner one out."
                )
        if marked.size > 1:
            for param in marked.parameters():
                mark = inside.setdefault(param, (name, marked.axis, marked.size))
                if mark[1:] != (marked.axis, marked.size):
                    raise ValueError(_tied(mark[0], name))
    for name, param in _outside("", module):
        if param in inside:
            raise ValueError(_tied(inside[param][0], name))
    return found


def reduce_groups_of(module: nn.Module) -> dict[int, ReduceGroup]:
    """The reduce group of every expert's parameter and buffer, by ``id``; the others are dense."""
    return {
        id(tensor): ReduceGroup(experts.axis, experts.size)
        for _, experts in expert_parallel_modules(module)
        for tensor in (*experts.parameters(), *experts.buffers())
        if experts.size > 1
    }


def _outside(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are reached without entering an ``ExpertParallel`` over several ranks."""
    if isinstance(module, ExpertParallel) and module.size > 1:
        return
    prefix = f"{name}." if name else ""
    for own, param in module._parameters.items():
        if param is not None:
            yield f"{prefix}{own}", param
    for own, child in module._modules.items():
        if child is not None:
            yield from _outside(f"{prefix}{own}", child)


def _tied(first: str, second: str) -> str:
    return (
        f"a parameter of the ExpertParallel {first or 'model'} is shared with {second}; expected "
        "parameters of its own, because they differ between the ranks of its axis. Untie the two."
    )
