"""LoRA adapters through ``peft``: a frozen base, trained adapters, and a head of its own.

A small BERT from a config. ``peft`` keeps the head twice (``modules_to_save``): a frozen original
that no forward uses, and the copy that is trained.
"""

import copy
import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests import rig
from tests.cases.modes import (
    Reference,
    assert_num_reductions,
    assert_traffic,
    num_units,
    run,
    usual,
)
from tests.harness import RankContext, distributed

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft"),
    pytest.mark.slow,  # each rank imports the library once, which takes seconds
]
BACKWARDS, ROWS, TOKENS, WORDS, LABELS = 3, 2, 5, 17, 3
KINDS = [
    ("window", None),
    ("bare", "non_reentrant"),
    ("armed", "non_reentrant"),
    ("window", "reentrant"),
]


def make_model(recompute: str | None = None) -> Any:
    """The same on every rank; fp64, no dropout, adapters whose B is not zero at the start.

    Imported here, because it takes seconds that only the workers need to spend.
    """
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=LABELS,
        attn_implementation="eager",
    )
    base = BertForSequenceClassification(config)
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=2,
        lora_alpha=4,
        target_modules=["query", "value"],
        init_lora_weights=False,
    )
    model: Any = get_peft_model(base, lora).double().train()
    if recompute is not None:
        model.enable_input_require_grads()  # as peft asks for: the frozen embeddings cut the graph
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": recompute == "reentrant"}
        )
    return model


def loss_of(model: nn.Module, rank: int, k: int) -> Tensor:
    """The mean cross entropy of one rank's rows for backward ``k``."""
    generator = torch.Generator().manual_seed(100 * rank + k)
    tokens = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
    labels = torch.randint(LABELS, (ROWS,), generator=generator)
    loss: Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


def loss_at(step: int, model: nn.Module, rank: int, k: int) -> Tensor:
    """Other data in every step."""
    return loss_of(model, rank, 10 * step + k)


def is_trained(name: str) -> bool:
    return "lora_" in name or "modules_to_save" in name


def assert_close(found: Tensor | None, wanted: Tensor | None, what: str) -> None:
    """Equal up to the rounding of fp64 sums of some hundred terms of order 1 in another order."""
    assert found is not None, what
    assert wanted is not None, what
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=f"{what} differs")


def reduced_bytes(engine: onefold.Engine, stage: int, world_size: int) -> int:
    """What a rank sends for one reduction of the adapters, each padded to 64 bytes and to W."""
    units = [unit for unit in engine.plan.units if unit.is_trainable]
    whole = sum(unit.layout.numel * unit.dtype.itemsize for unit in units)
    times = 2 if stage == 0 else 1  # an all-reduce is a reduce-scatter and an all-gather
    return times * whole * (world_size - 1) // world_size


def start(ctx: RankContext, stage: int, recompute: str | None = None) -> onefold.Engine:
    model = make_model(recompute)
    engine = rig.start(ctx, model, stage)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained == [name for name, _ in model.named_parameters() if is_trained(name)]
    planned = [slot.name for u in engine.plan.units if u.is_trainable for slot in u.slots]
    assert sorted(planned) == sorted(trained)
    return engine


@pytest.mark.parametrize("stage", rig.STAGES)
@pytest.mark.parametrize(("mode", "recompute"), KINDS)
@distributed(world_size=2, timeout_s=180)
def test_training(ctx: RankContext, stage: int, mode: str, recompute: str | None) -> None:
    """Two steps: adapters as in one process, the base bit-equal, and nothing else on the wire."""
    reference = Reference(make_model(), ctx.world_size)
    first = copy.deepcopy(reference.module.state_dict())
    engine = start(ctx, stage, recompute)
    model = engine.module
    for step in range(2):
        reference.module.zero_grad()
        reference.backward(partial(loss_at, step), BACKWARDS)
        mark = engine.ledger.mark()
        losses = [partial(loss_at, step, model, ctx.rank, k) for k in range(BACKWARDS)]
        run(engine, mode, losses)
        engine.reduce_gradients()
        _assert_reduced(ctx, engine, stage, mode, mark)
        wanted = dict(reference.module.named_parameters())
        for name, param in model.named_parameters():
            if is_trained(name):
                assert_close(engine.full_grad(param), wanted[name].grad, f"gradient of {name}")
            else:
                assert param.grad is None, name
        engine.step()
        _assert_weights(engine, reference.after_sgd(), first)
    rig.assert_ranks_equal(engine)


def _assert_reduced(
    ctx: RankContext, engine: onefold.Engine, stage: int, mode: str, mark: Any
) -> None:
    """Trainable units alone, once per step, or per backward where a bare one reduces as it goes."""
    times = BACKWARDS if mode == "bare" and stage >= 2 else 1
    assert_num_reductions(engine, stage, mark, times * num_units(engine))
    kind = "all_reduce" if stage == 0 else "reduce_scatter"
    sent = engine.ledger.since(mark)[kind].bytes_out
    assert sent == times * reduced_bytes(engine, stage, ctx.world_size)


def _assert_weights(
    engine: onefold.Engine, wanted: dict[str, Tensor], first: dict[str, Tensor]
) -> None:
    found = rig.weights(engine)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        if is_trained(name):
            assert_close(tensor, wanted[name], name)
            assert not torch.equal(tensor, first[name]), f"{name} was not trained"
        else:
            assert torch.equal(tensor, first[name]), f"{name} of the base has changed"


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_a_window_gathers_the_base_once(ctx: RankContext, stage: int) -> None:
    """Every collective of a step, by kind; the frozen base is gathered at stage 3 only."""
    engine = start(ctx, stage, "non_reentrant")
    mark = engine.ledger.mark()
    run(engine, "window", [partial(loss_of, engine.module, ctx.rank, k) for k in range(BACKWARDS)])
    engine.step()
    assert_traffic(engine, mark, usual(ctx, engine, stage, "window", BACKWARDS))


