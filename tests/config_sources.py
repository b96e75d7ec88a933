"""What the tests of the config share: a full source, shorthands for small ones, its problems."""

from typing import Any

import pytest

from onefold.config import Config


def problems(source) -> str:
    with pytest.raises(ValueError, match="problem") as caught:
        Config.load(source)
    return str(caught.value)


def loaded(**source) -> Config:
    return Config.load({"gradient_clipping": 0.0, **source})


def nest(path: str, value: object) -> dict:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value  # type: ignore[return-value]


def zero(**keys) -> dict:
    return {"zero_optimization": keys}


def on(**keys) -> dict:
    return {"enabled": True, **keys}


def cpu(what: str, **keys) -> dict:
    return {f"offload_{what}": {"device": "cpu", **keys}}


PARAM, OPTIMIZER = "zero_optimization.offload_param", "zero_optimization.offload_optimizer"

FULL: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "managed_gradient_accumulation": False,
    "gradient_clipping": 1,
    "gradient_allreduce_op": "SUM",
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "CPU"},
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 5e2,
        "hysteresis": 4,
        "consecutive_hysteresis": True,
        "min_loss_scale": 2,
    },
    "data_types": {"grad_accum_dtype": "half"},
    "communication_data_type": "fp32",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR"},
    "checkpoint": {"load_universal": True},
    "onefold": {
        "block_classes": ["Layer"],
        "transport": "direct",
        "timeout_s": 60,
        "on_nonfinite": "raise",
        "norm_order": 1,
    },
}
