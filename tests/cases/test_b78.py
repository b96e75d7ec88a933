"""B78: an expert that gets no tokens made the ranks hang, or had a stale gradient. Its gradient is
the reference's: zero.

The router sends everything to expert 0 on rank 0 and to expert 1 on rank 1, and then everything to
expert 0 everywhere; with onefold's layer, and with a layer of the user's own.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.experts import ExpertParallel, NumberedExperts
from onefold.moe import MoE
from tests import rig
from tests.cases.wire_formula import MODES, scope
from tests.harness import RankContext, distributed

WIDTH = 4
ROUTES: list[Callable[[int], int]] = [lambda rank: rank, lambda _rank: 0]
"""Which expert a rank's tokens go to, step by step."""


class Library(nn.Module):
    """onefold's layer; a token says by one of its first two elements where it goes."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.moe = MoE(
            WIDTH, lambda: nn.Linear(WIDTH, WIDTH), 2, ep_size=ep_size, drop_tokens=False
        )
        with torch.no_grad():
            self.moe.gate.weight.zero_()
            self.moe.gate.weight[:, :2] = torch.eye(2) * 4

    def forward(self, tokens: Tensor) -> Tensor:
        return self.moe(tokens * self.scale).output.square().mean()


class Maybe(nn.Linear):
    """An expert that is not even called where nothing came."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) if bool(rows.detach().any()) else rows


class Own(nn.Module):
    """A layer of the user's: a row per token and expert, no router to learn."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        built = NumberedExperts(Maybe(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.experts = ExpertParallel(built, size=ep_size)

    def forward(self, tokens: Tensor) -> Tensor:
        axis = self.experts.all_to_all
        chosen = torch.stack([tokens[:, 0] > 0, tokens[:, 1] > 0])  # [E, T]
        sent = (tokens * self.scale).unsqueeze(0) * chosen.unsqueeze(-1)  # [E, T, H]
        arrived = axis.exchange(sent)  # [W * E/W, T, H], by rank and expert
        here = arrived.view(axis.size, -1, *arrived.shape[1:]).transpose(0, 1)
        done = self.experts(here.flatten(1, 2)).view_as(here).transpose(0, 1)
        returned = axis.exchange(done.reshape(sent.shape))
        return returned.sum(dim=0).square().mean()


LAYERS: dict[str, type[Library] | type[Own]] = {"onefold's": Library, "the user's": Own}


def make(layer: str, ep_size: int) -> Library | Own:
    torch.manual_seed(2)
    model = LAYERS[layer](ep_size)
    model.double()
    return model


def tokens(rank: int, expert: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + k)
    batch = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    batch[:, :2] = 0.0
    batch[:, expert] = 2.0
    return batch


def reference(model: Library | Own, route: Callable[[int], int], world_size: int) -> None:
    """Add the mean over ranks of two backwards, in one process with all experts."""
    model.zero_grad()
    for rank in range(world_size):
        for k in range(2):
            (model(tokens(rank, route(rank), k)) / world_size).backward()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("ep_size", [1, 2])
def test_no_tokens_no_hang(
    ctx: RankContext, stage: int, mode: str, layer: str, ep_size: int
) -> None:
    if layer == "the user's" and mode == "bare" and stage >= 2:
        mode = "window"  # ranks call different experts there: see the next test
    engine, wanted = rig.start(ctx, make(layer, ep_size), stage), make(layer, 1)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=1.0)
    for route in ROUTES:
        with scope(engine, mode, 2):
            for k in range(2):
                engine.backward(engine(tokens(ctx.rank, route(ctx.rank), k)))
        engine.reduce_gradients()
        reference(wanted, route, ctx.world_size)
        _assert_gradients(engine, wanted)
        engine.step()
        optimizer.step()
        for name, tensor in rig.weights(engine).items():
            torch.testing.assert_close(tensor, wanted.state_dict()[name], rtol=1e-12, atol=1e-14)
    rows = {name: param.grad for name, param in wanted.named_parameters() if ".1." in name}
    assert rows
    assert all(grad is None or not grad.any() for grad in rows.values())  # expert 1 had no tokens


def _assert_gradients(engine: onefold.Engine, wanted: nn.Module) -> None:
    named = dict(wanted.named_parameters())
    for name, param in engine.module.named_parameters():
        found, gradient = engine.full_grad(param), named[name].grad
        if gradient is None:
            assert found is None or not found.any(), name
            continue
        assert found is not None, name
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14, msg=name)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_expert_that_one_rank_does_not_call_takes_a_scope(ctx: RankContext, stage: int) -> None:
    """Outside of one, units are reduced as they go, and both ranks must run the same: no hang."""
    engine = rig.start(ctx, make("the user's", 2), stage)
    engine.backward(engine(tokens(ctx.rank, 0, 0)))
    with pytest.raises(onefold.RankMismatchError, match=r"inside coalesce_grad_reduction\(\)"):
        engine.step()
