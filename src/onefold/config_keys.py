"""Every key that DeepSpeed 0.19.8 reads from its JSON, and what onefold makes of it: one table.

``HONOURED`` keys become fields of ``Config``. ``ALWAYS`` keys are accepted and change nothing: the
design does it anyway, or it cannot change a result. ``REFUSED`` keys would change results or
promise a feature that is not here; a value that asks for nothing (``off``) is accepted even so.

A section stands in the table as one row when its keys share one fate, with the names inside it in
``names``; a section whose keys differ is spelled out, one row a key.
"""

from dataclasses import dataclass, replace
from enum import Enum

AUTO = "auto"
"""What stands in a JSON for a value that another tool is to fill in."""


class Rule(Enum):
    """What happens to a key that is given."""

    HONOURED = "honoured"
    ALWAYS = "always"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table.

    Attributes:
        rule: the disposition.
        text: HONOURED: what is expected; ALWAYS: why nothing follows; REFUSED: why it is refused.
        kind: bool, int, number, str or any: the values an ALWAYS key takes; section: a mapping.
        off: values that ask for nothing; null and "auto" always do, except where HONOURED.
        field: HONOURED: the field of ``Config`` (a dotted one is inside an ``Entry``).
        derivable: HONOURED: "auto" can be derived, so it counts as not given.
        names: section: the dotted names inside it; None if its contents are not looked at.
        switches: section: the names that turn it on; with none, being there turns it on.
    """

    rule: Rule
    text: str
    kind: str = "any"
    off: tuple[object, ...] = (False,)
    field: str = ""
    derivable: bool = False
    names: frozenset[str] | None = None
    switches: tuple[str, ...] = ()

    def is_off(self, value: object) -> bool:
        """Tell whether a value asks for nothing."""
        return value is None or value == AUTO or any(value == off for off in self.off)

    def takes(self, value: object) -> bool:
        """Tell whether a value is of this key's kind; a float such as 5e8 is an int in JSON."""
        if self.kind in ("bool", "str"):
            return isinstance(value, bool if self.kind == "bool" else str)
        if self.kind not in ("int", "number"):
            return True
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        fits = whole if self.kind == "int" else isinstance(value, int | float)
        return fits and not isinstance(value, bool)


def _always(text: str, kind: str = "bool") -> Key:
    return Key(Rule.ALWAYS, text, kind)


def _refused(text: str, *off: object) -> Key:
    return Key(Rule.REFUSED, text, off=off or (False,))


def _honoured(field: str, text: str, *, derivable: bool = False) -> Key:
    return Key(Rule.HONOURED, text, field=field, derivable=derivable)


def _section(key: Key, names: str | None, *switches: str) -> Key:
    known = None if names is None else frozenset(names.split())
    return replace(key, kind="section", names=known, switches=switches)


def _rows(section: str, names: str, key: Key) -> dict[str, Key]:
    return {f"{section}.{name}" if section else name: key for name in names.split()}


_FP32 = ("fp32", "FP32", "float32", "float", "torch.float32")

# What the next version brings. To honour one, change its rule here and give its rows a field below.
_PRECISION = _refused("mixed precision is not in this version: a model trains in its own dtype")
_WIRE_DTYPE = _refused("gradients are summed and sent in fp32 or wider in this version", *_FP32)
_OFFLOAD = _refused("offload is not in this version", "none", False)
_EXPERTS = _refused("expert parallelism is not in this version")

_REMOVED = _refused("DeepSpeed 0.19.8 has removed this section, and onefold does not have it")
_SPLIT_MODEL = _refused("onefold is data parallel only; the model is not split over ranks", 0, 1)
_QUANTIZED = _refused("weights and gradients are not quantized here")
_MONITOR = _refused("onefold writes no such files; log from the training loop")

_FLAT = _always("gradients always live in flat buffers and are reduced from there")
_GATHER = _always("units are gathered and published as whole flat buffers, in plan order")
_GATHER_NUMEL = _always(_GATHER.text, "int")
_PREDIVIDE = "the sum over ranks is divided once, after the reduction, which gives the same mean"
_QUIET = _always("nothing is printed; the log and the ledger have the numbers")
_NO_OFFLOAD = "it serves offload only"
_NO_SPLIT = "there is no pipeline, sequence or model parallelism here"
_ACTIVATIONS = _always("activation checkpointing is torch.utils.checkpoint's")
_CHECKPOINT_WRITER = "checkpoints are written in onefold's own way"

