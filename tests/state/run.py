"""A run to be saved and resumed: its network, its engine, its steps and what it has come to."""

import hashlib
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from onefold.names import persistent_buffers
from tests.harness import RankContext
from tests.rig import start

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}


class Net(nn.Module):
    """Repeated blocks with dropout, transposed weights, a frozen part, buffers and odd sizes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(5, 7)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.3)) for _ in range(3)
        )
        self.frozen = nn.Linear(7, 3)
        self.frozen.requires_grad_(False)
        self.conv = nn.Conv2d(2, 3, (1, 2))
        self.conv.weight = nn.Parameter(
            self.conv.weight.detach().to(memory_format=torch.channels_last)
        )
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().T.clone().T.contiguous().T)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        pooled = (
            self.frozen(hidden).sum()
            + self.conv(hidden[:, None, None, :4].reshape(-1, 2, 1, 2)).square().sum()
        )
        return self.head(hidden).square().mean() + 0.1 * pooled


def make(ctx: RankContext, stage: int, seed: int = 0, **config: Any) -> onefold.Engine:
    net = Net(seed)
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in net.named_parameters() if "frozen" not in n and p.dim() > 1]},
        {
            "params": [p for n, p in net.named_parameters() if "frozen" not in n and p.dim() < 2],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    zero = {"reduce_bucket_size": 40}
    return start(
        ctx, net, stage, optimizer=optimizer, config=config, zero=zero, lr_scheduler=scheduler
    )


def train(ctx: RankContext, engine: onefold.Engine, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        with engine.coalesce_grad_reduction():
            for chunk in range(2):
                data = ctx.data(6, 5, key=10 * step + chunk)
                engine.backward(engine(data.to(engine.plan.model_dtype or torch.float32)))
        engine.step()


def told(engine: onefold.Engine) -> dict[str, Any]:
    """A digest of everything that a step depends on, but how it is cut."""
    weights = engine.full_state_dict()
    raw = repr([(name, weights[name].tolist()) for name in sorted(weights)]).encode()
    buffers = [buffer.tolist() for buffer in persistent_buffers(engine.module).values()]
    return {
        "weights": hashlib.sha256(raw).hexdigest(),
        "buffers": buffers,
        "steps": engine.global_steps,
        "lr": [group["lr"] for group in engine.optimizer.param_groups],
        "scale": engine.loss_scaler.scale,
    }


def whole_states(engine: onefold.Engine) -> dict[str, Tensor]:
    """Every elementwise optimizer state, whole."""
    found = {}
    pieces = engine._stepper.masters.pieces
    for unit in engine._units:
        for key in ("exp_avg", "exp_avg_sq"):
            if unit.index not in pieces:
                continue
            shard = torch.zeros_like(unit.master)
            for index, piece in enumerate(pieces[unit.index]):
                offset, _, numel = unit.piece(index)
                if piece in engine.optimizer.state:
                    shard[offset : offset + numel] = engine.optimizer.state[piece][key]
            flat = unit.gather(shard)
            for slot, view in zip(unit.slots, unit.views_of(flat), strict=True):
                found[f"{slot.name}/{key}"] = view.clone()
    return found


def k_and_m(ctx: RankContext, stage: int, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = make(ctx, stage, **config)
    torch.manual_seed(ctx.rank)  # of the dropout masks
    train(ctx, engine, 0, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 7})
    at = told(engine)
    train(ctx, engine, 3, 3)
    return {"at": at, "end": told(engine)}


def m(ctx: RankContext, stage: int, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = make(ctx, stage, seed=5, **config)
    torch.manual_seed(99)
    path, client_state = engine.load_checkpoint(folder)
    assert path == Path(folder).absolute() / "global_step3"
    assert client_state == {"epoch": 7}
    at = told(engine)
    train(ctx, engine, 3, 3)
    return {"at": at, "end": told(engine)}


@contextmanager
def no_space(rank: int, ctx: RankContext) -> Iterator[None]:
    """Rank ``rank`` cannot write more than a few bytes into a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if ctx.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (400, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
