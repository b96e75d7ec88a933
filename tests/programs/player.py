"""What one rank does with a program: its own side of it, on a real engine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.grad.window import GradWindow
from tests.harness import RankContext
from tests.programs.drawn import Op, Setting
from tests.rig import start

SIZES = (5, 1, 19, 3)  # of the four parameters; the last two are in blocks of their own


class Branch(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel))

    def forward(self, total: Tensor, x: float) -> Tensor:
        return total + (self.w * x).sum()


class Branches(nn.Module):
    """Four parameters, any subset of which a forward uses; two may be recomputed in backward."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.root = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in SIZES[:2])
        self.layers = nn.ModuleList([Branch(SIZES[2]), Branch(SIZES[3])])
        self._recompute = recompute

    def forward(self, mask: int, x: float) -> Tensor:
        total = torch.zeros((), dtype=self.root[0].dtype, requires_grad=True) * 1.0
        for bit, param in enumerate(self.root):
            if mask >> bit & 1:
                total = total + (param * x).sum()
        for bit, layer in enumerate(self.layers, start=2):
            if mask >> bit & 1:
                total = self._run(layer, total, x)
        return total

    def _run(self, layer: nn.Module, total: Tensor, x: float) -> Tensor:
        if self._recompute == "none":
            return layer(total, x)
        return checkpoint(layer, total, x, use_reentrant=self._recompute == "reentrant")


class OnPurpose(Exception):
    pass


@dataclass
class Player:
    engine: onefold.Engine
    setting: Setting
    rank: int
    depth: int = 0
    outcomes: list[Any] = field(default_factory=list)

    def play(self, ops: list[Op]) -> None:
        for op in ops:
            getattr(self, op[0])(*op[1:])

    def backward(self, k: int, masks: tuple[int, ...], api: str, wild: Any) -> None:
        mask = masks[self.rank]
        if not mask:
            return
        x = self.setting.x(self.rank, k)
        if wild is not None and self.rank in wild[1]:
            x = self._wild(wild[0])
        loss = self.engine(mask, x)
        if api == "engine":
            self.engine.backward(loss)
        else:
            run_backward(self.engine.scale(loss), api)

    def _wild(self, kind: str) -> float:
        if kind == "overflow" and self.setting.precision.is_scaled:
            return 2.0**16 / self.engine.loss_scaler.scale  # finite, until it is scaled in fp16
        return float("nan" if kind == "nan" else "inf")

    def unscaled(self, k: int, masks: tuple[int, ...], api: str) -> None:
        mask = masks[self.rank]
        if not mask:
            return
        loss = self.engine(mask, self.setting.x(self.rank, k))
        with pytest.raises(onefold.StateError, match="not scaled"):
            run_backward(loss, api)

    def window(self, declared: int | None, body: list[Op]) -> None:
        self._scope(self.engine.coalesce_grad_reduction(backwards=declared), body)

    def across(self, _: None, body: list[Op]) -> None:
        self._scope(self.engine.coalesce_grad_reduction(across="replicate"), body)

    def budget(self, rung: int, body: list[Op]) -> None:
        """A rung by its number: of so few blocks ``max_bytes`` would always keep everything."""
        scopes = self.engine._transaction
        if not self.engine.plan.home.shards_gradients:
            self._scope(self.engine.coalesce_grad_reduction(max_bytes=1), body)
            return
        ladder = scopes.budget.ladder()
        kept = replace(ladder[rung % len(ladder)].kept, max_bytes=1 + rung)
        self._scope(GradWindow(scopes.open, scopes.close, kept, None), body)

    def no_sync(self, _: None, body: list[Op]) -> None:
        self._scope(self.engine.no_sync(), body)

    def _scope(self, scope: Any, body: list[Op]) -> None:
        self.depth += 1
        try:
            with scope:
                self.play(body)
        except (onefold.WindowAborted, OnPurpose):
            if self.depth == 1:
                self.outcomes.append("aborted")
        finally:
            self.depth -= 1

    def fail(self, ranks: tuple[int, ...]) -> None:
        if self.rank in ranks:
            raise OnPurpose

    def zero(self, api: str) -> None:
        if api == "engine":
            self.engine.zero_grad()
        elif api == "optimizer":
            self.engine.optimizer.zero_grad()
        else:
            self.engine.module.zero_grad()

    def forget(self, bit: int) -> None:
        list(self.engine.module.parameters())[bit].grad = None

    def boundary(self, flag: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(flag)

    def reduce(self) -> None:
        if self._goes_through(self.engine.reduce_gradients):
            self.outcomes.append("reduced")

    def _goes_through(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except onefold.StateError as error:
            is_aborted = "after an aborted window" in str(error)
            self.outcomes.append("refused" if is_aborted else "zero_grad wanted")
            self.engine.zero_grad()
            return False
        return True

    def step(self) -> None:
        engine = self.engine
        if self._goes_through(engine.step):
            self.outcomes.append("applied" if engine.was_step_applied() else "not applied")
        state = {
            name: tensor.unique().tolist() for name, tensor in engine.full_state_dict().items()
        }
        with engine.full_parameters():  # raises if ranks differ
            for name, param in engine.module.named_parameters():
                assert param.unique().tolist() == state[name], name
        self.outcomes.append(state)
        counts = engine.global_steps, engine.skipped_steps, engine.loss_scaler.scale
        self.outcomes.append(counts)


def run_backward(loss: Tensor, api: str) -> None:
    if api == "loss":
        loss.backward()
    elif api == "tensor":
        loss[None].backward(torch.ones(1, dtype=loss.dtype))
    else:
        torch.autograd.backward([loss])


def run(ctx: RankContext, setting: Setting, program: list[Op]) -> list[Any]:
    """One rank's outcomes: of every step, and of every outermost window that was aborted."""
    arguments: dict[str, Any] = {}
    if ctx.world_size == 4:
        arguments["mesh"] = ctx.device_mesh(2, 2, names=("replicate", "shard"))
    model = Branches(setting.recompute)
    if setting.precision_name == "fp64":
        model.double()
    engine = start(
        ctx, model, setting.stage, config=setting.config(), zero=setting.zero(), **arguments
    )
    player = Player(engine, setting, ctx.rank)
    player.play(program)
    return player.outcomes
