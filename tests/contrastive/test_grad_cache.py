"""GradCache: the gradient of one process with the whole batch, whatever the chunks and ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onefold.contrastive import ContrastiveLoss, GradCache, InfoNCE, SigLIP
from tests.contrastive.towers import (
    ROWS,
    TwoTowers,
    assert_is,
    batch_of,
    cached,
    plain,
    reference,
    whole_batch,
)
from tests.harness import RankContext, pool_for
from tests.rig import STAGES, counts, gathered, start

LOSSES: dict[str, Any] = {
    "info_nce": InfoNCE,
    "symmetric, learnable": lambda: InfoNCE(scale=3.0, learnable_scale=True, symmetric=True),
    "siglip": SigLIP,
    "callable": lambda: plain,
}


def loss_of(name: str) -> tuple[Any, nn.Module | None]:
    loss = LOSSES[name]()
    return loss, loss if isinstance(loss, nn.Module) else None


def exact(ctx: RankContext, stage: int, loss: str, settings: dict[str, Any]) -> None:
    own, module = loss_of(loss)
    value, grads = reference(ctx, TwoTowers(module).double(), own)
    own, module = loss_of(loss)
    engine, cache = cached(ctx, stage, own, TwoTowers(module).double(), **settings)
    mark = engine.ledger.mark()
    found = cache(*batch_of(ctx, ctx.rank))
    assert abs(float(found) - value) <= 1e-12 * abs(value)
    assert gathered(float(found)) == [float(found)] * ctx.world_size
    assert_is(engine, grads, 1e-12)
    reductions = sum(unit.spec.is_trainable for unit in engine.parts.units)
    kind = "reduce_scatter" if stage else "all_reduce"
    if ctx.world_size > 1:
        sent = counts(engine, mark)
        assert sent[kind] == reductions
        expected = 2  # a callable: each column once, and no gradients back
        if isinstance(own, ContrastiveLoss):
            expected = 4 if own.needs_all_anchors else 2
        assert sent["all_to_all"] == expected


SETTINGS = {
    "rows": {"mini_batch_size": 2},
    "one chunk": {"mini_batch_size": 100},
    "tokens": {"mini_batch_tokens": 6},
    "one graph": {"mini_batch_size": 2, "keep_graphs": 1},
    "all graphs": {"mini_batch_size": 1, "keep_graphs": 100},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_equal_to_one_process(
    stage: int, world_size: int, loss: str, settings: dict[str, Any]
) -> None:
    pool_for(world_size).run(exact, stage=stage, loss=loss, settings=settings)


def scale_is_wrong(ctx: RankContext) -> None:
    _, grads = reference(ctx, TwoTowers().double(), InfoNCE())
    engine, cache = cached(ctx, 1, InfoNCE(), TwoTowers().double(), mini_batch_size=2)
    cache(*batch_of(ctx, ctx.rank))
    with pytest.raises(AssertionError):
        assert_is(engine, {name: 2 * grad for name, grad in grads.items()}, 1e-12)


def test_negative_control() -> None:
    pool_for(2).run(scale_is_wrong)


def masks(ctx: RankContext, stage: int) -> None:
    """Chunks replayed, against all graphs kept: the same dropout masks and batch norms."""
    found = []
    for keep in (0, 1, 100):
        model = TwoTowers(dropout=0.5, norm=True).double()
        engine, cache = cached(ctx, stage, InfoNCE(), model, mini_batch_size=3, keep_graphs=keep)
        torch.manual_seed(7 + ctx.rank)
        value = float(cache(*batch_of(ctx, ctx.rank)))
        after = torch.rand(1).item()
        engine.reduce_gradients()
        grads = [engine.full_grad(param) for param in model.parameters()]
        buffers = [buffer.clone() for buffer in model.buffers()]
        found.append((value, after, grads, buffers))
    for value, after, grads, buffers in found[1:]:
        assert (value, after) == found[0][:2]
        for one, other in zip(grads, found[0][2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
        assert all(torch.equal(a, b) for a, b in zip(buffers, found[0][3], strict=True))
    chunks = -(-len(batch_of(ctx, ctx.rank)[0]["tokens"]) // 3)
    assert found[0][3][2].item() == chunks  # num_batches_tracked: once per chunk


@pytest.mark.parametrize("stage", STAGES)
def test_masks_and_buffers_are_those_of_the_first_pass(stage: int) -> None:
    pool_for(2).run(masks, stage=stage)


class ImagesAndNames(nn.Module):
    """``[B, 1, 4, 4]`` images in one tower, lists of words in the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.image = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 5))
        self.words = nn.Embedding(9, 5)

    def encode_words(self, names: list[list[int]]) -> Tensor:
        return torch.stack([self.words(torch.tensor(name)).mean(dim=0) for name in names])


