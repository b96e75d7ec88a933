import math
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from onefold.config import Entry
from onefold.optim.entries import build_optimizer, build_scheduler


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(4))


def optimizer_of(type_: str, **params) -> torch.optim.Optimizer:
    return build_optimizer(Entry(type=type_, params=params), [parameter()])


def run(scheduler: lr_scheduler.LRScheduler, count: int, key: str = "lr") -> list:
    """Return what update 0, 1, ... run with."""
    optimizer = scheduler.optimizer
    seen = []
    for _ in range(count):
        seen.append(optimizer.param_groups[0][key])
        optimizer.step()
        scheduler.step()
    return seen


def curve(type_: str, count: int, optimizer: torch.optim.Optimizer | None = None, **params) -> list:
    optimizer = optimizer or optimizer_of("Adam", lr=0.5)
    return run(build_scheduler(Entry(type=type_, params=params), optimizer), count)


@pytest.mark.parametrize(
    "name",
    ["SGD", "sgd", "RMSprop", "adagrad", "NAdam", "RAdam", "ADAMAX", "Adadelta", "ASGD", "Rprop"],
)
def test_torch_optimizers_by_name_in_any_case(name):
    optimizer = optimizer_of(name, lr=0.25)
    assert type(optimizer).__name__.lower() == name.lower()
    assert optimizer.defaults["lr"] == 0.25


@pytest.mark.parametrize(
    ("name", "flags", "cls", "decay"),
    [
        ("Adam", {}, torch.optim.AdamW, 0.0),
        ("adam", {"adam_w_mode": True}, torch.optim.AdamW, 0.0),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("AdamW", {}, torch.optim.AdamW, 0.0),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, 0.0),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("AdamW", {"weight_decay": 0.3}, torch.optim.AdamW, 0.3),
        ("Adam", {"bias_correction": True, "fp32_optimizer_states": True}, torch.optim.AdamW, 0.0),
    ],
)
def test_adam_means_what_it_means_in_deepspeed(name, flags, cls, decay):
    optimizer = optimizer_of(name, lr=0.1, **flags)
    assert type(optimizer) is cls
    assert optimizer.defaults["weight_decay"] == decay


def test_auto_counts_as_not_given_and_lists_become_tuples():
    optimizer = optimizer_of("AdamW", lr="auto", weight_decay="auto", betas=[0.8, 0.9])
    assert optimizer.defaults["lr"] == 1e-3
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["weight_decay"] == 0.0


def test_parameter_groups_are_handed_on():
    groups: list[dict[str, Any]] = [{"params": [parameter()], "lr": 1.0}, {"params": [parameter()]}]
    optimizer = build_optimizer(Entry(type="SGD", params={"lr": 0.5}), groups)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]


@pytest.mark.parametrize(
    "name",
    [
        *("Lamb", "LBFGS", "Muon", "Adafactor", "MuAdam", "Lion"),
        *("OneBitAdam", "ZeroOneAdam", "OneBitLamb", "SparseAdam"),
    ],
)
def test_optimizers_that_are_not_elementwise_are_refused_by_name(name):
    with pytest.raises(ValueError, match="expected an elementwise optimizer") as caught:
        optimizer_of(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("AdmW", {}, "optimizer.type: got 'AdmW'.*nearest is 'AdamW'"),
        ("SGD", {"momentun": 0.9}, r"optimizer.params.momentun: SGD has no .* is 'momentum'"),
        ("SGD", {"adam_w_mode": True}, "optimizer.params.adam_w_mode: SGD has no such"),
        ("SGD", {"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm.*gradient_clipping"),
        ("SGD", {"lr": -1.0}, "optimizer: SGD refused .*'lr': -1.0"),
        ("SGD", {"lr": "fast"}, "optimizer: SGD refused .*fast"),
        ("Adam", {"bias_correction": False}, "optimizer.params.bias_correction: .*got False"),
        ("Adam", {"adam_w_mode": "yes"}, "optimizer.params.adam_w_mode: .*got 'yes'"),
    ],
)
def test_wrong_optimizer_entries_name_the_key(name, params, says):
    with pytest.raises(ValueError, match=says):
        optimizer_of(name, **params)


def test_warmup_log_is_the_logarithm_of_the_update():
    expected = [0.1] + [
        0.1 + 0.4 * min(1.0, math.log(index + 1) / math.log(5)) for index in range(9)
    ]
    got = curve("WarmupLR", 10, warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=5)
    assert got == pytest.approx(expected)


