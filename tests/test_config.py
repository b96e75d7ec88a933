import json
import math
import random
from typing import Any

import pytest
from pydantic import ValidationError

from onefold.config import MAX_LOSS_SCALE, Config, Entry, LossScale
from onefold.config_keys import CONTAINERS, FIELD_PATHS, KNOWN, OLDER, SWITCHED, TABLE
from onefold.config_rule import Rule


def problems(source) -> str:
    with pytest.raises(ValueError, match="problem") as caught:
        Config.load(source)
    return str(caught.value)


def test_defaults():
    config = Config.load(None)
    assert config == Config()
    assert config.stage == 0
    assert config.reduce_bucket_numel is None
    assert config.gradient_accumulation_steps is None
    assert config.managed_gradient_accumulation
    assert config.gradient_clipping == 0.0
    assert config.gradient_allreduce_op == "mean"
    assert (config.norm_order, config.on_nonfinite) == (2.0, "skip")
    assert (config.precision, config.autocast_dtype, config.loss_scale) == (None, None, None)
    assert (config.grad_accum_dtype, config.communication_data_type) == (None, None)
    assert (config.offload_optimizer, config.offload_param) == (False, False)
    assert config.optimizer is None
    assert config.scheduler is None
    assert (config.block_classes, config.transport, config.timeout_s) == ((), "auto", 1800.0)
    assert config.notes == ()


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


SCALE_32 = LossScale(initial_scale_power=32)

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


def test_every_honoured_key_reaches_its_field():
    config = Config.load(FULL)
    assert config == Config(
        train_batch_size=64,
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=4,
        managed_gradient_accumulation=False,
        gradient_clipping=1.0,
        gradient_allreduce_op="sum",
        stage=3,
        reduce_bucket_numel=500_000_000,
        offload_optimizer=True,
        offload_param=True,
        precision="fp16",
        loss_scale=LossScale(
            loss_scale=0.0,
            initial_scale_power=12,
            loss_scale_window=500,
            hysteresis=4,
            consecutive_hysteresis=True,
            min_loss_scale=2.0,
        ),
        grad_accum_dtype="fp16",
        communication_data_type="fp32",
        on_nonfinite="raise",
        norm_order=1.0,
        optimizer=Entry(type="AdamW", params={"lr": 1e-3}),
        scheduler=Entry(type="WarmupLR"),
        block_classes=("Layer",),
        transport="direct",
        load_universal=True,
        timeout_s=60.0,
    )
    assert config.notes == ()
    assert type(config.reduce_bucket_numel) is int


def test_load_keeps_a_config_and_copies_params():
    config = Config.load(FULL)
    assert Config.load(config) is config
    params = {"lr": 0.1}
    loaded = Config.load({"optimizer": {"type": "SGD", "params": params}})
    params["lr"] = 0.2
    assert loaded.optimizer == Entry(type="SGD", params={"lr": 0.1})


def test_config_is_frozen():
    with pytest.raises(ValidationError):
        Config().stage = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Config(stages=1)  # type: ignore[call-arg]


def test_load_from_a_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FULL))
    assert Config.load(path) == Config.load(str(path)) == Config.load(FULL)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("{", "expected JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"optimizer": {"type": "SGD", "type": "Adam"}}', "duplicate keys type"),
    ],
)
def test_load_from_a_bad_file(tmp_path, text, says):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        Config.load(path)
    assert str(path) in str(caught.value)


