"""B51. A backward that runs through a second engine leaves gradients there; they must neither
break its next backward nor reach its next step, and the first engine must not notice.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.cases.gradcache import assert_state
from tests.cases.wire_formula import assert_wire, num_trainable, reduction_kind, scope
from tests.harness import RankContext, distributed
from tests.rig import STAGES, assert_ranks_equal, counts, start, weights

ROUNDS = 3
LR = 0.1


class Net(nn.Module):
    """``[B, 3]`` -> ``[B, out]``; all parameters are used by every forward."""

    def __init__(self, seed: int, out: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, 4)
        self.outer = nn.Linear(4, out)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def _data(ctx: RankContext, key: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    both = ctx.data(2, 4, 3, key=key, rank=rank, dtype=torch.float64)
    return both[0], both[1]


def _reference(ctx: RankContext) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One process over all ranks' data, with D's gradient cleared before D's step."""
    maker, judge = Net(1, 3), Net(2, 1)
    sgd = [torch.optim.SGD(net.parameters(), lr=LR) for net in (maker, judge)]
    for key in range(ROUNDS):
        batches = [_data(ctx, key, rank) for rank in range(ctx.world_size)]
        noise, real = (torch.cat(column) for column in zip(*batches, strict=True))
        (-judge(maker(noise)).mean()).backward()
        sgd[0].step()
        judge.zero_grad()
        fake = maker(noise).detach()
        (judge(fake).mean() - judge(real).mean() + judge(real).square().mean()).backward()
        sgd[1].step()
        maker.zero_grad()
        judge.zero_grad()
    return maker.state_dict(), judge.state_dict()


def _round(
    ctx: RankContext,
    maker: onefold.Engine,
    judge: onefold.Engine,
    key: int,
    mode: str,
    freezes: bool,
) -> None:
    noise, real = _data(ctx, key)
    if freezes:
        judge.module.requires_grad_(False)
    with scope(maker, mode), scope(judge, "bare" if mode == "bare" else "no_sync"):
        maker.backward(-judge(maker(noise)).mean())
    maker.step()
    judge.module.requires_grad_(True)
    judge.zero_grad()
    with torch.no_grad():
        fake = maker(noise)
    with scope(judge, mode):
        judged = judge(real)
        judge.backward(judge(fake).mean() - judged.mean() + judge(real).square().mean())
    judge.step()


@distributed()
@pytest.mark.parametrize("freezes", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("mode", ["bare", "window", "armed"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gan_of_three_rounds(ctx: RankContext, stage: int, mode: str, freezes: bool) -> None:
    wanted = _reference(ctx)
    make = lambda params: torch.optim.SGD(params, lr=LR)  # noqa: E731
    maker = start(ctx, Net(1, 3), stage, optimizer=make)
    judge = start(ctx, Net(2, 1), stage, optimizer=make)
    marks = [engine.ledger.mark() for engine in (maker, judge)]
    for key in range(ROUNDS):
        _round(ctx, maker, judge, key, mode, freezes)
    for engine, mark, state in zip((maker, judge), marks, wanted, strict=True):
        # A bare generator step also reduces what it left in the judge, where gradients are Shard.
        leaves = engine is judge and mode == "bare" and stage >= 2 and not freezes
        found = counts(engine, mark)
        found.pop("all_gather", None)
        rounds = ROUNDS * (2 if leaves else 1)
        assert_wire(found, {reduction_kind(engine): rounds * num_trainable(engine)})
        assert engine.global_steps == ROUNDS
        assert_state(weights(engine), state)
        assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("mode", ["bare", "window"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_was_left_is_still_there_unless_dropped(
    ctx: RankContext, stage: int, mode: str
) -> None:
    """Negative control: without zero_grad the judge's step includes the generator's share."""
    maker, judge = start(ctx, Net(1, 3), stage), start(ctx, Net(2, 1), stage)
    alone = Net(1, 3), Net(2, 1)
    losses = [-alone[1](alone[0](_data(ctx, 0, rank)[0])).mean() for rank in range(ctx.world_size)]
    torch.stack(losses).mean().backward()
    torch.optim.SGD(alone[1].parameters(), lr=1.0).step()
    with scope(maker, mode), scope(judge, mode):
        maker.backward(-judge(maker(_data(ctx, 0)[0])).mean())
    before = copy.deepcopy(weights(maker))
    judge.step()
    assert_state(weights(judge), alone[1].state_dict())
    assert_ranks_equal(judge)
    for name, tensor in weights(maker).items():
        assert torch.equal(tensor, before[name]), f"the judge's step moved {name} of the maker"
    maker.zero_grad()