_TOP: dict[str, Key] = {
    "train_batch_size": _honoured("train_batch_size", "an integer above 0", derivable=True),
    "train_micro_batch_size_per_gpu": _honoured(
        "train_micro_batch_size_per_gpu", "an integer above 0", derivable=True
    ),
    "gradient_accumulation_steps": _honoured(
        "gradient_accumulation_steps", "an integer above 0", derivable=True
    ),
    "managed_gradient_accumulation": _honoured("managed_gradient_accumulation", "true or false"),
    "gradient_clipping": _honoured("gradient_clipping", "a number, 0 (off) or above"),
    "gradient_allreduce_op": _honoured("gradient_allreduce_op", '"mean" or "sum"'),
    "optimizer.type": _honoured("optimizer.type", "the name of an optimizer"),
    "optimizer.params": _honoured("optimizer.params", "a mapping of its arguments"),
    "optimizer.legacy_fusion": _always("it concerns DeepSpeed's fp16 wrapper only"),
    "scheduler.type": _honoured("scheduler.type", "the name of a scheduler"),
    "scheduler.params": _honoured("scheduler.params", "a mapping of its arguments"),
    "prescale_gradients": _always(_PREDIVIDE),
    "gradient_predivide_factor": _always(_PREDIVIDE, "number"),
    "communication_data_type": _WIRE_DTYPE,
    "data_types.grad_accum_dtype": _WIRE_DTYPE,
    **_rows("data_types", "param_dtype buffer_dtype", replace(_PRECISION, off=())),
    "data_types.keep_in_fp32_modules": _always("nothing is cast to a lower precision", "any"),
    "seq_parallel_communication_data_type": _always(_NO_SPLIT, "str"),
    "sequence_parallel_size": _SPLIT_MODEL,
    "data_parallel_size": replace(_SPLIT_MODEL, text="the process group has the ranks", off=()),
    "use_data_before_expert_parallelism": _EXPERTS,
    **_rows("", "steps_per_print vocabulary_size", _always(_QUIET.text, "int")),
    **_rows("", "dump_state wall_clock_breakdown memory_breakdown", _QUIET),
    "log_level": _always('set the level of the logger "onefold" with logging', "any"),
    "disable_python_gc": _always("Python's garbage collector is left alone"),
    "disable_allgather": _always("DeepSpeed reads it and does nothing with it"),
    "allgather_size": _GATHER_NUMEL,
    "dataloader_drop_last": _refused("no loader built here drops a batch; bring your own"),
    "zero_allow_untested_optimizer": _always("every elementwise optimizer of torch is allowed"),
    "zero_force_ds_cpu_optimizer": _always(_NO_OFFLOAD),
    "sparse_gradients": _REMOVED,
    "onefold.block_classes": _honoured("block_classes", "a list of class names", derivable=True),
    "onefold.transport": _honoured("transport", '"auto", "native" or "direct"', derivable=True),
    "onefold.timeout_s": _honoured("timeout_s", "a number of seconds above 0"),
}

