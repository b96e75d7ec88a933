"""A job as a user writes it for torchrun: it saves as it goes, and begins where the last save was.

    torchrun --nproc-per-node 4 --max-restarts 2 -m tests.state.restarted PLAN.json

Ranks that the plan names kill themselves; see ``Plan``.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

import onefold
from tests.state.run import Net, told

STEPS = 9


class Plan(NamedTuple):
    """What one job does.

    ``kills`` has a row for each start of the ranks: who dies, in which step, and at which moment of
    it: 0 before the first backward, 1 in the window, 2 before ``step``, 3 after the save.
    """

    folder: str
    stage: int
    kills: list[tuple[int, int, int]]


class Rows(Dataset[Tensor]):
    """48 rows of numbers."""

    def __init__(self) -> None:
        self.rows = torch.randn(48, 5, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def main(plan: Plan, start: int, rank: int) -> dict[str, Any]:
    """Train until step ``STEPS``; what it has come to.

    Args:
        plan: the job's.
        start: how often the ranks have been started before.
        rank: this one's.
    """
    net = Net()
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    engine, _, loader, _ = onefold.initialize(
        model=net,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": plan.stage, "reduce_bucket_size": 40},
        },
        training_data=Rows(),
    )
    assert loader is not None
    torch.manual_seed(100 + rank)
    _, client_state = engine.load_checkpoint(plan.folder)
    for epoch, batch in batches(loader, client_state.get("epoch", 0)):
        with engine.coalesce_grad_reduction():
            for moment, rows in enumerate((batch, batch.flip(0))):
                die_if_planned(plan, start, rank, engine.global_steps, moment)
                engine.backward(engine(rows))
        die_if_planned(plan, start, rank, engine.global_steps, 2)
        engine.step()
        engine.save_checkpoint(
            plan.folder,
            client_state={"epoch": epoch},
            keep_last=3,
            async_save=engine.global_steps % 2 == 0,
        )
        die_if_planned(plan, start, rank, engine.global_steps - 1, 3)
        if engine.global_steps == STEPS:
            break
    result = told(engine)
    engine.destroy()
    return result


def batches(loader: Any, epoch: int) -> Iterator[tuple[int, Tensor]]:
    """Without end, with the number of the epoch."""
    while True:
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch
        epoch += 1


def die_if_planned(plan: Plan, start: int, rank: int, step: int, moment: int) -> None:
    if start < len(plan.kills) and plan.kills[start] == (rank, step, moment):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    content = json.loads(Path(sys.argv[1]).read_text())
    own = Plan(content["folder"], content["stage"], [tuple(row) for row in content["kills"]])
    at = int(os.environ["RANK"])
    found = main(own, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), at)
    Path(sys.argv[1]).with_suffix(f".{at}").write_text(json.dumps(found))
