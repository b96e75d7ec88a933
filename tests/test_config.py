"""The config: how it is loaded, the sizes of a batch, the fingerprint, and the table of keys."""

import json
import random

import pytest
from pydantic import ValidationError

from onefold.config import Config, Entry, LossScale
from onefold.config_keys import CONTAINERS, FIELD_PATHS, KNOWN, OLDER, SWITCHED, TABLE
from onefold.config_rule import Rule
from tests.config_sources import FULL


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
