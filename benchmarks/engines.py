"""Engines: what is measured. Each is built, runs steps of n backwards, and is destroyed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cell import EngineName
from benchmarks.workloads import Workload
from onefold.wire.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Setting:
    """What an engine is built from.

    Attributes:
        stage: of ZeRO; None for engines without stages.
        num_backwards: the most that a step will have.
    """

    workload: Workload
    rank: int
    world_size: int
    stage: int | None
    num_backwards: int
    dtype: torch.dtype
    transport: str


class Engine(ABC):
    """One model under one way of data parallelism.

    Attributes:
        ledger: counts every collective; None where the engine keeps none.
    """

    ledger: Ledger | None = None

    @abstractmethod
    def step(self, num_backwards: int) -> float:
        """Run the backwards and the optimizer step; this rank's loss before it."""

    @abstractmethod
    def destroy(self) -> None:
        """Free groups and hooks."""

    def expected_bytes(self, num_backwards: int) -> int | None:
        """What a rank sends in a step, by the formula; None where none is claimed."""
        return None

    def table_bytes(self) -> int | None:
        """Peak of parameters, gradients and optimizer; None where nobody has added it up."""
        return None


def make_optimizer(params: Iterable[Any], workload: Workload) -> torch.optim.Optimizer:
    """The same for every engine."""
    return torch.optim.AdamW(params, lr=workload.learning_rate, weight_decay=0.0, fused=True)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What the optimizer gets."""
    return [param for param in model.parameters() if param.requires_grad]


class Floor(Engine):
    """The compute floor: the same passes and this rank's share of the optimizer's work, no wire.

    Gradients are accumulated into buffers that stay, the cheapest way there is. Only this rank's
    share of the weights moves, so the model is not trained.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._model = setting.workload.model().to(setting.dtype)
        pieces = []
        for param in trainable(self._model):
            param.grad = torch.zeros_like(param)
            begin = param.numel() * setting.rank // setting.world_size
            end = param.numel() * (setting.rank + 1) // setting.world_size
            piece = nn.Parameter(param.detach().view(-1)[begin:end])
            piece.grad = param.grad.view(-1)[begin:end]
            pieces.append(piece)
        self._optimizer = make_optimizer(pieces, setting.workload)

    def step(self, num_backwards: int) -> float:
        total = 0.0
        for loss_of in losses(self._setting, self._model, num_backwards):
            loss = loss_of()
            loss.backward()
            total += loss.item()
        self._optimizer.step()
        for param in trainable(self._model):
            assert param.grad is not None
            param.grad.zero_()
        return total

    def expected_bytes(self, num_backwards: int) -> int | None:
        return 0

    def table_bytes(self) -> int | None:
        params = list(self._model.parameters())
        grads = [param.grad for param in params if param.grad is not None]
        moments = 2 * sum(grad.nbytes for grad in grads) // self._setting.world_size
        return sum(tensor.nbytes for tensor in (*params, *grads)) + moments

    def destroy(self) -> None:
        del self._model, self._optimizer


def losses(
    setting: Setting, model: nn.Module, num_backwards: int, rank: int | None = None
) -> Iterable[Callable[[], Tensor]]:
    """The step's losses on this rank's data, or on that of ``rank``."""
    rank = setting.rank if rank is None else rank
    return setting.workload.losses(model, rank, num_backwards, setting.dtype)


def reference(setting: Setting, num_backwards: int) -> list[float]:
    """This rank's losses of two steps in one process, on the gradients of all ranks' data."""
    model = setting.workload.model()
    optimizer = make_optimizer(trainable(model), setting.workload)
    found: list[float] = []
    for rank in range(setting.world_size):
        for loss_of in losses(setting, model, num_backwards, rank):
            loss = loss_of()
            (loss / setting.world_size).backward()
            found += [loss.item()] if rank == setting.rank else []
    first = sum(found)
    optimizer.step()
    # GradCache losses run a backward when they are asked for one only, so no gradient is needed.
    second = sum(loss_of().item() for loss_of in losses(setting, model, num_backwards))
    return [first, second]


def build(name: EngineName, setting: Setting) -> Engine:
    """The engine of that name, on all ranks together."""
    from benchmarks import own, peers

    makers: dict[str, Callable[[Setting], Engine]] = {
        "floor": Floor,
        "wire_floor": own.WireFloor,
        "bare": lambda setting: own.Onefold(setting, "bare"),
        "window": lambda setting: own.Onefold(setting, "window"),
        "armed": lambda setting: own.Onefold(setting, "armed"),
        "ddp": lambda setting: peers.Ddp(setting, defers=False),
        "ddp_no_sync": lambda setting: peers.Ddp(setting, defers=True),
        "fsdp2": lambda setting: peers.Fsdp2(setting, defers=False),
        "fsdp2_deferred": lambda setting: peers.Fsdp2(setting, defers=True),
        "deepspeed": lambda setting: peers.DeepSpeed(setting, coalesces=False),
        "deepspeed_coalesced": lambda setting: peers.DeepSpeed(setting, coalesces=True),
    }
    assert dist.is_initialized()
    return makers[name.name](setting)
