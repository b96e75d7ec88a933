"""What the config makes of settings: precision, dtypes and offload; what has no effect is noted."""

import json
import math

import pytest

from onefold.config import MAX_LOSS_SCALE, Config, LossScale
from tests.config_sources import OPTIMIZER, PARAM, cpu, loaded, on, zero

SCALE_32 = LossScale(initial_scale_power=32)


@pytest.mark.parametrize(
    ("source", "precision", "scaler"),
    [
        ({"bf16": on()}, "bf16", None),
        ({"bfloat16": on()}, "bf16", None),
        ({"bf16": on(), "fp16": {"enabled": False}}, "bf16", None),
        ({"bf16": on(), "fp16": {"enabled": "auto", "hysteresis": 3}}, "bf16", None),
        ({"bf16": None, "bfloat16": on(), "fp16": None}, "bf16", None),
        ({"fp16": on()}, "fp16", LossScale()),
        ({"fp16": on(), "bf16": {"enabled": "auto"}}, "fp16", LossScale()),
        ({"fp16": on(loss_scale=128)}, "fp16", LossScale(loss_scale=128.0)),
        ({"fp16": on(loss_scale="auto", auto_cast="auto")}, "fp16", LossScale()),
        ({"fp16": on(auto_cast=False, initial_scale_power=32)}, "fp16", SCALE_32),
        ({"fp16": {"hysteresis": 5}, "bf16": on()}, "bf16", None),
        # Out of its range, and unused.
        ({"fp16": {"enabled": False, "loss_scale_window": 0}}, None, None),
    ],
)
def test_precision(source, precision, scaler):
    config = loaded(**source)
    assert config == Config(precision=precision, loss_scale=scaler)
    assert config.notes == ()


def test_defaults_of_the_loss_scale_are_deepspeeds():
    assert LossScale().model_dump() == {
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1.0,
    }
    assert Config(precision="fp16").loss_scale == LossScale()
    assert Config(autocast_dtype="fp16").loss_scale == LossScale()
    assert Config(autocast_dtype="fp16", loss_scale=None).loss_scale == LossScale()
    assert LossScale(loss_scale=MAX_LOSS_SCALE).loss_scale == 2.0**126
    LossScale(loss_scale=4.0, min_loss_scale=1e9)  # no floor where nothing moves


@pytest.mark.parametrize(
    ("said", "name"),
    [
        *((said, "fp32") for said in ("fp32", "FP32", "float32", "float", "torch.float32")),
        *((said, "bf16") for said in ("bf16", "BF16", "bfloat16", "torch.bfloat16")),
        *((said, "fp16") for said in ("fp16", "FP16", "float16", "half", "torch.float16")),
    ],
)
def test_every_spelling_of_a_dtype(said, name):
    assert loaded(communication_data_type=said) == Config(communication_data_type=name)
    assert loaded(data_types={"grad_accum_dtype": said}) == Config(grad_accum_dtype=name)
    if name != "fp32":
        config = loaded(torch_autocast=on(dtype=said))
        assert config == Config(autocast_dtype=name)
        assert config.notes == ()


def test_an_autocast_is_bf16_unless_told_and_says_so():
    config = loaded(torch_autocast=on())
    assert config.autocast_dtype == "bf16"
    (note,) = config.notes
    assert note.startswith("torch_autocast.dtype is not given, so it is bf16")
    assert loaded(torch_autocast={"dtype": "fp16", "enabled": False}) == Config()


def test_an_autocast_in_fp16_takes_the_scaler_of_the_section_fp16():
    fp16 = {"enabled": False, "loss_scale": 64, "auto_cast": True}
    for section in (on(dtype="fp16"), {"dtype": "fp16", "enabled": True}):
        config = loaded(torch_autocast=section, fp16=fp16)
        assert config == Config(autocast_dtype="fp16", loss_scale=LossScale(loss_scale=64.0))
    assert loaded(torch_autocast=on(dtype="bf16"), fp16=fp16).loss_scale is None


@pytest.mark.parametrize(
    ("keys", "optimizer", "param"),
    [
        (cpu("optimizer"), True, False),
        (cpu("param"), False, True),
        ({**cpu("optimizer"), **cpu("param")}, True, True),
        ({"cpu_offload": True}, True, False),
        ({"cpu_offload_param": True}, False, True),
        ({"cpu_offload": True, "offload_param": {"device": "none"}}, True, False),
        ({"offload_optimizer": {"device": "auto"}, "cpu_offload_param": "auto"}, False, False),
        ({"offload_optimizer": {}, "offload_param": {"nvme_path": "/x"}}, False, False),
        (cpu("optimizer", ratio=1.0, super_offload=False), True, False),
    ],
)
def test_offload(keys, optimizer, param):
    config = loaded(zero_optimization={"stage": 3, **keys})
    assert config == Config(stage=3, offload_optimizer=optimizer, offload_param=param)
    assert config.notes == ()


