"""Experts and offloaded states, at other world sizes and expert sizes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onefold.moe import MoE
from tests.harness import RankContext, pool_for
from tests.rig import start


class Sparse(nn.Module):
    """A dense layer and four experts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(4, 4)
        self.moe = MoE(4, lambda: nn.Linear(4, 4), 4, ep_size=size)

    def forward(self, x: Tensor) -> Tensor:
        out, balance, _ = self.moe(self.dense(x))
        return out.square().mean() + balance


def experts(
    ctx: RankContext, folder: str, stage: int, size: int, trains: bool, config: dict[str, Any]
) -> dict[str, Any]:
    net = Sparse(size)
    zero = config if stage == 3 else {}
    engine = start(ctx, net, stage, optimizer=partial(torch.optim.AdamW, lr=0.1), zero=zero)
    if trains:
        for key in range(2):
            engine.backward(engine(ctx.data(8, 4, key=key)))
            engine.step()
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return {name: tensor.tolist() for name, tensor in engine.full_state_dict().items()}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, 2, 2), (2, 2, 2)),
        ((2, 2, 2), (1, 3, 1)),
        ((4, 3, 2), (4, 1, 4)),
        ((1, 0, 1), (4, 3, 2)),
    ],
)
def test_experts_and_offload(
    tmp_path: Path, saved: tuple[int, int, int], loaded: tuple[int, int, int]
) -> None:
    """(world size, stage, ranks that share the experts); offloaded at stage 3."""
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    results = [
        pool_for(world_size).run(
            experts, folder=str(tmp_path), stage=stage, size=size, trains=trains, config=offload
        )
        for (world_size, stage, size), trains in ((saved, True), (loaded, False))
    ]
    assert all(one == results[0][0] for one in results[1])