_ZERO: dict[str, Key] = {
    "stage": _honoured("stage", "0, 1, 2 or 3"),
    "reduce_bucket_size": _honoured(
        "reduce_bucket_numel",
        "a number of elements above 0 (left out, it means 25 MiB)",
        derivable=True,
    ),
    **_rows("", "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce", _FLAT),
    **_rows("", "round_robin_gradients", _FLAT),
    "parameter_alignment": _always("every parameter always starts at a 64-byte boundary"),
    **_rows(
        "", "allgather_partitions memory_efficient_linear pipeline_loading_checkpoint", _GATHER
    ),
    **_rows("", "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params", _GATHER),
    **_rows("", "stage3_allgather_sequential allgather_sequential", _GATHER),
    **_rows("", "allgather_bucket_size sub_group_size", _GATHER_NUMEL),
    **_rows("", "stage3_prefetch_bucket_size prefetch_bucket_size", _GATHER_NUMEL),
    **_rows("", "stage3_param_persistence_threshold param_persistence_threshold", _GATHER_NUMEL),
    **_rows("", "stage3_model_persistence_threshold model_persistence_threshold", _GATHER_NUMEL),
    **_rows("", "stage3_max_live_parameters max_live_parameters", _GATHER_NUMEL),
    **_rows("", "stage3_max_reuse_distance max_reuse_distance", _GATHER_NUMEL),
    **_rows("", "stage3_module_granularity_threshold module_granularity_threshold", _GATHER_NUMEL),
    "overlap_comm": _always("communication overlaps with compute wherever the order allows it"),
    "compute_grad_norm": _always("the gradient norm is computed when it is read or clipping is on"),
    **_rows(
        "",
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
        _always("full_state_dict() always gathers whole weights, in their own dtype"),
    ),
    "load_from_fp32_weights": _refused("master weights are always restored as they were", True),
    "elastic_checkpoint": _refused("it names a checkpoint layout that onefold does not have"),
    "legacy_stage1": _refused("it names an implementation that onefold does not have"),
    "ignore_unused_parameters": _refused("unused parameters are legal in every step", True),
    "zero_hpz_partition_size": _refused("a secondary shard group is not available here", 0, 1),
    **_rows("", "zero_quantized_weights zero_quantized_nontrainable_weights", _QUANTIZED),
    "zero_quantized_gradients": _QUANTIZED,
    "override_module_apply": _always("nn.Module is never patched"),
    **_rows("", "log_trace_cache_warnings enable_sanity_checks", _always("checks are always on")),
    "save_muon_momentum_buffer_in_memory": _always(_NO_OFFLOAD),
    "leaf_module": _section(
        _always("name the blocks to gather as a whole in onefold.block_classes"),
        "classes names name_suffixes",
    ),
    "offload_param": _section(
        _OFFLOAD, "device nvme_path buffer_count buffer_size max_in_cpu pin_memory", "device"
    ),
    "offload_optimizer": _section(
        _OFFLOAD,
        "device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio "
        "super_offload cpuadam_cores_perc",
        "device",
    ),
    **_rows("", "cpu_offload cpu_offload_param", _OFFLOAD),
    "cpu_offload_use_pin_memory": _always(_NO_OFFLOAD),
    "zenflow": _section(
        _OFFLOAD,
        "topk_ratio select_strategy select_interval update_interval overlap_step offload "
        "auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
    ),
    # Removed from DeepSpeed 0.19.8, and still in many files.
    "mics_shard_size": _refused("DeepSpeed 0.19.8 has removed it; onefold does not have it", -1),
    **_rows("", "mics_hierarchical_params_gather zeropp_loco_param", _REMOVED),
}

_BF16 = _section(
    _PRECISION,
    "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
    "bf16_optimizer_states",
    "enabled",
)

