"""Ranks on GPUs, and a model whose gradients come late, for the cases about streams.

The harness's pools stay on the CPU, so every rank is a process of its own here. With a GPU per rank
the data group is NCCL's; where there are fewer, all ranks share the first one and gloo carries CUDA
tensors (NCCL refuses two ranks on one device). Both order a collective after the stream that is
current when it starts, and that is what the cases are about.

The same bodies run on the CPU, where streams are nothing, so that their numbers are known to fit.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import onefold
from benchmarks.streams import Late, on_side
from tests import rig
from tests.cases.modes import assert_num_reductions, during, num_units, scope
from tests.harness import RankContext

WORLD_SIZE, NUM_ROOMS, NUMEL, STEPS, BACKWARDS = 2, 8, 1 << 16, 3, 2
MODES = ["bare", "armed", "window", "no_sync"]
"""The first two reduce while backward runs, the others do not."""

Body = Callable[[RankContext], None]


def run_on_gpus(body: Body, folder: Path) -> None:
    """Call ``body(ctx)`` in ``WORLD_SIZE`` processes; ``ctx.device`` is the rank's GPU.

    Raises:
        ProcessRaisedException: of the first rank that failed, with its traceback.
    """
    spawn(_rank, args=(body, (folder / "rendezvous").as_uri()), nprocs=WORLD_SIZE)


def _rank(rank: int, body: Body, rendezvous: str) -> None:
    has_own = torch.cuda.device_count() >= WORLD_SIZE
    device = torch.device("cuda", rank if has_own else 0)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_own else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=120),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        ctx = RankContext(rank, WORLD_SIZE, stack)
        ctx.device = device
        body(ctx)
        torch.cuda.synchronize()


class LateRoom(nn.Module):
    """Half of the sum of ``w * w * x``: the gradient is ``w * x``, so backward reads the weight."""

    def __init__(self, device: torch.device, is_on_side: bool, numel: int) -> None:
        super().__init__()
        self.is_on_side = is_on_side
        self.w = nn.Parameter(torch.ones(numel, device=device))

    def forward(self, x: float) -> Tensor:
        with on_side(self.w.device, self.is_on_side):
            weight: Tensor = Late.apply(self.w)
            loss = (weight * weight * (0.5 * x)).sum()
        if loss.is_cuda:
            loss.record_stream(torch.cuda.current_stream())
        return loss


class LateRooms(nn.Module):
    """Repeated blocks; every other one runs on the side stream if ``alternates``.

    Args:
        device: of the weights.
        alternates: use two streams in one forward, and so in one unit's gradients.
        between: called with the loss of each room, to put something into the graph.
        numel: of a room.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        alternates: bool = False,
        between: Callable[[Tensor], Tensor] | None = None,
        numel: int = NUMEL,
    ) -> None:
        super().__init__()
        self.between = between
        self.rooms = nn.ModuleList(
            LateRoom(device, alternates and index % 2 == 0, numel) for index in range(NUM_ROOMS)
        )

    def forward(self, x: float) -> Tensor:
        total = torch.zeros((), device=self.rooms[0].w.device)  # type: ignore[arg-type]
        for index, room in enumerate(self.rooms):
            loss = room((index + 1) * x)
            total = total + (loss if self.between is None else self.between(loss))
        return total


def assert_exact(engine: onefold.Engine, steps: int) -> None:
    """With SGD at lr 1 a weight is multiplied by 1 - 13 (i + 1) in every step: small integers."""
    mean = rig.expected(WORLD_SIZE, BACKWARDS)
    for name, tensor in rig.weights(engine).items():
        index = int(name.split(".")[1])
        wanted = torch.full_like(tensor, (1 - mean * (index + 1)) ** steps)
        assert torch.equal(tensor, wanted), f"{name}: {tensor.unique()[:5]} not {wanted[0]}"


def train(
    ctx: RankContext,
    *,
    alternates: bool = False,
    backward_on_side: bool = False,
    between: Callable[[Tensor], Tensor] | None = None,
    numel: int = NUMEL,
    stages: Sequence[int] = rig.STAGES,
) -> None:
    """Every ZeRO stage in every mode: the same exact weights, overlap on or off."""
    # Two rooms in a unit at stages 0-2, so that one unit is filled from both streams.
    zero = {"reduce_bucket_size": 2 * numel}
    for stage in stages:
        for mode in MODES:
            with during(f"stage {stage}", mode):
                model = LateRooms(ctx.device, alternates=alternates, between=between, numel=numel)
                engine = rig.start(ctx, model, stage, zero=zero)
                for step in range(1, STEPS + 1):
                    mark = engine.ledger.mark()
                    with on_side(ctx.device, backward_on_side), scope(engine, mode, BACKWARDS):
                        for k in range(BACKWARDS):
                            engine.backward(engine(rig.x_of(ctx.rank, k)))
                    engine.step()
                    times = BACKWARDS if mode == "bare" and stage >= 2 else 1
                    assert_num_reductions(engine, stage, mark, times * num_units(engine))
                    assert_exact(engine, step)
                rig.assert_ranks_equal(engine)
