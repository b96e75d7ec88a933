"""Contract 8, loud: settings that cannot work are refused at initialize, alike on every rank."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer

import onefold
from onefold.moe import MoE
from tests import rig
from tests.harness import RankContext, distributed

CPU = {"device": "cpu"}
SETTINGS: dict[str, dict[str, Any]] = {
    "precision and the other": {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
    "offload of stage 0": {"zero_optimization": {"stage": 0, "offload_optimizer": CPU}},
    "parameter offload of stage 2": {"zero_optimization": {"stage": 2, "offload_param": CPU}},
    "unknown scaler key": {"fp16": {"enabled": True, "loss_scale_windows": 10}},
    "negative scale": {"fp16": {"enabled": True, "loss_scale": -1}},
    "narrow sum of another kind": {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp16"},
    },
    "autocast of bf16": {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}},
    "policy": {"onefold": {"on_nonfinite": "shrug"}},
    "order": {"onefold": {"norm_order": 0.5}},
}
SAID = {
    "precision and the other": "fp16",
    "offload of stage 0": "offload_optimizer",
    "parameter offload of stage 2": "offload_param",
    "unknown scaler key": "loss_scale_window",
    "negative scale": "loss_scale",
    "narrow sum of another kind": "grad_accum_dtype",
    "autocast of bf16": "torch_autocast",
    "policy": "on_nonfinite",
    "order": "norm_order",
}


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_one_clear_error_on_every_rank(ctx: RankContext, name: str) -> None:
    with pytest.raises(ValueError, match=SAID[name]) as refused:
        onefold.initialize(model=rig.House(), optimizer=plain, config=SETTINGS[name])
    assert "1 problem:" in str(refused.value), "one error, and one line for it"
    assert len(set(rig.gathered(str(refused.value)))) == 1


def plain(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=1.0)


class SignSGD(Optimizer):
    """Elementwise, and none of torch's."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad.sign())


class FusedLAMB(AdamW):
    """What other libraries call theirs."""


def whole_matrices(params: Any) -> Optimizer:
    return Muon([param for param in params if param.ndim == 2])


OPTIMIZERS: dict[str, Any] = {
    "SignSGD": SignSGD,
    "Adafactor": Adafactor,
    "Muon": whole_matrices,
    "LBFGS": torch.optim.LBFGS,
    "FusedLAMB": FusedLAMB,
}


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers_that_look_at_whole_parameters(ctx: RankContext, name: str) -> None:
    model = nn.Linear(3, 3, bias=False)
    with pytest.raises(ValueError, match=name):
        rig.start(ctx, model, 2, optimizer=OPTIMIZERS[name])
    if name == "SignSGD":
        engine = rig.start(ctx, model, 2, optimizer=SignSGD, elementwise=True)
        before = rig.weights(engine)["weight"]
        engine.backward(model(torch.ones(1, 3)).sum())
        engine.step()
        assert torch.equal(rig.weights(engine)["weight"], before - 1.0)
    else:
        with pytest.raises(ValueError, match=name):
            rig.start(ctx, model, 2, optimizer=OPTIMIZERS[name], elementwise=True)


@distributed(world_size=[1, 2])
def test_experts_that_do_not_divide_the_ranks(ctx: RankContext) -> None:
    model = nn.Sequential(MoE(4, lambda: nn.Linear(4, 4), 3, ep_size=3))
    with pytest.raises(ValueError, match="do not divide"):
        rig.start(ctx, model, 1)
