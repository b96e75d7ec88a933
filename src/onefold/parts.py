"""Parts: what ``initialize`` built and the engine runs."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchdata.stateful_dataloader import StatefulDataLoader

from onefold.config import Config
from onefold.experts import expert_parallel_modules
from onefold.plan import Plan
from onefold.unit import Unit
from onefold.wire.all_to_all import AllToAll, connect
from onefold.wire.buffer import Arena
from onefold.wire.collectives import Collectives
from onefold.wire.ledger import Ledger
from onefold.wire.mesh import World, leave_world


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an engine is made of; all of it decided."""

    module: nn.Module
    config: Config
    plan: Plan
    world: World
    ledger: Ledger
    wires: tuple[Collectives, ...]
    """One per reduce group; the first is that of dense parameters."""
    exchanges: tuple[AllToAll, ...]
    """One per axis of experts, for their inputs and outputs."""
    arena: Arena
    units: tuple[Unit, ...]
    optimizer: Optimizer
    dataloader: "StatefulDataLoader[Any] | None"
    """Whose place in the data is saved; None where the caller keeps its own."""

    connected: list[AllToAll] = field(default_factory=list)
    """Made by ``connect``."""

    @property
    def mean_over(self) -> int:
        """What the sum of gradients over ranks is divided by."""
        return self.world.size if self.config.gradient_allreduce_op == "mean" else 1

    def connect(self) -> AllToAll:
        """An all-to-all of all data-parallel ranks, in the order of the control group.

        Communication: group creation; every rank calls it.
        """
        exchange = connect(tuple(sorted(self.world.ranks)), self.config.timeout_s, self.ledger)
        self.connected.append(exchange)
        return exchange

    def disconnect(self) -> None:
        """Free the groups."""
        for wire in self.wires:
            wire.mesh.destroy()
        for _, experts in expert_parallel_modules(self.module):
            experts.disconnect()
        for exchange in (*self.exchanges, *self.connected):
            exchange.destroy()
        leave_world(self.world)