def test_load_from_something_else():
    with pytest.raises(ValueError, match="expected a mapping, the path of a JSON file"):
        Config.load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "path", "expected", "got"),
    [
        (zero(stage=4), "zero_optimization.stage", "0, 1, 2 or 3", "4 (int)"),
        (zero(stage="2"), "zero_optimization.stage", "0, 1", "'2' (str)"),
        (zero(stage=True), "zero_optimization.stage", "0, 1", "True (bool)"),
        (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size", "above 0", "0 (int)"),
        ({"zero_optimization": [2]}, "zero_optimization", "a mapping", "[2] (list)"),
        ({"train_batch_size": 0}, "train_batch_size", "above 0", "0 (int)"),
        ({"train_batch_size": 2.5}, "train_batch_size", "an integer", "2.5 (float)"),
        ({"train_batch_size": True}, "train_batch_size", "an integer", "True (bool)"),
        ({"gradient_clipping": -1}, "gradient_clipping", "0 (off) or above", "-1 (int)"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping", "a number", "nan (float)"),
        ({"gradient_allreduce_op": "avg"}, "gradient_allreduce_op", '"mean" or "sum"', "'avg'"),
        ({"managed_gradient_accumulation": 1}, "managed_gradient_accumulation", "true", "1 (int)"),
        ({"optimizer": {"params": {}}}, "optimizer.type", "the name of an optimizer", "nothing"),
        ({"optimizer": {"type": 3}}, "optimizer.type", "the name of an optimizer", "3 (int)"),
        ({"optimizer": {"type": "SGD", "params": [1]}}, "optimizer.params", "a mapping", "[1]"),
        ({"optimizer": "SGD"}, "optimizer", "a mapping", "'SGD' (str)"),
        ({"onefold": {"transport": "udp"}}, "onefold.transport", '"direct"', "'udp' (str)"),
        ({"onefold": {"timeout_s": 0}}, "onefold.timeout_s", "above 0", "0 (int)"),
        ({"onefold": {"block_classes": "Layer"}}, "onefold.block_classes", "a list", "'Layer'"),
        ({"onefold": {"block_classes": [1]}}, "onefold.block_classes", "a list", "1 (int)"),
        (zero(overlap_comm="yes"), "zero_optimization.overlap_comm", "bool", "'yes'"),
        ({"gradient_predivide_factor": "2"}, "gradient_predivide_factor", "number", "'2' (str)"),
        ({"steps_per_print": 1.5}, "steps_per_print", "int", "1.5 (float)"),
        ({"bf16": True}, "bf16", "a mapping", "True (bool)"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled", "true or false", "1 (int)"),
        ({"fp16": {"enabled": "true"}}, "fp16.enabled", "true or false", "'true' (str)"),
        ({"bf16": on(immediate_grad_update=1)}, "bf16.immediate_grad_update", "bool", "1 (int)"),
        ({"torch_autocast": on(dtype="fp32")}, "torch_autocast.dtype", '"bf16" or', "'fp32'"),
        ({"torch_autocast": on(dtype=16)}, "torch_autocast.dtype", '"fp16"', "16 (int)"),
        ({"communication_data_type": "int8"}, "communication_data_type", '"bf16"', "'int8' (str)"),
        ({"communication_data_type": False}, "communication_data_type", '"bf16"', "False (bool)"),
        (nest("data_types.grad_accum_dtype", "f16"), "data_types.grad_accum_dtype", "fp16", "f16"),
        (zero(offload_optimizer=True), "zero_optimization.offload_optimizer", "a mapping", "True"),
        (zero(offload_param=["cpu"]), "zero_optimization.offload_param", "a mapping", "['cpu']"),
        (zero(stage=3, **cpu("param", pin_memory=1)), f"{PARAM}.pin_memory", "bool", "1 (int)"),
        (zero(offload_param={"device": "nvme"}), f"{PARAM}.device", 'no "nvme"', "'nvme' (str)"),
        (zero(offload_optimizer={"device": "gpu"}), f"{OPTIMIZER}.device", '"cpu" or', "'gpu'"),
        (zero(cpu_offload="cpu"), "zero_optimization.cpu_offload", "true or false", "'cpu' (str)"),
        ({"onefold": {"on_nonfinite": "stop"}}, "onefold.on_nonfinite", '"raise"', "'stop' (str)"),
        ({"onefold": {"norm_order": 0.5}}, "onefold.norm_order", "1 or above", "0.5 (float)"),
        ({"onefold": {"norm_order": True}}, "onefold.norm_order", "1 or above", "True (bool)"),
        ({"onefold": {"norm_order": "max"}}, "onefold.norm_order", '"inf"', "'max' (str)"),
        ({"onefold": {"norm_order": math.nan}}, "onefold.norm_order", '"inf"', "nan (float)"),
        ({"onefold": {"norm_order": -math.inf}}, "onefold.norm_order", '"inf"', "-inf (float)"),
        ({"fp16": on(loss_scale=-1)}, "fp16.loss_scale", "0 (dynamic)", "-1 (int)"),
        ({"fp16": on(loss_scale=math.inf)}, "fp16.loss_scale", "2**126", "inf (float)"),
        ({"fp16": on(loss_scale=1e-40)}, "fp16.loss_scale", "0 or at least 2**-126", "1e-40"),
        ({"fp16": on(loss_scale=1e38)}, "fp16.loss_scale", "2**126", "1e+38 (float)"),
        ({"fp16": on(loss_scale=False)}, "fp16.loss_scale", "0 (dynamic)", "False (bool)"),
        ({"fp16": on(loss_scale="dynamic")}, "fp16.loss_scale", "0 (dynamic)", "'dynamic' (str)"),
        ({"fp16": on(initial_scale_power=-1)}, "fp16.initial_scale_power", "from 0 to", "-1 (int)"),
        ({"fp16": on(initial_scale_power=127)}, "fp16.initial_scale_power", "to 126", "127 (int)"),
        ({"fp16": on(initial_scale_power=1.5)}, "fp16.initial_scale_power", "integer", "1.5"),
        ({"fp16": on(loss_scale_window=0)}, "fp16.loss_scale_window", "above 0", "0 (int)"),
        ({"fp16": on(loss_scale_window=True)}, "fp16.loss_scale_window", "above 0", "True (bool)"),
        ({"fp16": on(hysteresis=0)}, "fp16.hysteresis", "above 0", "0 (int)"),
        ({"fp16": on(consecutive_hysteresis=1)}, "fp16.consecutive_hysteresis", "true", "1 (int)"),
        ({"fp16": on(min_loss_scale=0)}, "fp16.min_loss_scale", "above 0", "0 (int)"),
        ({"fp16": on(min_loss_scale=math.nan)}, "fp16.min_loss_scale", "above 0", "nan (float)"),
        (
            {"fp16": on(min_loss_scale=9, initial_scale_power=3)},
            "fp16.min_loss_scale",
            "at most the initial scale, 2**3",
            "got 9.0",
        ),
        ({"fp16": on(min_loss_scale=1e-40)}, "fp16.min_loss_scale", "at least 2**-126", "1e-40"),
    ],
)
def test_wrong_values_name_path_expected_and_got(source, path, expected, got):
    text = problems(source)
    assert f"\n- {path}: expected " in text
    assert expected in text
    assert got in text
    assert "1 problem:" in text


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("data_types.param_dtype", "bf16"),
        ("data_types.keep_in_fp32_modules", ["norm"]),
        ("zero_optimization.zenflow", {"topk_ratio": 0.1}),
        ("zero_optimization.zero_quantized_weights", True),
        ("zero_optimization.zero_hpz_partition_size", 8),
        ("zero_optimization.ignore_unused_parameters", False),
        ("expert_parallel.enabled", True),
        ("use_data_before_expert_parallelism", True),
        ("activation_checkpointing.cpu_checkpointing", True),
        ("tensor_parallel.autotp_size", 2),
        ("sequence_parallel_size", 2),
        ("pipeline.stages", 4),
        ("compile.deepcompile", True),
        ("data_efficiency.enabled", True),
        ("data_efficiency.data_routing.random_ltd.enabled", True),
        ("weight_quantization", {"num_bits": 8}),
        ("tensorboard.enabled", True),
        ("flops_profiler.enabled", True),
        ("autotuning.enabled", True),
        ("hybrid_engine.enabled", True),
        ("amp", {"enabled": True, "opt_level": "O1"}),
        ("elasticity", {"max_train_batch_size": 9}),
        ("sparse_gradients", True),
        ("dataloader_drop_last", True),
        ("checkpoint.use_node_local_storage", True),
    ],
)
def test_what_is_not_here_is_refused_with_a_reason(path, value):
    text = problems(nest(path, value))
    assert f"- {path}: " in text
    assert "1 problem:" in text
    assert "Remove it to go on without." in text


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("bf16", "bf16_master_weights_and_grads", True),
        ("bfloat16", "bf16_optimizer_states", True),
        ("fp16", "fp16_master_weights_and_grads", True),
        ("fp16", "auto_cast", True),
        (OPTIMIZER, "ratio", 0.5),
        (OPTIMIZER, "super_offload", True),
    ],
)
def test_what_a_section_cannot_do_is_refused_while_it_is_on(section, key, value):
    is_offload = section == OPTIMIZER
    switch, state = ("device", "cpu") if is_offload else ("enabled", True)
    source = nest(section, {switch: state, key: value})
    source.setdefault("zero_optimization", {})["stage"] = 2
    text = problems(source)
    assert f"1 problem:\n- {section}.{key}: " in text
    assert "Remove it to go on without." in text
    off = nest(section, {switch: "none" if is_offload else False, key: value})
    assert Config.load({**off, "gradient_clipping": 0}) == Config()