@distributed(world_size=2)
def test_the_base_is_sharded_too(ctx: RankContext) -> None:
    """At stage 3 a rank keeps half of every unit, and the optimizer knows the adapters alone."""
    engine = start(ctx, 3)
    model = engine.module
    frozen = [unit for unit in engine._units if not unit.spec.is_trainable]
    numel = sum(param.numel() for name, param in model.named_parameters() if not is_trained(name))
    assert sum(slot.param.numel() for unit in frozen for slot in unit.slots) == numel
    for _ in range(2):
        for unit in frozen:
            assert unit.param_full.untyped_storage().nbytes() == 0, unit.name
            assert unit.param_shard.numel() * ctx.world_size == unit.layout.numel
            assert unit.gradients.grad_full is None
            assert unit.gradients.grad_shard is None
        for name, param in model.named_parameters():
            assert param.isnan().all(), f"{name} is not freed"
        run(engine, "bare", [partial(loss_of, model, ctx.rank, 0)])
        engine.step()
    pieces = [piece for group in engine.optimizer.param_groups for piece in group["params"]]
    held = sum(piece.numel() for piece in pieces)
    trained = sum(param.numel() for name, param in model.named_parameters() if is_trained(name))
    assert sum(rig.gathered(held)) == trained


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_reading_without_and_with_merged_adapters(ctx: RankContext, stage: int) -> None:
    """Inside ``full_parameters()``: the base alone, and adapters merged into it and taken out."""
    reference = Reference(make_model(), ctx.world_size)
    reference.backward(loss_of, BACKWARDS)
    engine = start(ctx, stage)
    model: Any = engine.module
    run(engine, "window", [partial(loss_of, model, ctx.rank, k) for k in range(BACKWARDS)])
    engine.step()
    reference.after_sgd()
    plain: Any = reference.module
    before = rig.weights(engine)
    with torch.no_grad(), engine.full_parameters():
        trained = loss_of(model, 0, 0)
        assert_close(trained, loss_of(plain, 0, 0), "the loss with adapters")
        with model.disable_adapter(), plain.disable_adapter():
            base = loss_of(model, 0, 0)
            assert torch.equal(base, loss_of(plain, 0, 0))
        assert not torch.allclose(base, trained)
    _assert_same(before, rig.weights(engine))  # reading is not writing
    with torch.no_grad(), engine.full_parameters():
        model.merge_adapter()
        assert_close(loss_of(model, 0, 0), trained, "the loss with merged adapters")
    merged = rig.weights(engine)
    name = "base_model.model.bert.encoder.layer.0.attention.self.query.base_layer.weight"
    assert not torch.allclose(merged[name], before[name]), "the write did not reach the masters"
    with torch.no_grad(), engine.full_parameters():
        model.unmerge_adapter()
    for key, tensor in rig.weights(engine).items():
        assert_close(tensor, before[key], key)  # (base + delta) - delta rounds
    rig.assert_ranks_equal(engine)


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_the_file_of_an_adapter(ctx: RankContext, stage: int) -> None:
    """What ``save_pretrained`` writes, read inside ``full_parameters()``: adapters and head."""
    from peft import get_peft_model_state_dict

    reference = Reference(make_model(), ctx.world_size)
    reference.backward(loss_of, BACKWARDS)
    engine = start(ctx, stage)
    model: Any = engine.module
    run(engine, "window", [partial(loss_of, model, ctx.rank, k) for k in range(BACKWARDS)])
    engine.step()
    reference.after_sgd()
    if stage == 3:
        with pytest.raises(onefold.StateError, match="full_state_dict"):
            get_peft_model_state_dict(model)
    with engine.full_parameters():
        found = {name: t.detach().clone() for name, t in get_peft_model_state_dict(model).items()}
    wanted = get_peft_model_state_dict(reference.module)
    assert found.keys() == wanted.keys()
    trained = [name for name, _ in model.named_parameters() if is_trained(name)]
    assert len(found) == len(trained)
    for name, tensor in found.items():
        assert_close(tensor, wanted[name], name)


def _assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("stage", rig.STAGES)
@distributed(world_size=2)
def test_one_adapter_at_a_time(ctx: RankContext, stage: int) -> None:
    """Two adapters in the optimizer, one active: the other one's weights and moments rest."""
    model: Any = make_model()
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    model.double()
    params = [param for name, param in model.named_parameters() if is_trained(name)]
    adam = partial(torch.optim.AdamW, lr=0.125, weight_decay=0.25)
    model.set_adapter("default")
    engine = rig.start(ctx, model, stage, optimizer=adam, model_parameters=params)
    for active in ("default", "other"):
        model.set_adapter(active)
        before = rig.weights(engine)
        run(engine, "window", [partial(loss_of, model, ctx.rank, k) for k in range(BACKWARDS)])
        engine.step()
        for name, tensor in rig.weights(engine).items():
            rests = not name.endswith((f".{active}.weight", f".{active}.bias"))
            assert torch.equal(tensor, before[name]) == rests, f"{name}, active is {active}"
    rig.assert_ranks_equal(engine)