def test_warmup_linear_starts_twice_at_the_minimum_and_ends_at_the_optimizers_own_lr():
    got = curve("warmuplr", 7, warmup_num_steps=4, warmup_type="linear", warmup_max_lr="auto")
    assert got == pytest.approx([0.0, 0.0, 0.125, 0.25, 0.375, 0.5, 0.5])


def test_warmup_of_one_update_lasts_two():
    got = curve("WarmupLR", 4, warmup_num_steps=1, warmup_max_lr=1.0, warmup_type="linear")
    assert got == pytest.approx([0.0, 0.0, 0.5, 1.0])


def test_warmup_decay_falls_to_the_minimum_at_the_end():
    got = curve(
        "WarmupDecayLR",
        12,
        total_num_steps=8,
        warmup_min_lr=0.2,
        warmup_max_lr=1.0,
        warmup_num_steps=4,
        warmup_type="linear",
    )
    rise = [0.2 + 0.8 * index / 4 for index in range(4)]
    fall = [0.2 + 0.8 * max(0, 8 - index) / 4 for index in range(4, 11)]
    assert got == pytest.approx([0.2, *rise, *fall])


def test_warmup_decay_has_a_maximum_of_its_own_by_default():
    got = curve("WarmupDecayLR", 4, total_num_steps=9, warmup_num_steps=2, warmup_type="linear")
    assert got == pytest.approx([0.0, 0.0, 0.0005, 0.001])


def test_warmup_cosine_scales_the_optimizers_own_lr():
    got = curve(
        "WarmupCosineLR",
        14,
        total_num_steps=10,
        warmup_min_ratio=0.2,
        warmup_num_steps=4,
        cos_min_ratio=0.1,
        warmup_type="linear",
    )
    rise = [0.2 + 0.8 * index / 4 for index in range(4)]
    fall = [
        0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, (index - 4 + 1) / 6))) / 2
        for index in range(4, 13)
    ]
    assert got == pytest.approx([0.5 * ratio for ratio in (0.0, *rise, *fall)])
    assert got[-1] == pytest.approx(0.5 * 0.1)


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test_grows_by_the_rate_every_interval(staircase):
    got = curve(
        "LRRangeTest",
        9,
        lr_range_test_min_lr=0.01,
        lr_range_test_step_size=4,
        lr_range_test_step_rate=3.0,
        lr_range_test_staircase=staircase,
    )
    steps = [update // 4 if staircase else update / 4 for update in range(9)]
    assert got == pytest.approx([0.01 * (1 + 3 * interval) for interval in steps])


CYCLE: dict[str, Any] = {
    "cycle_min_lr": 0.1,
    "cycle_max_lr": 0.5,
    "cycle_first_step_size": 4,
    "cycle_second_step_size": 2,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
}


def cycle_scheduler(**more) -> lr_scheduler.LRScheduler:
    entry = Entry(type="OneCycle", params={**CYCLE, **more})
    return build_scheduler(entry, optimizer_of("Adam", lr=0.3))


def test_one_cycle_rises_falls_and_decays():
    got = run(cycle_scheduler(decay_step_size=2, decay_lr_rate=0.5), 10)
    decay = [0.1 / (1 + 0.5 * update / 2) for update in (1, 2, 3)]
    assert got == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, *decay])


def test_one_cycle_runs_beta1_against_the_lr():
    got = run(cycle_scheduler(decay_step_size=2, decay_mom_rate=0.1), 9, "betas")
    assert {beta2 for _, beta2 in got} == {0.99}
    decay = [0.9 * (1 + 0.1 * update / 2) for update in (1, 2)]
    # The first update runs with the minimum, as in DeepSpeed; the second is on the curve.
    expected = [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, *decay]
    assert [beta1 for beta1, _ in got] == pytest.approx(expected)


def test_one_cycle_stays_at_the_minimum_without_decay():
    assert run(cycle_scheduler(), 12)[6:] == pytest.approx([0.1] * 6)


def test_one_cycle_in_stairs():
    got = run(cycle_scheduler(cycle_first_stair_count=2, cycle_second_stair_count=1), 7)
    assert got == pytest.approx([0.1, 0.1, 0.3, 0.3, 0.5, 0.1, 0.1])