def test_experts_are_built_not_rewritten():
    text = problems({"expert_parallel": {"enabled": True, "autoep_size": 2}})
    assert "onefold.moe" in text
    assert "1 problem:" in text


def loaded(**source) -> Config:
    return Config.load({"gradient_clipping": 0.0, **source})


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


@pytest.mark.parametrize("source", [zero(stage=2, cpu_offload=True, **cpu("optimizer"))])
def test_an_older_name_beside_the_newer(source):
    assert "1 problem:\n- zero_optimization.cpu_offload: expected one of" in problems(source)
    assert "Keep bf16." in problems({"bf16": {"enabled": False}, "bfloat16": on()})
    both = zero(stage=3, cpu_offload_param=False, offload_param={"device": "cpu"})
    assert "Keep zero_optimization.offload_param." in problems(both)


DISAGREEMENTS = [
    ({"bf16": on(), "fp16": on()}, "fp16.enabled: expected one of the two, got bf16.enabled"),
    ({"fp16": on(), "bf16": on()}, "bf16.enabled: expected one of the two, got fp16.enabled"),
    ({"bf16": on(), "torch_autocast": on()}, "torch_autocast.enabled: expected a model in fp32"),
    ({"bf16": on(), "data_types": {"grad_accum_dtype": "fp16"}}, "expected fp32 or the model's"),
    ({"fp16": on(), "data_types": {"grad_accum_dtype": "bf16"}}, "own fp16, got bf16"),
    (zero(**cpu("optimizer")), "expected zero_optimization.stage 1, 2 or 3, where"),
    (zero(stage=2, **cpu("param")), "expected zero_optimization.stage 3, where"),
    (zero(stage=0, cpu_offload=True), "zero_optimization.offload_optimizer: expected"),
]


