"""A stage of ``torch.distributed.pipelining`` whose data-parallel copies are one engine.

Four ranks, two pipeline stages times two replicas. The schedule runs the microbatches' backwards;
the window around ``schedule.step`` makes one reduction per unit of them. ``PipelineStage`` is given
``engine.module``: it reads ``parameters()`` and ``modules()``, which an engine does not have.

A schedule that scales gradients (``scale_grads``, its default) divides every `.grad` after the last
backward. That needs gradients that are still pending: a plain window, or ZeRO stages 0-1. Armed, or
bare at ZeRO stages 2-3, they have left by then, so the loss is scaled instead.
Dividing a bound, empty gradient counts as touching it, so a pipeline stage with unused parameters
scales the loss, too, if its optimizer has weight decay or momentum.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import onefold
from tests import rig
from tests.cases.modes import assert_num_reductions, assert_traffic, num_units, scope, usual
from tests.harness import RankContext, distributed

MICROBATCHES, ROWS, TOKENS, WIDTH, STEPS = 4, 2, 3, 6, 2
TINY = {"reduce_bucket_size": 1}
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
RATE = 0.125
"""A power of two, so that the update itself does not round the product."""


class Half(nn.Module):
    """One pipeline stage: repeated layers, and a root parameter before (first) or after (last)."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.embed = nn.Embedding(11, WIDTH) if index == 0 else None
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1) if index == 1 else None
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        """First: ``[B, T]`` token numbers -> ``[B, width]``; last: ``[B, width]`` -> ``[B]``."""
        if self.embed is not None:
            hidden = self.embed(hidden).mean(dim=1)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden if self.head is None else self.head(hidden).squeeze(-1)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """What ``scale_grads=True`` divides by the number of microbatches."""
    return (output - target).square().mean()


def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
    """The same, divided beforehand."""
    return mean_loss(output, target) / MICROBATCHES


class Pipe(NamedTuple):
    """This rank's place in the 2 x 2 mesh, and what runs there."""

    half: int
    """Which pipeline stage."""
    replica: int
    mesh: DeviceMesh
    engine: onefold.Engine
    schedule: Any

    @property
    def is_last(self) -> bool:
        return self.half == 1

    def step(self, ctx: RankContext, key: int) -> None:
        """All microbatches of this replica through the pipeline, forward and backward."""
        tokens, targets = batch(ctx, self.replica, key)
        if self.is_last:
            self.schedule.step(target=targets)
        else:
            self.schedule.step(tokens)


def batch(ctx: RankContext, replica: int, key: int) -> tuple[Tensor, Tensor]:
    """One replica's tokens ``[M * B, T]`` and targets ``[M * B]``; its two ranks agree on them."""
    rows = MICROBATCHES * ROWS
    numbers = ctx.data(rows, TOKENS, key=2 * key, rank=replica, dtype=torch.float64)
    targets = ctx.data(rows, key=2 * key + 1, rank=replica, dtype=torch.float64)
    return (numbers.abs() * 97).long() % 11, targets


def make_mesh(ctx: RankContext) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for name in ("pp", "dp"):
        ctx.cleanup(dist.destroy_process_group, mesh[name].get_group())
    return mesh


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE)


def build(
    ctx: RankContext,
    stage: int,
    schedule: str,
    *,
    scales: bool,
    is_static: bool = True,
    module: nn.Module | None = None,
) -> Pipe:
    """Args: ``scales`` is the schedule's ``scale_grads``; not static lets it infer the shapes."""
    mesh = make_mesh(ctx)
    index, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    module = module or Half(index)
    engine = rig.start(ctx, module, stage, zero=TINY, optimizer=sgd, mesh=mesh["dp"])
    shapes: dict[str, Any] = {}
    if is_static:
        hidden = torch.empty(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
        first = torch.empty(ROWS, TOKENS, dtype=torch.long)
        last = torch.empty(ROWS, dtype=torch.float64, requires_grad=True)
        shapes = {
            "input_args": hidden if index else first,
            "output_args": last if index else hidden,
        }
    pipe = PipelineStage(
        engine.module, index, 2, ctx.device, group=mesh["pp"].get_group(), **shapes
    )
    made = SCHEDULES[schedule](
        pipe,
        n_microbatches=MICROBATCHES,
        loss_fn=mean_loss if scales else scaled_loss,
        scale_grads=scales,
    )
    return Pipe(index, replica, mesh, engine, made)


class Whole:
    """The whole model in one process, on the whole batch of both replicas."""

    def __init__(self) -> None:
        self.halves = nn.ModuleList([Half(0), Half(1)])
        self.optimizer = sgd(self.halves.parameters())

    def backward(self, ctx: RankContext, key: int) -> None:
        self.optimizer.zero_grad()
        batches = [batch(ctx, replica, key) for replica in range(2)]
        tokens = torch.cat([tokens for tokens, _ in batches])
        targets = torch.cat([targets for _, targets in batches])
        mean_loss(self.halves[1](self.halves[0](tokens)), targets).backward()


def assert_close(found: Tensor | None, wanted: Tensor | None, what: str) -> None:
    """Equal up to the rounding of fp64 sums of some hundred terms of order 1 in another order."""
    assert found is not None, what
    assert wanted is not None, what
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=what)


