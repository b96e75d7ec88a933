"""What the transaction does where no contract file looks: a window that fails while it opens."""

import pytest

import onefold
from onefold.gradients import Gradients
from tests.harness import RankContext, distributed
from tests.rig import STAGES, House, assert_change, assert_ranks_equal, expected, start, x_of


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_no_memory_at_entry_on_one_rank_aborts_everywhere(ctx: RankContext, stage: int) -> None:
    engine = start(ctx, House(), stage)
    bind = Gradients.bind

    def no_memory(self: Gradients) -> None:
        raise MemoryError("no room for the window")

    if ctx.rank == 1:
        Gradients.bind = no_memory  # type: ignore[method-assign]
        ctx.cleanup(setattr, Gradients, "bind", bind)
    error = MemoryError if ctx.rank == 1 else onefold.WindowAborted
    with pytest.raises(error, match="no room for the window"), engine.coalesce_grad_reduction():
        engine.backward(engine(x_of(ctx.rank, 0)))
    Gradients.bind = bind  # type: ignore[method-assign]
    with engine.coalesce_grad_reduction():
        engine.backward(engine(x_of(ctx.rank, 3)))
    engine.step()
    assert_change(engine, expected(ctx.world_size, [[3]] * ctx.world_size))
    assert_ranks_equal(engine)


@distributed(world_size=2)
def test_the_report_reads_as_one_line(ctx: RankContext) -> None:
    engine = start(ctx, House(), 3)
    with engine.coalesce_grad_reduction() as window:
        for k in range(3):
            engine.backward(engine(x_of(ctx.rank, k)))
        assert window.backwards == 3
        assert str(window).startswith("window open: 3 backward(s)")
    assert engine.last_window is window
    assert window.outcome == "flushed"
    assert window.collectives == {"all_gather": 1, "reduce_scatter": 1}
    # one unit of 16 padded elements a rank: a gather and a reduction, 64 bytes each
    assert window.bytes_sent == 128
    assert window.bytes_sent_per_backward == 3 * (64 + 2 * 64)
    assert window.bytes_held == 2 * 128
    assert "\n" not in str(window)
    engine.step()
    assert_change(engine, expected(2, 3))