@pytest.mark.parametrize(("source", "says"), DISAGREEMENTS)
def test_settings_that_do_not_go_together(source, says):
    text = problems(source)
    assert says in text
    assert "1 problem:" in text
    # A wrong value elsewhere does not hide it.
    text = problems({**source, "gradient_clipping": "much"})
    assert says in text
    assert "2 problems:" in text


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"precision": "bf16", "autocast_dtype": "bf16"}, "torch_autocast.enabled"),
        ({"precision": "bf16", "loss_scale": LossScale()}, "loss_scale: expected None without"),
        ({"loss_scale": LossScale()}, "loss_scale: expected None without fp16"),
        ({"offload_param": True, "stage": 2}, "zero_optimization.offload_param"),
        ({"precision": "fp32"}, "precision"),
    ],
)
def test_a_config_made_by_hand_is_checked_too(fields, says):
    with pytest.raises(ValidationError, match=says):
        Config(**fields)


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


def test_the_order_of_the_keys_means_nothing():
    config = Config.load(FULL)
    for seed in range(20):
        assert Config.load(shuffled(FULL, random.Random(seed))) == config


def shuffled(source: dict, draw: random.Random) -> dict:
    """The same mapping in another order, at every depth."""
    items = list(source.items())
    draw.shuffle(items)
    return {
        key: shuffled(value, draw) if isinstance(value, dict) else value for key, value in items
    }


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


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("zero_optimization.reduce_bukcet_size", "zero_optimization.reduce_bucket_size"),
        ("gradient_cliping", "the nearest known key is gradient_clipping"),
        ("stage", "it belongs to zero_optimization.stage"),
        ("block_classes", "it belongs to onefold.block_classes"),
        ("reduce_bucket_numel", "it belongs to zero_optimization.reduce_bucket_size"),
        ("offload_optimizer", "it belongs to zero_optimization.offload_optimizer"),
        ("fp16.loss_scale_windw", "the nearest known key is fp16.loss_scale_window"),
        ("bf16.loss_scale", "it belongs to fp16.loss_scale"),
        ("initial_scale_power", "it belongs to fp16.initial_scale_power"),
        ("precision", "it belongs to bf16.enabled"),
        ("torch_autocast.dtyp", "the nearest known key is torch_autocast.dtype"),
        ("onefold.on_nonfinit", "the nearest known key is onefold.on_nonfinite"),
        ("zero_optimization.offload_optimizer.dvice", "offload_optimizer.device"),
        ("onefold.overlap_com", "the nearest known key is zero_optimization.overlap_comm"),
        ("bf16.enable", "the nearest known key is bf16.enabled"),
        ("data_efficiency.data_sampling.num_epoch", "data_efficiency.data_sampling.num_epochs"),
        ("optimizer.typ", "the nearest known key is optimizer.type"),
        ("qqqqqqqq", "no known key is near"),
    ],
)
def test_a_typo_names_its_path_and_where_it_may_belong(path, advice):
    text = problems(nest(path, 1))
    assert f"\n- {path}: neither DeepSpeed 0.19.8 nor onefold has this key" in text
    assert advice in text


@pytest.mark.parametrize(
    "source",
    [zero(stage="auto"), {"gradient_clipping": "auto"}, {"optimizer": {"type": "auto"}}],
)
def test_auto_that_cannot_be_derived_is_refused(source):
    assert '"auto" cannot be derived here' in problems(source)


