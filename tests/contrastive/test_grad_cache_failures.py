"""GradCache: what is refused, and what becomes of a step that fails on one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor

import onefold
from onefold.contrastive import GradCache, InfoNCE
from tests.contrastive.towers import TwoTowers, assert_is, batch_of, cached, plain, reference
from tests.harness import RankContext, pool_for
from tests.rig import STAGES, start


class Broken(Exception):
    pass


def one_fails(ctx: RankContext, stage: int, where: str) -> None:
    """An error on one rank drops the step on all; the next one is right."""
    _, grads = reference(ctx, TwoTowers().double(), plain)
    breaks = True

    def loss(queries: Tensor, documents: Tensor) -> Tensor:
        if breaks and ctx.rank == 1 and where == "loss":
            raise Broken
        return plain(queries, documents)

    model = TwoTowers().double()
    engine, cache = cached(ctx, stage, loss, model, mini_batch_size=2)

    def hook(*_: Any) -> None:
        is_second = torch.is_grad_enabled()
        if breaks and ctx.rank == 1 and where == ("second" if is_second else "first"):
            raise Broken

    model.document.register_forward_hook(hook)
    kind = Broken if ctx.rank == 1 else onefold.WindowAborted
    with pytest.raises(kind):
        cache(*batch_of(ctx, ctx.rank))
    breaks = False
    cache(*batch_of(ctx, ctx.rank))
    assert_is(engine, grads, 1e-12)


@pytest.mark.parametrize("where", ["first", "loss", "second"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_fails_takes_all_with_it(stage: int, where: str) -> None:
    pool_for(2).run(one_fails, stage=stage, where=where)


def uneven(ctx: RankContext) -> None:
    """What one rank alone gets wrong is an error everywhere, and the next step is right."""
    _, grads = reference(ctx, TwoTowers().double(), InfoNCE())
    engine, cache = cached(ctx, 2, InfoNCE(), TwoTowers().double(), mini_batch_size=2)
    queries, documents = batch_of(ctx, ctx.rank)
    fewer = {name: value[1:] for name, value in documents.items()}
    none = {name: value[:0] for name, value in documents.items()}
    for columns, text in (((queries, fewer), "equally many rows"), ((none, none), "1 or more")):
        wrong = ctx.rank == 1
        with pytest.raises(
            ValueError if wrong else onefold.WindowAborted, match=text if wrong else "rank 1"
        ):
            cache(*(columns if wrong else (queries, documents)))
    ids = torch.zeros(len(queries["tokens"]), dtype=torch.int64)
    with pytest.raises(onefold.RankMismatchError, match="ids"):
        cache(queries, documents, ids=ids if ctx.rank else None)
    cache(queries, documents)
    assert_is(engine, grads, 1e-12)


def test_one_rank_is_wrong() -> None:
    pool_for(2).run(uneven)


def refused(ctx: RankContext) -> None:
    model = TwoTowers().double()
    engine = start(ctx, model, 1)
    wrong: list[dict[str, Any]] = [
        {},
        {"mini_batch_size": 0},
        {"mini_batch_size": 1, "mini_batch_tokens": 1},
    ]
    for settings in wrong:
        with pytest.raises(ValueError, match="expected one of the sizes"):
            GradCache(engine, plain, **settings)
    cache = GradCache(engine, plain, encoders=lambda chunk: chunk["tokens"], mini_batch_size=2)
    columns = batch_of(ctx, ctx.rank)
    columns[0]["attention_mask"] = columns[0]["attention_mask"][1:]
    with pytest.raises(ValueError, match="equally many rows"):
        cache(*columns)


def test_what_is_refused() -> None:
    pool_for(2).run(refused)
