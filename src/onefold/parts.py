"""Parts: what ``initialize`` built and the engine runs."""

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from onefold.config import Config
from onefold.plan import Plan
from onefold.unit import Unit
from onefold.wire.buffer import Arena
from onefold.wire.collectives import Collectives
from onefold.wire.mesh import World


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an engine is made of; all of it decided."""

    module: nn.Module
    config: Config
    plan: Plan
    world: World
    collectives: Collectives
    arena: Arena
    units: tuple[Unit, ...]
    optimizer: Optimizer
