"""B70: the norm with experts. Averaged over the expert ranks it was 7.236 (the mean of the roots of
20 and 100), with the experts left out 6 instead of 10, and with a norm per expert group the dense
weights were clipped by different factors on different ranks. Right: the root of 120, 10, and one
factor everywhere.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.experts import ExpertParallel, NumberedExperts
from tests import rig
from tests.cases.wire_formula import scope
from tests.harness import RankContext, pool_for

# Averaged gradients: dense, expert 0, expert 1; squares; the wrong norm of the report.
CASES = {
    "root of 120": ((0.0, 0.0), (2.0, 4.0), (6.0, 8.0), 120.0, 7.236),
    "dense and experts": ((2.0, 4.0), (6.0, 0.0), (0.0, 8.0), 120.0, 7.236),
    "10, not 6": ((6.0, 0.0), (8.0, 0.0), (0.0, 0.0), 100.0, 6.0),
}
GRIDS = [(1, 1), (1, 2), (2, 2), (2, 4)]  # (ep, ranks)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))


class Bank(nn.Module):
    """Dense weights and two experts; each one's gradient is what is fed in."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(2))
        self.experts = ExpertParallel(NumberedExperts(Own() for _ in range(2)), size=ep_size)

    def forward(self, dense: Tensor, by_expert: list[Tensor]) -> Tensor:
        loss = (self.dense * dense).sum()
        here = self.experts.experts
        assert isinstance(here, NumberedExperts)
        for number, expert in here.items():
            assert isinstance(expert, Own)
            loss = loss + (expert.w * by_expert[int(number)]).sum()
        return loss


def _fed(ctx: RankContext, case: str, ep_size: int) -> tuple[Tensor, list[Tensor]]:
    """This rank's terms, different on every rank, whose averages are the case's gradients.

    An expert's sum over its replicas is divided by all ranks, so its terms are ``ep_size`` times
    as large.
    """
    dense, *by_expert = (torch.tensor(values) for values in CASES[case][:3])
    off = ctx.rank - (ctx.world_size - 1) / 2
    replica = ctx.rank // ep_size - (ctx.world_size // ep_size - 1) / 2
    return dense + off, [gradient * ep_size + replica for gradient in by_expert]


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("ep_size", "world_size"), GRIDS)
def test_every_expert_counts_once(stage: int, case: str, ep_size: int, world_size: int) -> None:
    pool_for(world_size).run(check, stage=stage, case=case, ep_size=ep_size)


def check(ctx: RankContext, stage: int, case: str, ep_size: int) -> None:
    square, wrong = CASES[case][3:]
    norm = float(torch.tensor(math.sqrt(square)))
    engine = rig.start(ctx, Bank(ep_size), stage, config={"gradient_clipping": 2.0})
    for mode in ("bare", "window"):
        before = rig.weights(engine)
        with scope(engine, mode, 1):
            engine.backward(engine(*_fed(ctx, case, ep_size)))
        engine.reduce_gradients()
        assert rig.gathered(engine.get_global_grad_norm()) == [norm] * ctx.world_size
        assert abs(norm - wrong) > 1
        engine.step()
        factor = 2.0 / (norm + 1e-6)
        assert rig.gathered(engine.clip_factor) == [factor] * ctx.world_size
        _assert_moved(engine, before, case, factor)
    with engine.full_parameters():
        pass  # raises if replicas, dense or of an expert, have drifted apart


def _assert_moved(
    engine: onefold.Engine, before: dict[str, Tensor], case: str, factor: float
) -> None:
    names = ("dense", "experts.experts.0.w", "experts.experts.1.w")
    after = rig.weights(engine)
    for name, gradient in zip(names, CASES[case][:3], strict=True):
        wanted = before[name] - torch.tensor(gradient) * factor
        assert torch.equal(after[name], wanted), (name, after[name], wanted)