def images(ctx: RankContext, stage: int, settings: dict[str, Any]) -> None:
    def columns(rank: int) -> tuple[Tensor, list[list[int]]]:
        pixels = ctx.data(ROWS[rank], 1, 4, 4, key=rank, rank=rank, dtype=torch.float64)
        return pixels, [[row % 9] * (row % 3 + 1) for row in range(rank, rank + ROWS[rank])]

    model = ImagesAndNames().double()
    pixels, names = zip(*[columns(rank) for rank in range(ctx.world_size)], strict=True)
    every_name = [name for own in names for name in own]
    SigLIP()(model.image(torch.cat(pixels)), model.encode_words(every_name)).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model = ImagesAndNames().double()
    engine = start(ctx, model, stage, zero={"reduce_bucket_size": 20})
    encoders: list[Any] = [model.image, model.encode_words]
    GradCache(engine, SigLIP(), encoders=encoders, **settings)(*columns(ctx.rank))
    assert_is(engine, grads, 1e-12)


@pytest.mark.parametrize("settings", [{"mini_batch_size": 2}, {"mini_batch_tokens": 3}])
@pytest.mark.parametrize("stage", [0, 3])
def test_images_and_lists(stage: int, settings: dict[str, Any]) -> None:
    pool_for(2).run(images, stage=stage, settings=settings)


def autocast(ctx: RankContext, stage: int) -> None:
    """In a user's own context, which caches weights in the first pass, without graphs."""
    found = []
    for keep in (0, 100):
        model = TwoTowers()
        engine, cache = cached(ctx, stage, InfoNCE(), model, mini_batch_size=2, keep_graphs=keep)
        with torch.autocast("cpu", torch.bfloat16):
            value = float(cache(*batch_of(ctx, ctx.rank)))
        engine.reduce_gradients()
        found.append((value, [engine.full_grad(param) for param in model.parameters()]))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one is not None
        assert one.any()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stage", STAGES)
def test_autocast(stage: int) -> None:
    pool_for(2).run(autocast, stage=stage)


