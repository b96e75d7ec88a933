"""Large memory between steps is offered to the kernel: nobody who still looks at it is misled."""

import math
from pathlib import Path

import pytest
import torch

from onefold.wire.buffer import HUGE_PAGE_BYTES, Arena, empty, is_watched, offer, refill
from tests.harness import RankContext, distributed
from tests.rig import House, start

CPU = torch.device("cpu")
NUMEL = 4 * HUGE_PAGE_BYTES // 4
SMAPS = Path("/proc/self/smaps_rollup")


def lazy_bytes() -> int:
    """Memory of this process that the kernel may take without asking."""
    (line,) = [line for line in SMAPS.read_text().splitlines() if line.startswith("LazyFree")]
    return 1024 * int(line.split()[1])


needs_lazy_free = pytest.mark.skipif(
    not (SMAPS.exists() and offer(torch.ones(NUMEL))), reason="the kernel takes no offers"
)


@needs_lazy_free
def test_what_is_trimmed_is_offered_and_found_again() -> None:
    """Resident until the kernel wants it, and the next lease of the size needs no page fault."""
    arena = Arena(CPU)
    before = lazy_bytes()
    buffer = arena.lease(NUMEL, torch.float32, zeroed=True).fill_(1)
    address = buffer.data_ptr()
    arena.give_back(buffer)
    del buffer
    assert arena.kept_bytes == 4 * NUMEL
    assert lazy_bytes() - before < HUGE_PAGE_BYTES, "what is kept is not offered"
    arena.trim()
    assert (arena.kept_bytes, arena.leased_bytes) == (0, 0)
    assert lazy_bytes() - before > 3 * HUGE_PAGE_BYTES
    again = arena.lease(NUMEL, torch.float32, zeroed=True)
    assert again.data_ptr() == address
    assert not again.any(), "what was there does not come back as zeros by itself"
    assert lazy_bytes() - before < HUGE_PAGE_BYTES, "it was written, so it is ours again"


@pytest.mark.parametrize("is_trimmed", [False, True])
@pytest.mark.parametrize("numel", [64, NUMEL])
def test_what_somebody_looks_at_is_his(numel: int, is_trimmed: bool) -> None:
    """A gradient that the user has kept is neither leased again nor offered."""
    arena = Arena(CPU)
    buffer = arena.lease(numel, torch.float32).fill_(3)
    theirs = buffer[1:].data
    arena.give_back(buffer)
    del buffer
    if is_trimmed:
        arena.trim()
    again = arena.lease(numel, torch.float32, zeroed=True)
    assert again.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
    assert bool((theirs == 3).all())
    assert arena.leased_bytes == 4 * numel


def test_watchers_are_counted() -> None:
    """Every tensor on the storage is one; names for the same tensor are none."""
    buffer = torch.empty(8)
    same = buffer
    assert not is_watched(same)
    views = [buffer[:4], buffer.view(2, 4)]
    assert is_watched(buffer, 1)
    assert not is_watched(buffer, len(views))


@pytest.mark.parametrize("numel", [64, NUMEL])
def test_an_emptied_buffer_is_the_same_storage_again(numel: int) -> None:
    """What pointed at it before points at it after; contents are what is written then."""
    buffer = torch.ones(numel)
    view = buffer.view(2, -1)
    empty(buffer, 1, math.nan)
    refill(buffer)
    buffer.fill_(5)
    assert bool((view == 5).all())


@needs_lazy_free
def test_an_unknown_view_of_an_emptied_buffer_reads_nan() -> None:
    """Small buffers have no memory then; of large ones the old values must not be read."""
    buffer = torch.ones(NUMEL)
    view = buffer[5:9]
    empty(buffer, 0, math.nan)
    assert bool(view.isnan().all())
    known = torch.ones(NUMEL)
    view = known[5:9]
    empty(known, 1, math.nan)
    assert bool((view == 1).all()), "who is known not to read costs no writes"


@needs_lazy_free
@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_of_large_units_are_exact(ctx: RankContext, stage: int) -> None:
    """Gradients and weights over steps that find their memory again; integers."""
    model = House(2 * NUMEL)
    engine = start(ctx, model, stage)
    (unit,) = engine._units
    total = 0.0
    for step in range(3):
        with engine.coalesce_grad_reduction():
            for k in range(2):
                engine.backward(engine(float(1 + 10 * ctx.rank + k + step)))
            theirs = model.w.grad
        assert theirs is not None
        was = theirs.flatten()[:3].clone()
        engine.step()
        per_rank = [2 * (1 + 10 * rank + step) + 1 for rank in range(ctx.world_size)]
        total -= sum(per_rank) / ctx.world_size
        with engine.full_parameters():
            assert bool((model.w == total).all())
        if stage == 3:
            assert bool(model.w.isnan().all()), "a freed parameter reads NaN"
            assert unit.param_full.untyped_storage().nbytes() == 4 * unit.layout.numel
        assert torch.equal(theirs.flatten()[:3], was), "what the user kept of the last step stays"
