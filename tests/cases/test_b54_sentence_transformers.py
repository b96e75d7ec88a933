"""B54, B55. The cached loss that people really use: under a window one reduction per unit and step
instead of one per chunk, and the gradient of the full batch, at every stage.
"""

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onefold
from tests.cases.gradcache import ROWS, Encode, assert_state, columns, num_chunks
from tests.cases.wire_formula import assert_wire, scope, wire
from tests.harness import RankContext, distributed
from tests.rig import STAGES, assert_ranks_equal, counts, start, weights

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("sentence_transformers") is None,
        reason="needs the extra 'contrastive'",
    ),
    pytest.mark.slow,  # each rank imports the library once, which takes seconds
]
SCALE = 2.0


class Sentences(nn.Module):
    """What the loss expects of a model: features in, features with embeddings out."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = Encode(0)

    def __getitem__(self, _index: int) -> nn.Module:
        return self.encode

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**features, "sentence_embedding": self.encode(features["input_ids"])}


def _features(ctx: RankContext, key: int, rank: int | None = None) -> list[dict[str, Tensor]]:
    ids = columns(ctx, key, rank)
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


def _loss(model: Any) -> Any:
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
    )

    return CachedMultipleNegativesRankingLoss(
        model, scale=SCALE, mini_batch_size=2, similarity_fct=lambda a, b: a @ b.T
    )


def _full_batch(ctx: RankContext, model: Sentences) -> dict[str, Tensor]:
    """One process; every rank's loss is over its own rows, the gradient the mean over ranks."""
    for rank in range(ctx.world_size):
        queries, documents = (model(one)["sentence_embedding"] for one in _features(ctx, 0, rank))
        loss = F.cross_entropy(SCALE * queries @ documents.T, torch.arange(ROWS))
        (loss / ctx.world_size).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return model.state_dict()


def _train(ctx: RankContext, engine: onefold.Engine, loss: Any, mode: str, plain: bool) -> None:
    with scope(engine, mode, 1):
        value = loss(_features(ctx, 0), torch.zeros(ROWS))
        if plain:
            value.backward()
        else:
            engine.backward(value)
    engine.step()


@distributed()
@pytest.mark.parametrize("mode", ["window", "armed", "no_sync"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_reduction_per_unit(ctx: RankContext, stage: int, mode: str) -> None:
    """Built with the bare model, as the library's own examples do."""
    model = Sentences()
    loss = _loss(model)
    wanted = _full_batch(ctx, copy.deepcopy(model))
    engine = start(ctx, model, stage)
    mark = engine.ledger.mark()
    _train(ctx, engine, loss, mode, plain=mode == "window")
    assert_wire(counts(engine, mark), wire(engine, mode))
    assert_state(weights(engine), wanted)
    assert_ranks_equal(engine)


@distributed()
@pytest.mark.parametrize("stage", STAGES)
def test_one_per_chunk_without_a_window(ctx: RankContext, stage: int) -> None:
    """The same weights; what the window saves where gradients are sharded."""
    model = Sentences()
    loss = _loss(model)
    wanted = _full_batch(ctx, copy.deepcopy(model))
    engine = start(ctx, model, stage)
    mark = engine.ledger.mark()
    _train(ctx, engine, loss, "bare", plain=True)
    found, expected = counts(engine, mark), wire(engine, "bare", backwards=num_chunks())
    kind = "all_reduce" if stage == 0 else "reduce_scatter"
    assert found[kind] == expected[kind]
    assert_state(weights(engine), wanted)
    assert_ranks_equal(engine)