def assert_gradients(pipe: Pipe, whole: Whole) -> None:
    """Of this pipeline stage, before the optimizer reads them."""
    pipe.engine.reduce_gradients()
    wanted = dict(whole.halves[pipe.half].named_parameters())
    for name, param in pipe.engine.module.named_parameters():
        assert_close(pipe.engine.full_grad(param), wanted[name].grad, f"gradient of {name}")


def assert_weights(pipe: Pipe, whole: Whole) -> None:
    """The reference's, and bit-equal on both replicas of the pipeline stage."""
    own = pipe.engine.full_state_dict()
    wanted = whole.halves[pipe.half].state_dict()
    assert own.keys() == wanted.keys()
    everyone = rig.gathered(own)
    for name, tensor in own.items():
        assert_close(tensor, wanted[name], name)
        for rank in pipe.mesh["dp"].mesh.tolist():
            assert torch.equal(tensor, everyone[rank][name]), f"{name} differs on rank {rank}"


pytestmark = pytest.mark.slow  # each rank imports torch's pipelining once


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize(("schedule", "is_static"), [("gpipe", True), ("1f1b", False)])
@distributed(world_size=4)
def test_one_reduction_per_step(
    ctx: RankContext, stage: int, schedule: str, is_static: bool
) -> None:
    """In a window, with the schedule's own scaling, whether shapes are given or inferred.

    Inferring runs a forward, and a backward that accumulates nothing, inside the first window.
    """
    whole = Whole()
    pipe = build(ctx, stage, schedule, scales=True, is_static=is_static)
    assert num_units(pipe.engine) == (
        3 if stage == 3 else len(list(pipe.engine.module.parameters()))
    )
    for key in range(STEPS):
        whole.backward(ctx, key)
        mark = pipe.engine.ledger.mark()
        with pipe.engine.coalesce_grad_reduction() as window:
            pipe.step(ctx, key)
        inferred = int(pipe.is_last and not is_static and key == 0)
        assert window.backwards == MICROBATCHES + inferred
        assert_gradients_and_step(ctx, pipe, whole, stage, "window", mark)


def assert_gradients_and_step(
    ctx: RankContext, pipe: Pipe, whole: Whole, stage: int, mode: str, mark: Any
) -> None:
    """Reduce and compare, step and compare; reading gradients is taken off the count."""
    pipe.engine.reduce_gradients()
    before = pipe.engine.ledger.mark()
    assert_gradients(pipe, whole)
    reads = rig.counts(pipe.engine, before)
    pipe.engine.step()
    whole.optimizer.step()
    wanted = usual(ctx, pipe.engine, stage, mode, MICROBATCHES)
    for kind, count in reads.items():
        wanted[kind] = wanted.get(kind, 0) + count
    assert_traffic(pipe.engine, mark, wanted)
    assert_weights(pipe, whole)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=4)