_SECTIONS: dict[str, Key] = {
    **_rows("", "bf16 bfloat16", _BF16),
    "fp16": _section(
        _PRECISION,
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
        "consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads",
        "enabled",
    ),
    "torch_autocast": _section(_PRECISION, "enabled dtype lower_precision_safe_modules", "enabled"),
    "expert_parallel": _section(
        _EXPERTS,
        "enabled autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan "
        "preset_model moe_layer_pattern expert_pattern router_pattern use_grouped_mm "
        "disable_triton_grouped_mm route_norm route_scale score_apply combine_impl "
        "row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin "
        "comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k "
        "load_balance_coeff routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr "
        "top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern "
        "expert_activation",
        "enabled",
    ),
    "tensor_parallel": _section(
        _SPLIT_MODEL,
        "dtype autotp_size tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend "
        "tensor_parallel.tp_size tensor_parallel.tp_grain_size tensor_parallel.mpu "
        "tensor_parallel.tp_group tp.tp_size tp.tp_grain_size tp.mpu tp.tp_group "
        "injection_policy_tuple partition_config.tp_size partition_config.layer_specs "
        "partition_config.embedding_partition_dim partition_config.lm_head_patterns "
        "partition_config.use_default_specs partition_config.strict_mode preset_model "
        "keep_module_on_host replace_with_kernel_inject kernel_inject",
        "autotp_size",
    ),
    "pipeline.stages": _refused("there is no pipeline parallelism here", 1),
    **_rows(
        "pipeline",
        "partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned "
        "use_reentrant",
        _always(_NO_SPLIT, "any"),
    ),
    "activation_checkpointing.cpu_checkpointing": _OFFLOAD,
    "activation_checkpointing.partition_activations": _always(_NO_SPLIT),
    "activation_checkpointing.number_checkpoints": _always(_ACTIVATIONS.text, "int"),
    **_rows(
        "activation_checkpointing",
        "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
        _ACTIVATIONS,
    ),
    "flops_profiler": _section(
        _refused("onefold has no FLOPs profiler; use torch.profiler"),
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        "enabled",
    ),
    **_rows(
        "",
        "tensorboard csv_monitor",
        _section(_MONITOR, "enabled output_path job_name", "enabled"),
    ),
    "wandb": _section(_MONITOR, "enabled group team project", "enabled"),
    "comet": _section(
        _MONITOR,
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key "
        "online mode",
        "enabled",
    ),
    "comms_logger": _section(
        _always("the ledger counts every collective"), "enabled prof_all prof_ops verbose debug"
    ),
    "timers": _section(_QUIET, "throughput.enabled throughput.synchronized"),
    "aio": _section(
        _always(_NO_OFFLOAD),
        "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    ),
    "checkpoint.load_universal": _refused("DeepSpeed's universal checkpoints are not read"),
    "checkpoint.use_node_local_storage": _refused("checkpoints are written to one shared place"),
    "checkpoint.tag_validation": _always(_CHECKPOINT_WRITER, "str"),
    "checkpoint.checkpoint_serialization": _always(_CHECKPOINT_WRITER),
    "checkpoint.parallel_write": _section(_always(_CHECKPOINT_WRITER), "pipeline_stage"),
    "checkpoint.writer": _section(
        _always(_CHECKPOINT_WRITER),
        "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled "
        "io_multiplier",
    ),
    "datastates_ckpt": _section(_refused("this checkpoint engine is not here"), None),
    "weight_quantization": _section(_QUANTIZED, None),
    "compile": _section(
        _refused("DeepCompile is not here; torch.compile the model instead"),
        "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
        "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
        "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
        "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes",
        "deepcompile",
    ),
    "hybrid_engine": _section(
        _refused("onefold only trains; there is no inference engine"),
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size enable_cuda_graph",
        "enabled",
    ),
    "autotuning": _section(
        _refused("onefold does not tune or launch runs"),
        "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric "
        "metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings mp_size "
        "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
        "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes model_info_path "
        "model_info.profile model_info.num_params model_info.hidden_size model_info.num_layers",
        "enabled",
    ),
    "data_efficiency": _section(
        _refused("the engine neither samples data nor changes the model's input"),
        "enabled seed data_sampling.enabled data_sampling.num_epochs data_sampling.num_workers "
        "data_sampling.pin_memory data_sampling.curriculum_learning.enabled "
        "data_sampling.curriculum_learning.data_cluster_path "
        "data_sampling.curriculum_learning.curriculum_metrics "
        "data_sampling.dynamic_batching.enabled data_sampling.dynamic_batching.metrics_path "
        "data_sampling.dynamic_batching.lr_scaling_method "
        "data_sampling.dynamic_batching.max_tokens data_sampling.dynamic_batching.min_batch_size "
        "data_sampling.dynamic_batching.max_batch_size "
        "data_sampling.dynamic_batching.sequence_picking_order "
        "data_sampling.dynamic_batching.verbose "
        # What lies inside these two depends on the model and on metrics that the user names.
        "data_routing.enabled data_routing.random_ltd",
        # DeepSpeed drops tokens by the inner switch alone, whatever the outer one says.
        "enabled",
        "data_routing.random_ltd.enabled",
    ),
    # Whole sections that DeepSpeed 0.19.8 refuses by name; older files still carry them.
    **_rows(
        "",
        "amp nebula compression_training quantize_training eigenvalue sparse_attention elasticity "
        "graph_harvesting curriculum_learning progressive_layer_drop",
        _section(_REMOVED, None),
    ),
}

TABLE: dict[str, Key] = {
    **_TOP,
    **{f"zero_optimization.{name}": key for name, key in _ZERO.items()},
    **_SECTIONS,
}
"""Every known key by its full dotted path."""

FIELD_PATHS: dict[str, str] = {key.field: path for path, key in TABLE.items() if key.field}
"""From a field of ``Config`` to the dotted path it is read from."""


def _prefixes(path: str) -> set[str]:
    parts = path.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def _containers() -> frozenset[str]:
    return frozenset(prefix for path in TABLE for prefix in _prefixes(path))


def _known() -> frozenset[str]:
    inside = {f"{path}.{name}" for path, key in TABLE.items() for name in key.names or ()}
    return frozenset(path for one in inside | set(TABLE) for path in {one} | _prefixes(one))


CONTAINERS = _containers()
"""Sections whose keys stand in the table one by one."""

KNOWN = _known()
"""Every dotted path that somebody knows: keys and sections."""