def frozen(ctx: RankContext, stage: int) -> None:
    model, plain_model = TwoTowers().double(), TwoTowers().double()
    for one in (model, plain_model):
        one.document.requires_grad_(False)
    _, grads = reference(ctx, plain_model, InfoNCE())
    engine, cache = cached(ctx, stage, InfoNCE(), model, mini_batch_size=2)
    calls = 0

    def counted(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model.document.register_forward_hook(counted)
    cache(*batch_of(ctx, ctx.rank))
    assert_is(engine, grads, 1e-12)
    assert calls == -(-len(batch_of(ctx, ctx.rank)[0]["tokens"]) // 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_tower_is_not_encoded_again(stage: int) -> None:
    pool_for(2).run(frozen, stage=stage)


def frozen_chunk(ctx: RankContext, stage: int, keep: int, which: int) -> None:
    """A chunk of the documents has no graph, and the others of its column have one."""
    queries, documents = batch_of(ctx, ctx.rank)
    is_frozen = torch.zeros(len(documents["tokens"]), dtype=torch.bool)
    is_frozen[2 * which : 2 * which + 2] = True
    model = TwoTowers().double()
    whole = model.encode_document(documents)
    held = torch.where(is_frozen[:, None], whole.detach(), whole)
    InfoNCE()(model.encode_query(queries), held).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model = TwoTowers().double()

    def encode_document(chunk: dict[str, Tensor]) -> Tensor:
        found = model.document(chunk["tokens"], chunk["attention_mask"])
        return found.detach() if chunk["is_frozen"].all() else found

    encoders = [model.query, encode_document]
    engine, cache = cached(
        ctx, stage, InfoNCE(), model, mini_batch_size=2, keep_graphs=keep, encoders=encoders
    )
    cache(queries, documents | {"is_frozen": is_frozen})
    assert_is(engine, grads, 1e-12)


@pytest.mark.parametrize("which", [0, 2], ids=["first", "last"])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_chunk_without_a_graph(stage: int, keep: int, which: int) -> None:
    pool_for(1).run(frozen_chunk, stage=stage, keep=keep, which=which)


def with_ids(ctx: RankContext, stage: int) -> None:
    """Rows of several ranks are about the same thing, and are no negatives for each other."""
    own = [torch.arange(ROWS[rank]) % 3 for rank in range(ctx.world_size)]
    model = TwoTowers().double()
    embeddings = [model.query(**whole_batch(ctx)[0]), model.document(**whole_batch(ctx)[1])]
    value = InfoNCE()(*embeddings, ids=torch.cat(own))
    assert value != InfoNCE()(*embeddings)
    value.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    engine, cache = cached(ctx, stage, InfoNCE(), TwoTowers().double(), mini_batch_size=2)
    found = cache(*batch_of(ctx, ctx.rank), ids=own[ctx.rank])
    assert abs(float(found) - float(value)) <= 1e-12 * abs(float(value))
    assert_is(engine, grads, 1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_ids_are_gathered(stage: int) -> None:
    pool_for(3).run(with_ids, stage=stage)


def accumulated(ctx: RankContext, stage: int) -> None:
    """Two batches in one outer window, and the mean over two micro-steps."""
    _, grads = reference(ctx, TwoTowers().double(), InfoNCE(), keys=(0, 1))
    engine, cache = cached(ctx, stage, InfoNCE(), TwoTowers().double(), mini_batch_size=2)
    mark = engine.ledger.mark()
    with engine.coalesce_grad_reduction():
        for key in (0, 1):
            cache(*batch_of(ctx, ctx.rank, key))
    assert_is(engine, grads, 1e-12)
    reductions = sum(unit.spec.is_trainable for unit in engine.parts.units)
    sent = counts(engine, mark)
    assert sent.get("reduce_scatter", 0) + sent.get("all_reduce", 0) == reductions


@pytest.mark.parametrize("stage", STAGES)
def test_windows_around_it(stage: int) -> None:
    pool_for(2).run(accumulated, stage=stage)


def narrow(ctx: RankContext, stage: int, precision: str) -> None:
    own = InfoNCE(learnable_scale=True)
    _, grads = reference(ctx, TwoTowers(own).double(), own)
    loss = InfoNCE(learnable_scale=True)
    config: dict[str, Any] = {"bf16": {"enabled": True}}
    if precision == "fp16":
        config = {"fp16": {"enabled": True, "initial_scale_power": 10}}
    engine, cache = cached(ctx, stage, loss, TwoTowers(loss), mini_batch_size=2, config=config)
    cache(*batch_of(ctx, ctx.rank))
    wanted = {name: grad.float() for name, grad in grads.items()}
    engine.reduce_gradients()
    for name, param in engine.module.named_parameters():
        grad = engine.full_grad(param)
        if grad is None or name not in wanted:
            continue
        error = (grad.float() - wanted[name]).norm() / wanted[name].norm()
        # 2 ** -8 and 2 ** -11 are one rounding; there are some ten between input and gradient.
        assert error < (0.1 if precision == "bf16" else 0.02), (name, float(error))
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_sixteen_bits(stage: int, precision: str) -> None:
    pool_for(2).run(narrow, stage=stage, precision=precision)


def two_engines(ctx: RankContext, stage: int) -> None:
    _, grads = reference(ctx, TwoTowers().double(), InfoNCE())
    model = TwoTowers().double()
    engines = [start(ctx, model.query, stage), start(ctx, model.document, stage)]
    cache = GradCache(engines, InfoNCE(), mini_batch_size=2)
    cache(*batch_of(ctx, ctx.rank))
    for engine, prefix in zip(engines, ("query.", "document."), strict=True):
        own = {n.removeprefix(prefix): g for n, g in grads.items() if n.startswith(prefix)}
        assert_is(engine, own, 1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_per_tower(stage: int) -> None:
    pool_for(2).run(two_engines, stage=stage)
