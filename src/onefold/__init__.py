"""onefold: a ZeRO-0/1/2/3 engine for training steps that contain many backward passes.

    with engine.coalesce_grad_reduction():
        for chunk in chunks:
            engine.backward(loss_of(chunk))
    engine.step()

Importing does no work.
"""

from onefold.config import Config
from onefold.engine import Engine
from onefold.errors import CheckpointError, RankMismatchError, StateError, WindowAborted
from onefold.grad.window import GradWindow
from onefold.initialize import initialize

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Config",
    "Engine",
    "GradWindow",
    "RankMismatchError",
    "StateError",
    "WindowAborted",
    "__version__",
    "initialize",
]
