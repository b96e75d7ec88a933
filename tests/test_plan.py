"""The plan: blocks, units, order and notes, without any rank."""

import pytest
import torch
from torch import nn

from onefold.config import Config
from onefold.plan import Plan, build_plan
from onefold.wire.grid import Grid
from tests.rig import Tower


def plan_of(
    module: nn.Module, stage: int, world_size: int = 2, *, frozen: bool = False, **onefold: object
) -> Plan:
    zero = {"stage": stage, **onefold.pop("zero", {})}  # type: ignore[dict-item]
    config = Config.load({"zero_optimization": zero, "onefold": onefold})
    trainable = [p for p in module.parameters() if p.requires_grad or not frozen]
    return build_plan(module, config, trainable, Grid(("shard",), (world_size,)))


def names(plan: Plan) -> list[list[str]]:
    return [[slot.name for slot in unit.slots] for unit in plan.units]


def test_buckets_go_backwards_and_respect_the_size() -> None:
    plan = plan_of(Tower(), 1, zero={"reduce_bucket_size": 42})
    flat = [name for unit in names(plan) for name in unit]
    assert flat == [name for name, _ in reversed(list(Tower().named_parameters()))]
    for unit in plan.units:
        sizes = [slot.param.numel() for slot in unit.slots]
        assert len(sizes) == 1 or sum(sizes) <= 42


def test_a_large_bucket_is_cut_to_a_quarter_and_said() -> None:
    plan = plan_of(Tower(), 2, zero={"reduce_bucket_size": 10_000_000})
    total = sum(param.numel() for param in Tower().parameters())
    assert len(plan.units) >= 4
    assert any(f"using {total // 4}" in note for note in plan.notes)


def test_repeated_blocks_come_last_first_and_the_root_at_the_end() -> None:
    plan = plan_of(Tower(layers=3), 3)
    assert [block.name for block in plan.blocks] == ["layers.2", "layers.1", "layers.0", "root"]
    assert names(plan)[-1] == [
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
    ]


def test_named_classes_decide_the_blocks() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.right = nn.LayerNorm(2)

    plan = plan_of(nn.Sequential(Pair(), Pair()), 3, block_classes=["LayerNorm"])
    assert [block.name for block in plan.blocks] == ["1.right", "0.right", "root"]


def test_lists_of_lists_are_looked_into() -> None:
    model = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2)])
    assert [block.name for block in plan_of(model, 3).blocks] == ["1", "0.1", "0.0"]


def test_tied_parameters_live_once_in_the_block_of_their_common_ancestor() -> None:
    model = Tower()
    model.layers[0].weight = model.layers[2].weight  # tied between two repeated blocks
    plan = plan_of(model, 3)
    root = names(plan)[-1]
    assert "layers.0.weight" in root
    assert sum("weight" in name for unit in names(plan) for name in unit) == 5


def test_units_split_by_dtype_and_trainability() -> None:
    model = Tower(dtype=torch.float32)
    model.layers[1].weight.requires_grad_(False)
    model.layers[2].double()
    plan = plan_of(model, 3, frozen=True)
    kinds = {(unit.name, unit.dtype, unit.is_trainable) for unit in plan.units}
    assert ("layers.1/0", torch.float32, False) in kinds
    assert ("layers.1/1", torch.float32, True) in kinds
    assert ("layers.2", torch.float64, True) in kinds


def test_own_strides_are_kept() -> None:
    model = nn.Conv2d(4, 6, 3)
    model.weight.data = model.weight.data.to(memory_format=torch.channels_last)
    (unit,) = {u for u in plan_of(model, 3).units if u.slots[0].name == "weight"}
    assert unit.slots[0].stride == model.weight.stride() != (36, 9, 3, 1)


def test_sparse_gradients_and_half_precision_are_refused_together() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2).half())
    with pytest.raises(ValueError, match="sparse=True") as refused:
        plan_of(model, 0)
    assert "1.weight is trainable and of dtype torch.float16" in str(refused.value)


def test_parameters_in_no_group_are_frozen_and_said() -> None:
    model = Tower()
    config = Config.load({"zero_optimization": {"stage": 1}})
    plan = build_plan(model, config, list(model.head.parameters()), Grid(("shard",), (2,)))
    trainable = [s.name for unit in plan.units if unit.is_trainable for s in unit.slots]
    assert trainable == ["head.bias", "head.weight"]
    assert any("9 parameter(s)" in note and "embed.weight" in note for note in plan.notes)


def test_fingerprint_tells_models_apart() -> None:
    assert plan_of(Tower(), 3).fingerprint() == plan_of(Tower(), 3).fingerprint()
    assert plan_of(Tower(), 3).fingerprint() != plan_of(Tower(width=7), 3).fingerprint()
    assert plan_of(Tower(), 2).fingerprint() != plan_of(Tower(), 1).fingerprint()
