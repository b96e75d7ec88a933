"""The house rig: gradients that are small exact integers, different on every rank and backward.

Loss = sum of w * x, so the gradient of w is x itself, and with SGD at lr 1 the weight change *is*
minus the gradient. Rank r, backward k uses x = 1 + 10 r + k. See ``expected``.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from tests.harness import RankContext

STAGES = [0, 1, 2, 3]
TRANSPORT = "ONEFOLD_TESTS_TRANSPORT"
"""Variable that names the transport of engines whose test does not ask for one."""


class House(nn.Module):
    """One weight vector ``[numel]``; returns a scalar."""

    def __init__(self, numel: int = 7, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, x: float) -> Tensor:
        return (self.w * x).sum()


class Tower(nn.Module):
    """Blocks for stage 3: an embedding, repeated layers, a head; root parameters around them."""

    def __init__(self, width: int = 6, layers: int = 3, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T]`` token numbers -> ``[B]``."""
        hidden = self.embed(tokens).mean(dim=1)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(self.norm(hidden)).squeeze(-1)


def x_of(rank: int, k: int) -> float:
    """What rank ``rank`` feeds to backward ``k``, which is also its gradient."""
    return 1.0 + 10.0 * rank + k


def expected(
    world_size: int, backwards: int | Iterable[Iterable[int]], divisor: float = 1
) -> float:
    """The averaged gradient; ``backwards`` may list each rank's own k."""
    if isinstance(backwards, int):
        backwards = [range(backwards)] * world_size
    total = sum(x_of(rank, k) for rank, own in enumerate(backwards) for k in own)
    return total / (world_size * divisor)


def start(
    ctx: RankContext,
    module: nn.Module,
    stage: int,
    *,
    optimizer: Any = None,
    config: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **arguments: Any,
) -> onefold.Engine:
    """An engine over ``module``; SGD at lr 1 unless told otherwise; destroyed after the test.

    ``zero`` goes into the config's ``zero_optimization`` section, ``config`` beside it.
    """
    settings = {"zero_optimization": {"stage": stage, **(zero or {})}, **(config or {})}
    transport = {"transport": os.environ.get(TRANSPORT, "auto")}
    settings["onefold"] = transport | settings.get("onefold", {})
    if optimizer is None and "optimizer" not in settings:
        optimizer = lambda params: torch.optim.SGD(params, lr=1.0)  # noqa: E731
    engine = onefold.initialize(
        model=module, optimizer=optimizer, config=settings, **arguments
    ).engine
    ctx.cleanup(engine.destroy)
    return engine


def weights(engine: onefold.Engine) -> dict[str, Tensor]:
    """The full weights, on the CPU of every rank."""
    return engine.full_state_dict()


def assert_change(engine: onefold.Engine, gradient: float, start_value: float = 0.0) -> None:
    """The house rig's weights moved by exactly minus ``gradient``."""
    w = weights(engine)["w"]
    wanted = torch.full_like(w, start_value - gradient)
    assert torch.equal(w, wanted), f"weights {w.tolist()}, expected {wanted[:1].tolist()} each"


def gathered(value: Any) -> list[Any]:
    """Every rank's ``value``, over the harness's own process group."""
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_ranks_equal(engine: onefold.Engine) -> None:
    """Bit-equal parameters on all ranks, as each rank's own forward would read them."""
    with engine.full_parameters():
        own = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    for rank, other in enumerate(gathered(own)):
        for name, tensor in own.items():
            assert torch.equal(tensor, other[name]), f"{name} differs on rank {rank}"


def counts(engine: onefold.Engine, mark: Any) -> dict[str, int]:
    """Data collectives since ``mark = engine.ledger.mark()``, by kind."""
    return {kind: total.count for kind, total in engine.ledger.since(mark).items()}
