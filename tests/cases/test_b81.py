"""B81. The bucket size changes the result, or a counter that is not reset turns buckets into one
collective per parameter: every size gives the same bits, and the formula's number of reductions in
every step.
"""

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.cases.wire_formula import assert_wire, num_trainable, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import STAGES, assert_ranks_equal, counts, start, weights

SIZES = {"1": 1, "3": 3, "7": 7, "total": 1.0, "10x": 10.0}
STEPS = 3


class Odd(nn.Module):
    """Sizes that divide by nothing, among them 0, 1 and one above every small bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lifts = nn.ParameterList(
            nn.Parameter(torch.randn(numel)) for numel in (1, 5, 0, 2, 3, 13, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.tanh(lift * x[: len(lift)]) for lift in self.lifts]).sum()


def _buckets(numels: list[int], size: int) -> int:
    """Greedy packing from the last parameter on; a bucket is at most a quarter of the model."""
    size = min(size, max(1, sum(numels) // 4))
    count, filled = 0, None
    for numel in reversed(numels):
        if filled is None or filled + numel > size:
            count, filled = count + 1, 0
        filled += numel
    return count


def _train(ctx: RankContext, engine: onefold.Engine, mode: str) -> dict[str, Tensor]:
    for step in range(STEPS):
        mark = engine.ledger.mark()
        with scope(engine, mode, 2):
            for k in range(2):
                engine.backward(engine(ctx.data(13, key=10 * step + k)))
        engine.step()
        assert_wire(counts(engine, mark), wire(engine, mode, backwards=2))
    assert_ranks_equal(engine)
    return weights(engine)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("mode", ["bare", "armed"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_size_has_the_same_bits(ctx: RankContext, stage: int, mode: str) -> None:
    numels = [param.numel() for param in Odd().parameters()]
    first: dict[str, Tensor] | None = None
    seen = set()
    for size in SIZES.values():
        numel = int(size * sum(numels)) if isinstance(size, float) else size
        adam = lambda params: torch.optim.AdamW(params, lr=0.1)  # noqa: E731
        zero = {"reduce_bucket_size": numel}
        engine = start(ctx, Odd(), stage, optimizer=adam, zero=zero)
        wanted = 1 if stage == 3 else _buckets(numels, numel)  # one block without repeated ones
        assert num_trainable(engine) == wanted, f"bucket size {numel}"
        seen.add(wanted)
        found = _train(ctx, engine, mode)
        first = first or found
        for name, tensor in found.items():
            assert torch.equal(tensor, first[name]), f"{name} with bucket size {numel}"

    assert len(seen) == (1 if stage == 3 else 3), "the sizes do not tell buckets apart"


@distributed()
def test_a_size_of_nothing_is_refused(ctx: RankContext) -> None:
    for size in (0, -1):
        with pytest.raises(ValueError, match="reduce_bucket_size"):
            start(ctx, Odd(), 2, zero={"reduce_bucket_size": size})
