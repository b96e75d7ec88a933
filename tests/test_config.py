import json

import pytest
from pydantic import ValidationError

from onefold.config import Config, Entry
from onefold.config_keys import CONTAINERS, FIELD_PATHS, KNOWN, TABLE, Rule


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


FULL = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "managed_gradient_accumulation": False,
    "gradient_clipping": 1,
    "gradient_allreduce_op": "SUM",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR"},
    "onefold": {"block_classes": ["Layer"], "transport": "direct", "timeout_s": 60},
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
        stage=2,
        reduce_bucket_numel=500_000_000,
        optimizer=Entry(type="AdamW", params={"lr": 1e-3}),
        scheduler=Entry(type="WarmupLR"),
        block_classes=("Layer",),
        transport="direct",
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
        ("bf16.enabled", True),
        ("bfloat16.enabled", True),
        ("fp16.enabled", True),
        ("torch_autocast.enabled", True),
        ("data_types.grad_accum_dtype", "bf16"),
        ("data_types.param_dtype", "bf16"),
        ("communication_data_type", "fp16"),
        ("zero_optimization.offload_optimizer.device", "cpu"),
        ("zero_optimization.offload_param.device", "nvme"),
        ("zero_optimization.cpu_offload", True),
        ("zero_optimization.zenflow", {"topk_ratio": 0.1}),
        ("zero_optimization.zero_quantized_weights", True),
        ("zero_optimization.zero_hpz_partition_size", 8),
        ("zero_optimization.ignore_unused_parameters", False),
        ("expert_parallel.enabled", True),
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
        ("checkpoint.load_universal", True),
    ],
)
def test_what_is_not_here_is_refused_with_a_reason(path, value):
    text = problems(nest(path, value))
    assert f"- {path}: " in text
    assert "1 problem:" in text
    assert "Remove it to go on without." in text


def test_a_section_that_is_on_is_one_problem():
    text = problems({"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}})
    assert "1 problem:\n- fp16.enabled: " in text


@pytest.mark.parametrize(
    "source",
    [
        {"bf16": {"enabled": False, "immediate_grad_update": True}},
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale_window": 100}},
        {"fp16": None, "bf16": False, "torch_autocast": {"enabled": False, "dtype": "bf16"}},
        zero(offload_param={"device": "none", "pin_memory": True}),
        {"zero_optimization": {"offload_optimizer": None, "zenflow": None}},
        {"zero_optimization": {"cpu_offload": False, "zero_hpz_partition_size": 1}},
        {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}},
        {"communication_data_type": None},
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
            "bf16": {"enabled": True},
            "train_batch_sise": 4,
            "gradient_clipping": "much",
        }
    )
    assert text.startswith("config: 5 problems:\n- ")
    assert text.count("\n- ") == 5


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
