"""What the config refuses: each problem by its path, with a reason or advice, all in one error."""

import math

import pytest
from pydantic import ValidationError

from onefold.config import Config, LossScale
from tests.config_sources import OPTIMIZER, PARAM, cpu, nest, on, problems, zero


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