def test_one_cycle_without_momentum_leaves_betas_alone():
    scheduler = cycle_scheduler(cycle_momentum=False)
    assert run(scheduler, 3, "betas") == [(0.9, 0.999)] * 3


def test_one_cycle_of_momentum_needs_betas():
    sgd = optimizer_of("SGD", lr=0.1)
    with pytest.raises(ValueError, match="cycle_momentum: SGD has no betas"):
        build_scheduler(Entry(type="OneCycle", params=CYCLE), sgd)
    assert sgd.param_groups[0]["lr"] == 0.1
    assert curve("OneCycle", 2, sgd, **CYCLE, cycle_momentum=False) == pytest.approx([0.1, 0.2])


def test_one_value_for_each_group():
    groups = [{"params": [parameter()]}, {"params": [parameter()]}]
    optimizer = build_optimizer(Entry(type="SGD", params={"lr": 0.5}), groups)
    params = {"warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 2, "warmup_type": "linear"}
    scheduler = build_scheduler(Entry(type="WarmupLR", params=params), optimizer)
    run(scheduler, 3)
    assert scheduler.get_last_lr() == pytest.approx([0.1, 0.2])
    with pytest.raises(ValueError, match="one for each of the 2 parameter groups"):
        build_scheduler(Entry(type="WarmupLR", params={"warmup_max_lr": [1.0]}), optimizer)


def test_state_is_the_position_and_continues_the_curve():
    params: dict[str, Any] = {"warmup_num_steps": 8, "warmup_max_lr": 1.0, "warmup_type": "linear"}
    whole = curve("WarmupLR", 8, **params)
    first, second = (
        build_scheduler(Entry(type="WarmupLR", params=params), optimizer_of("Adam"))
        for _ in range(2)
    )
    assert isinstance(first, lr_scheduler.LRScheduler)
    run(first, 4)
    state = first.state_dict()
    assert set(state) == {"last_epoch", "_step_count", "_last_lr"}
    second.load_state_dict(state)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert run(second, 4) == pytest.approx(whole[4:])


def test_a_tensor_lr_is_filled_in_place():
    lr = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([parameter()], lr=lr)
    build_scheduler(Entry(type="LRRangeTest", params={"lr_range_test_min_lr": 0.25}), optimizer)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25


@pytest.mark.parametrize(
    ("name", "params", "cls"),
    [
        ("StepLR", {"step_size": 2}, lr_scheduler.StepLR),
        ("cosineannealinglr", {"T_max": 5, "eta_min": "auto"}, lr_scheduler.CosineAnnealingLR),
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 5}, lr_scheduler.OneCycleLR),
        ("MultiStepLR", {"milestones": [1, 2]}, lr_scheduler.MultiStepLR),
        ("LambdaLR", {"lr_lambda": float}, lr_scheduler.LambdaLR),
    ],
)
def test_torch_schedulers_by_name_in_any_case(name, params, cls):
    scheduler = build_scheduler(Entry(type=name, params=params), optimizer_of("Adam", lr=0.5))
    assert type(scheduler) is cls


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("WarmUpLRR", {}, "scheduler.type: got 'WarmUpLRR'.*nearest is 'WarmupLR'"),
        ("LRScheduler", {}, "scheduler.type: got 'LRScheduler'"),
        ("WarmupLR", {"warmup_steps": 3}, "params.warmup_steps: no such .*'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "params.warmup_num_steps: .*greater than 0, got 0"),
        ("WarmupLR", {"warmup_type": "cubic"}, "params.warmup_type: .*'log' or 'linear'"),
        ("WarmupLR", {"last_batch_iteration": 5}, "params.last_batch_iteration: .*got 5"),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, "params.total_num_steps: needed"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "params.cycle_max_lr: needed"),
        ("StepLR", {}, "scheduler.params.step_size: StepLR needs it"),
        ("StepLR", {"step_sise": 1}, "scheduler.params.step_sise: StepLR has no .*'step_size'"),
        ("OneCycleLR", {"max_lr": 1.0}, "scheduler: OneCycleLR refused .*total_steps"),
    ],
)
def test_wrong_scheduler_entries_name_the_key(name, params, says):
    with pytest.raises(ValueError, match=says):
        build_scheduler(Entry(type=name, params=params), optimizer_of("Adam"))