def test_armed(ctx: RankContext, stage: int) -> None:
    """The last microbatch's backward hides the reductions: all of them start inside it."""
    whole = Whole()
    pipe = build(ctx, stage, "1f1b" if stage % 2 else "gpipe", scales=False)
    for key in range(STEPS):
        whole.backward(ctx, key)
        mark = pipe.engine.ledger.mark()
        with pipe.engine.coalesce_grad_reduction(backwards=MICROBATCHES):
            pipe.step(ctx, key)
            assert_num_reductions(pipe.engine, stage, mark, num_units(pipe.engine))
        assert_gradients_and_step(ctx, pipe, whole, stage, "armed", mark)


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=4)
def test_armed_while_shapes_are_inferred(ctx: RankContext, stage: int) -> None:
    """The schedule's own backward is counted too, so in the first step the last stage arms one
    microbatch early and reduces twice; nothing is lost, and the next step reduces once.
    """
    whole = Whole()
    pipe = build(ctx, stage, "1f1b", scales=False, is_static=False)
    for key in range(2):
        whole.backward(ctx, key)
        mark = pipe.engine.ledger.mark()
        with pipe.engine.coalesce_grad_reduction(backwards=MICROBATCHES):
            pipe.step(ctx, key)
        assert_gradients(pipe, whole)
        times = 2 if pipe.is_last and key == 0 else 1
        assert_num_reductions(pipe.engine, stage, mark, times * num_units(pipe.engine))
        pipe.engine.step()
        whole.optimizer.step()
        assert_weights(pipe, whole)


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize(("mode", "schedule"), [("bare", "1f1b"), ("no_sync", "gpipe")])
@distributed(world_size=4)
def test_without_a_window(ctx: RankContext, stage: int, schedule: str, mode: str) -> None:
    """Bare, a unit is reduced per microbatch where gradients are Shard; in no_sync by step()."""
    whole = Whole()
    scales = mode == "no_sync" or stage < 2
    pipe = build(ctx, stage, schedule, scales=scales)
    for key in range(STEPS):
        whole.backward(ctx, key)
        mark = pipe.engine.ledger.mark()
        with scope(pipe.engine, mode, MICROBATCHES):
            pipe.step(ctx, key)
        assert_gradients(pipe, whole)
        times = MICROBATCHES if mode == "bare" and stage >= 2 else 1
        assert_num_reductions(pipe.engine, stage, mark, times * num_units(pipe.engine))
        pipe.engine.step()
        whole.optimizer.step()
        assert_weights(pipe, whole)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=4)
def test_two_schedules_in_one_step(ctx: RankContext, stage: int) -> None:
    """Two rounds of the pipeline in one window, a third in another, and still one step."""
    whole = Whole()
    pipe = build(ctx, stage, "1f1b", scales=False)
    gradients: dict[str, Tensor] = {}
    for key in range(3):
        whole.backward(ctx, key)
        for name, param in whole.halves[pipe.half].named_parameters():
            assert param.grad is not None
            gradients[name] = gradients.get(name, torch.zeros_like(param)) + param.grad
    mark = pipe.engine.ledger.mark()
    with pipe.engine.coalesce_grad_reduction() as window:
        pipe.step(ctx, 0)
        pipe.step(ctx, 1)
    assert window.backwards == 2 * MICROBATCHES
    with pipe.engine.coalesce_grad_reduction():
        pipe.step(ctx, 2)
    pipe.engine.reduce_gradients()
    for name, param in pipe.engine.module.named_parameters():
        assert_close(pipe.engine.full_grad(param), gradients[name], f"gradient of {name}")
    times = 2 if stage >= 2 else 1
    assert_num_reductions(pipe.engine, stage, mark, times * num_units(pipe.engine))


class OneNumber(nn.Module):
    """A last pipeline stage whose only parameter has one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.scale * hidden.sum(dim=-1)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["halves", "one_number"])
@distributed(world_size=4)
def test_scaling_what_has_left_is_loud(ctx: RankContext, stage: int, kind: str) -> None:
    """Bare where gradients are Shard, the schedule's division comes after the reductions: it must
    raise, in the schedule or at the latest in step(), and never lose the gradient.
    """
    is_one = kind == "one_number" and ctx.rank >= 2
    pipe = build(ctx, stage, "gpipe", scales=True, module=OneNumber() if is_one else None)
    with pytest.raises(RuntimeError):
        _train(ctx, pipe)


def _train(ctx: RankContext, pipe: Pipe) -> None:
    pipe.step(ctx, 0)
    pipe.engine.step()


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=4)
def test_an_engine_after_another(ctx: RankContext, stage: int) -> None:
    """Over the same axis: the groups of a destroyed engine must not be met again."""
    mesh = make_mesh(ctx)
    replica = mesh["dp"].get_local_rank()
    for _ in range(2):
        engine = onefold.initialize(
            model=rig.House(),
            optimizer=sgd,
            config={"zero_optimization": {"stage": stage}},
            mesh=mesh["dp"],
        ).engine
        with engine.coalesce_grad_reduction():
            engine.backward(engine(rig.x_of(replica, 0)))
        engine.step()
        rig.assert_change(engine, RATE * rig.expected(2, 1))
        engine.destroy()


@distributed(world_size=4)
def test_a_group_that_some_ranks_have(ctx: RankContext) -> None:
    """First and last pipeline stage often share one (for tied embeddings)."""
    mesh = make_mesh(ctx)
    ctx.new_group([0, 3])
    engine = rig.start(ctx, rig.House(), 2, mesh=mesh["dp"])
    engine.backward(engine(rig.x_of(mesh["dp"].get_local_rank(), 0)))
    engine.step()
    rig.assert_change(engine, rig.expected(2, 1))