def test_all_problems_are_reported_in_one_error():
    text = problems(
        {
            "zero_optimization": {"stage": 9, "offload_param": {"device": "cpu"}},
            "fp16": {"enabled": True, "loss_scale_window": 0, "auto_cast": True},
            "torch_autocast": {"enabled": True, "dtype": "bf16"},
            "data_types": {"grad_accum_dtype": "bf16"},
            "expert_parallel": {"enabled": True},
            "train_batch_sise": 4,
            "gradient_clipping": "much",
        }
    )
    # No word about the offload: nobody knows which stage was meant.
    assert text.startswith("config: 8 problems:\n- ")
    assert text.count("\n- ") == 8


IDENTITY = [
    # (batch, micro, steps), world size -> (batch, micro, steps)
    ((64, 4, 4), 4, (64, 4, 4)),
    ((64, 4, None), 4, (64, 4, 4)),
    ((64, None, 4), 4, (64, 4, 4)),
    ((None, 4, 4), 4, (64, 4, 4)),
    ((64, None, None), 4, (64, 16, 1)),
    ((None, 4, None), 4, (16, 4, 1)),
    ((None, None, 4), 4, (None, None, 4)),
    ((None, None, None), 4, (None, None, None)),
]


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch(config: Config) -> tuple:
    return tuple(getattr(config, name) for name in SIZES)


def sized(numbers: tuple) -> Config:
    return Config.load(dict(zip(SIZES, numbers, strict=True)))


@pytest.mark.parametrize(("given", "world_size", "resolved"), IDENTITY)
def test_resolve_batch_completes_the_identity(given, world_size, resolved):
    config = sized(given)
    once = config.resolve_batch(world_size)
    assert batch(once) == resolved
    assert batch(config) == given
    assert once.resolve_batch(world_size) == once


@pytest.mark.parametrize(
    ("given", "world_size"),
    [
        ((64, 4, 3), 4),
        ((64, 5, None), 4),
        ((64, None, 5), 4),
        ((2, None, None), 4),
        ((2, 4, None), 1),
    ],
)
def test_resolve_batch_shows_the_numbers_of_a_contradiction(given, world_size):
    with pytest.raises(ValueError, match="train_batch_size: expected") as caught:
        sized(given).resolve_batch(world_size)
    text = str(caught.value)
    assert f"train_batch_size={given[0]}" in text
    assert f"train_micro_batch_size_per_gpu={given[1]}" in text
    assert f"gradient_accumulation_steps={given[2]}" in text
    assert f"world_size={world_size}" in text


def test_resolve_batch_refuses_no_ranks():
    with pytest.raises(ValueError, match="world_size of 1 or more, got 0"):
        Config().resolve_batch(0)


def test_fingerprint_sees_what_must_agree_and_nothing_else():
    config = Config.load(FULL)
    assert config.fingerprint() == Config.load(json.loads(json.dumps(FULL))).fingerprint()
    assert config.fingerprint() != Config.load({**FULL, "gradient_clipping": 2}).fingerprint()
    halved = {**FULL, "fp16": {**FULL["fp16"], "initial_scale_power": 11}}
    assert config.fingerprint() != Config.load(halved).fingerprint()
    other_lr = {**FULL, "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}}
    assert config.fingerprint() != Config.load(other_lr).fingerprint()
    patient = config.model_copy(update={"timeout_s": 9.0, "notes": ("x",)})
    assert config.fingerprint() == patient.fingerprint()


def test_fingerprint_has_no_memory_address_in_it():
    def print_of(value: object) -> str:
        return Config(optimizer=Entry(type="X", params={"x": value})).fingerprint()

    assert print_of(object()) == print_of(object())
    assert print_of(len) != print_of(max)


def test_every_honoured_row_has_a_field_and_every_field_a_row():
    fields = set(Config.model_fields) - {"notes"}
    assert {name.partition(".")[0] for name in FIELD_PATHS} == fields
    assert all(key.field for key in TABLE.values() if key.rule is Rule.HONOURED)


def test_table_has_no_path_that_is_both_a_row_and_a_container():
    assert not CONTAINERS & set(TABLE)
    assert set(TABLE) < KNOWN
    assert set(SWITCHED) <= CONTAINERS
    assert {f"{path}.{switch}" for path, switch in SWITCHED.items()} <= set(TABLE)
    assert set(OLDER) | set(OLDER.values()) <= KNOWN
    assert len(KNOWN) > 300


def test_every_row_gives_a_reason():
    assert all(key.text and key.text.isascii() for key in TABLE.values())
    assert {key.kind for key in TABLE.values()} <= {
        "bool",
        "int",
        "number",
        "str",
        "any",
        "section",
    }