def test_what_a_section_that_is_on_does_without_is_noted():
    config = loaded(
        bf16=on(immediate_grad_update=True, check_grad_overflow=False),
        zero_optimization={
            "stage": 3,
            **cpu("optimizer", pin_memory=False, fast_init=True, nvme_path=None, buffer_count=4),
            **cpu("param", pin_memory=True, buffer_size=1e8, max_in_cpu=1e9),
        },
        zero_force_ds_cpu_optimizer=False,
    )
    text = "\n".join(config.notes)
    assert len(config.notes) == 5
    assert "bf16.immediate_grad_update: accepted, without effect" in text
    assert "bf16.check_grad_overflow: accepted, without effect here: gradients are always" in text
    assert f"{OPTIMIZER}.pin_memory, {PARAM}.pin_memory: accepted, without" in text
    assert f"{OPTIMIZER}.buffer_count, {PARAM}.buffer_size, {PARAM}.max_in_cpu: acc" in text
    assert "zero_force_ds_cpu_optimizer: accepted, without effect" in text
    (note,) = loaded(torch_autocast=on(dtype="bf16", lower_precision_safe_modules=["x"])).notes
    assert "gradients cross the wire in communication_data_type" in note


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_a_gradient_dtype_that_goes_with_the_model(precision):
    """Without a precision only the plan knows the model's dtype."""
    for dtype in ("fp32", "bf16", "fp16") if precision is None else ("fp32", precision):
        Config(precision=precision, grad_accum_dtype=dtype)


@pytest.mark.parametrize("said", ["inf", "Inf", math.inf])
def test_an_infinite_norm(said, tmp_path):
    config = loaded(onefold={"norm_order": said})
    assert config.norm_order == math.inf
    assert config.fingerprint() == Config(norm_order=math.inf).fingerprint()
    assert config.fingerprint() != Config().fingerprint()
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"onefold": {"norm_order": said}}))
    assert Config.load(path).norm_order == math.inf


@pytest.mark.parametrize(
    "source",
    [
        {"bf16": {"enabled": False, "immediate_grad_update": True}},
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale_window": 100}},
        {"fp16": None, "bf16": False, "torch_autocast": {"enabled": False, "dtype": "bf16"}},
        zero(offload_param={"device": "none", "pin_memory": True}),
        {"zero_optimization": {"offload_optimizer": None, "zenflow": None}},
        {"zero_optimization": {"cpu_offload": False, "zero_hpz_partition_size": 1}},
        {"communication_data_type": None, "data_types": {"grad_accum_dtype": None}},
        {"communication_data_type": "auto", "data_types": {"grad_accum_dtype": "auto"}},
        {"data_types": {"keep_in_fp32_modules": "auto", "param_dtype": None}},
        {"amp": {"enabled": False}, "elasticity": {}, "sparse_gradients": False},
        {"tensorboard": {"enabled": False, "output_path": "x"}, "wandb": {"group": "x"}},
        {"data_efficiency": {"enabled": False, "data_sampling": {"dynamic_batching": {}}}},
        {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}, "compile": {}},
        {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"},
        {"zero_optimization": {"reduce_bucket_size": "auto", "overlap_comm": "auto"}},
        {"zero_optimization": None, "optimizer": None, "scheduler": {}},
        {"weight_quantization": {"enabled": False}, "datastates_ckpt": False},
    ],
)
def test_what_asks_for_nothing_is_accepted_in_silence(source):
    config = Config.load({"gradient_clipping": 0.0, **source})
    assert config == Config()


def test_always_keys_are_noted_once_for_each_reason():
    config = Config.load(
        {
            "gradient_clipping": 1.0,
            "prescale_gradients": True,
            "gradient_predivide_factor": 2.0,
            "zero_optimization": {"contiguous_gradients": True, "allgather_bucket_size": 5e8},
            "comms_logger": {"enabled": True, "prof_ops": []},
        }
    )
    assert len(config.notes) == 4
    assert config.notes[0].startswith("prescale_gradients, gradient_predivide_factor: accepted")
    assert config.notes[1].startswith("zero_optimization.contiguous_gradients: accepted")
    assert config.notes[3].startswith("comms_logger: accepted")


def test_clipping_that_deepspeed_would_do_unasked_is_noted():
    (note,) = Config.load({"train_batch_size": 8}).notes
    assert "gradient_clipping is not given" in note
    assert Config.load({"gradient_clipping": 0}).notes == ()


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
def test_deprecated_bare_zero_optimization(value, stage):
    assert Config.load({"zero_optimization": value}).stage == stage
