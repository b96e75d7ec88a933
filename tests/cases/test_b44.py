"""B44. Bookkeeping that costs Python calls per parameter where nobody needs them, or more than
linearly many: counted as calls into the engine during one backward, never as time.
"""

import sys
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.cases.wire_formula import num_trainable, scope
from tests.harness import RankContext, distributed
from tests.rig import STAGES, assert_ranks_equal, start, weights, x_of

MARGIN = 20  # calls per backward that do not depend on the number of parameters


class Many(nn.Module):
    """Many small parameters, all of one size, owned by one module."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(num)])

    def forward(self, x: float) -> Tensor:
        return torch.stack([(w * x).sum() for w in self.w]).sum()


class Calls:
    """Counts calls of the engine's functions in a with-block.

    Attributes:
        entries: calls that came from outside: from autograd's hooks, or from the test.
        total: all of them, with every resumption of a generator.
    """

    def __init__(self) -> None:
        self.entries = self.total = 0

    def __enter__(self) -> "Calls":
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and _is_ours(frame):
            self.total += 1
            self.entries += not _is_ours(frame.f_back)


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(onefold.__path__[0])


def _calls(ctx: RankContext, stage: int, mode: str, num: int) -> Calls:
    """Calls during the second of two backwards, which is the last; and the result is right."""
    engine = start(ctx, Many(num), stage)
    calls = Calls()
    with scope(engine, mode, 2):
        engine.backward(engine(x_of(ctx.rank, 0)))
        loss = engine(x_of(ctx.rank, 1))
        with calls:
            loss.backward()
    mark = engine.ledger.mark()
    engine.step()
    reductions = sum(
        total.count
        for kind, total in engine.ledger.since(mark).items()
        if kind in ("reduce_scatter", "all_reduce")
    )
    # At stages 2 and 3 the backwards, or the window, have reduced already.
    waits = stage < 2 and mode != "armed"
    assert reductions == num_trainable(engine) * waits
    total = sum(x_of(rank, k) for rank in range(ctx.world_size) for k in range(2))
    for name, w in weights(engine).items():
        assert torch.equal(w, torch.full_like(w, -total / ctx.world_size)), name
    assert_ranks_equal(engine)
    return calls


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_an_open_window_runs_nothing_per_parameter(ctx: RankContext, stage: int) -> None:
    few, many = (_calls(ctx, stage, "window", num) for num in (20, 60))
    assert many.entries == few.entries, f"{few.entries} entries for 20, {many.entries} for 60"
    assert many.total == few.total, f"{few.total} calls for 20 parameters, {many.total} for 60"


@distributed()
@pytest.mark.parametrize("mode", ["bare", "armed"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_hooks_per_parameter_and_linear_work(ctx: RankContext, stage: int, mode: str) -> None:
    first, second, third = (_calls(ctx, stage, mode, num) for num in (20, 40, 80))
    assert first.entries >= 20, "the witness sees no hooks"
    grown = third.entries - second.entries
    assert grown <= 2 * 40, f"{grown} more hook calls for 40 more parameters"
    slope = (second.total - first.total) / 20
    assert third.total - second.total <= 40 * slope + MARGIN, (
        f"calls of the engine in one backward: {first.total} for 20 parameters, {second.total} for "
        f"40, {third.total} for 80"
    )
