"""Every key that DeepSpeed 0.19.8 reads from its JSON, and what onefold makes of it: one table.

``HONOURED`` keys become fields of ``Config``. ``ALWAYS`` keys are accepted and change nothing: the
design does it anyway, or it cannot change a result. ``REFUSED`` keys would change results or
promise a feature that is not here; a value that asks for nothing (``off``) is accepted even so.

A section stands in the table as one row when its keys share one fate, with the names inside it in
``names``; a section whose keys differ is spelled out, one row a key. Of those, a section in
``SWITCHED`` has one key that turns it on, and the others mean nothing while it is off.
"""

from dataclasses import replace

from onefold.config_rule import Key, always, honoured, refused, rows, section

_DTYPES: dict[object, object] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
}
_HALVES: dict[object, object] = {name: one for name, one in _DTYPES.items() if one != "fp32"}
_DTYPE_TEXT = '"fp32", "bf16" or "fp16"'
_CPU: dict[object, object] = {"cpu": True, "none": None}
_CPU_TEXT = '"cpu" or "none" (nothing is kept in files, so no "nvme")'
_BOOL: dict[object, object] = {True: True, False: None}

_CAST = refused("the dtype is bf16's, fp16's or the one that the model comes with", None)
_FP32_MASTER = refused("master weights, their gradients and the optimizer's state are fp32 here")
_PINNED = "host memory is always pinned where there is a GPU"
_NVME = "it serves offload to files, which is not here"
_EXPERTS = refused("models are not rewritten here; build the experts with onefold.moe")

_REMOVED = refused("DeepSpeed 0.19.8 has removed this section, and onefold does not have it")
_SPLIT_MODEL = refused("onefold is data parallel only; the model is not split over ranks", 0, 1)
_QUANTIZED = refused("weights and gradients are not quantized here")
_MONITOR = refused("onefold writes no such files; log from the training loop")

_FLAT = always("gradients always live in flat buffers and are reduced from there")
_GATHER = always("units are gathered and published as whole flat buffers, in plan order")
_GATHER_NUMEL = always(_GATHER.text, "int")
_PREDIVIDE = "the sum over ranks is divided once, after the reduction, which gives the same mean"
_QUIET = always("nothing is printed; the log and the ledger have the numbers")
_NO_SPLIT = "there is no pipeline, sequence or model parallelism here"
_ACTIVATIONS = always("activation checkpointing is torch.utils.checkpoint's")
_CHECKPOINT_WRITER = "checkpoints are written in onefold's own way"

_TOP: dict[str, Key] = {
    "train_batch_size": honoured("train_batch_size", "an integer above 0", derivable=True),
    "train_micro_batch_size_per_gpu": honoured(
        "train_micro_batch_size_per_gpu", "an integer above 0", derivable=True
    ),
    "gradient_accumulation_steps": honoured(
        "gradient_accumulation_steps", "an integer above 0", derivable=True
    ),
    "managed_gradient_accumulation": honoured("managed_gradient_accumulation", "true or false"),
    "gradient_clipping": honoured("gradient_clipping", "a number, 0 (off) or above"),
    "gradient_allreduce_op": honoured("gradient_allreduce_op", '"mean" or "sum"'),
    "optimizer.type": honoured("optimizer.type", "the name of an optimizer"),
    "optimizer.params": honoured("optimizer.params", "a mapping of its arguments"),
    "optimizer.legacy_fusion": always("it concerns DeepSpeed's fp16 wrapper only"),
    "scheduler.type": honoured("scheduler.type", "the name of a scheduler"),
    "scheduler.params": honoured("scheduler.params", "a mapping of its arguments"),
    "prescale_gradients": always(_PREDIVIDE),
    "gradient_predivide_factor": always(_PREDIVIDE, "number"),
    "communication_data_type": honoured(
        "communication_data_type", _DTYPE_TEXT, _DTYPES, derivable=True
    ),
    "data_types.grad_accum_dtype": honoured(
        "grad_accum_dtype", _DTYPE_TEXT, _DTYPES, derivable=True
    ),
    **rows("data_types", "param_dtype buffer_dtype", _CAST),
    "data_types.keep_in_fp32_modules": refused("dtypes are not chosen by a module's name here", []),
    "seq_parallel_communication_data_type": always(_NO_SPLIT, "str"),
    "sequence_parallel_size": _SPLIT_MODEL,
    "data_parallel_size": replace(_SPLIT_MODEL, text="the process group has the ranks", off=()),
    "use_data_before_expert_parallelism": _EXPERTS,
    **rows("", "steps_per_print vocabulary_size", always(_QUIET.text, "int")),
    **rows("", "dump_state wall_clock_breakdown memory_breakdown", _QUIET),
    "log_level": always('set the level of the logger "onefold" with logging', "any"),
    "disable_python_gc": always("Python's garbage collector is left alone"),
    "disable_allgather": always("DeepSpeed reads it and does nothing with it"),
    "allgather_size": _GATHER_NUMEL,
    "dataloader_drop_last": refused("no loader built here drops a batch; bring your own"),
    "zero_allow_untested_optimizer": always("every elementwise optimizer of torch is allowed"),
    "zero_force_ds_cpu_optimizer": always("an offloaded optimizer steps by torch's CPU kernels"),
    "sparse_gradients": _REMOVED,
    "onefold.block_classes": honoured("block_classes", "a list of class names", derivable=True),
    "onefold.transport": honoured(
        "transport", '"auto", "cross-memory", "direct" or "native"', derivable=True
    ),
    "onefold.timeout_s": honoured("timeout_s", "a number of seconds above 0"),
    "onefold.on_nonfinite": honoured("on_nonfinite", '"skip", "raise" or "ignore"'),
    "onefold.norm_order": honoured("norm_order", 'a number of 1 or above, or "inf"'),
}

_ZERO: dict[str, Key] = {
    "stage": honoured("stage", "0, 1, 2 or 3"),
    "reduce_bucket_size": honoured(
        "reduce_bucket_numel",
        "a number of elements above 0 (left out, it means 25 MiB)",
        derivable=True,
    ),
    **rows("", "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce", _FLAT),
    **rows("", "round_robin_gradients", _FLAT),
    "parameter_alignment": always("every parameter always starts at a 64-byte boundary"),
    **rows("", "allgather_partitions memory_efficient_linear pipeline_loading_checkpoint", _GATHER),
    **rows("", "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params", _GATHER),
    **rows("", "stage3_allgather_sequential allgather_sequential", _GATHER),
    **rows("", "allgather_bucket_size sub_group_size", _GATHER_NUMEL),
    **rows("", "stage3_prefetch_bucket_size prefetch_bucket_size", _GATHER_NUMEL),
    **rows("", "stage3_param_persistence_threshold param_persistence_threshold", _GATHER_NUMEL),
    **rows("", "stage3_model_persistence_threshold model_persistence_threshold", _GATHER_NUMEL),
    **rows("", "stage3_max_live_parameters max_live_parameters", _GATHER_NUMEL),
    **rows("", "stage3_max_reuse_distance max_reuse_distance", _GATHER_NUMEL),
    **rows("", "stage3_module_granularity_threshold module_granularity_threshold", _GATHER_NUMEL),
    "overlap_comm": always("communication overlaps with compute wherever the order allows it"),
    "compute_grad_norm": always("the gradient norm is computed when it is read or clipping is on"),
    **rows(
        "",
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
        always("full_state_dict() always gathers whole weights, in their own dtype"),
    ),
    "load_from_fp32_weights": refused("master weights are always restored as they were", True),
    "elastic_checkpoint": refused("it names a checkpoint layout that onefold does not have"),
    "legacy_stage1": refused("it names an implementation that onefold does not have"),
    "ignore_unused_parameters": refused("unused parameters are legal in every step", True),
    "zero_hpz_partition_size": refused("a secondary shard group is not available here", 0, 1),
    **rows("", "zero_quantized_weights zero_quantized_nontrainable_weights", _QUANTIZED),
    "zero_quantized_gradients": _QUANTIZED,
    "override_module_apply": always("nn.Module is never patched"),
    **rows("", "log_trace_cache_warnings enable_sanity_checks", always("checks are always on")),
    "save_muon_momentum_buffer_in_memory": always(_NVME),
    "leaf_module": section(
        always("name the blocks to gather as a whole in onefold.block_classes"),
        "classes names name_suffixes",
    ),
    "offload_param.device": honoured("offload_param", _CPU_TEXT, _CPU, derivable=True),
    **rows("offload_param", "buffer_count buffer_size max_in_cpu", always(_NVME, "number")),
    "offload_param.nvme_path": always(_NVME, "any"),
    "offload_param.pin_memory": always(_PINNED),
    "offload_optimizer.device": honoured("offload_optimizer", _CPU_TEXT, _CPU, derivable=True),
    **rows("offload_optimizer", "pipeline_read pipeline_write fast_init", always(_NVME)),
    "offload_optimizer.buffer_count": always(_NVME, "number"),
    "offload_optimizer.nvme_path": always(_NVME, "any"),
    "offload_optimizer.pin_memory": always(_PINNED),
    "offload_optimizer.ratio": refused("either all of the optimizer is offloaded or none", 1.0),
    "offload_optimizer.super_offload": refused("there is one way of offloading here"),
    "offload_optimizer.cpuadam_cores_perc": always("torch's threads are as you set them", "number"),
    "cpu_offload": honoured("offload_optimizer", "true or false", _BOOL, derivable=True),
    "cpu_offload_param": honoured("offload_param", "true or false", _BOOL, derivable=True),
    "cpu_offload_use_pin_memory": always(_PINNED),
    "zenflow": section(
        refused("every gradient is stepped on in its own step", "none", False),
        "topk_ratio select_strategy select_interval update_interval overlap_step offload "
        "auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
    ),
    # Removed from DeepSpeed 0.19.8, and still in many files.
    "mics_shard_size": refused("DeepSpeed 0.19.8 has removed it; onefold does not have it", -1),
    **rows("", "mics_hierarchical_params_gather zeropp_loco_param", _REMOVED),
}

_BF16: dict[str, Key] = {
    "enabled": honoured("precision", "true or false", {True: "bf16", False: None}, derivable=True),
    "immediate_grad_update": always("gradients accumulate in grad_accum_dtype as they come"),
    "check_grad_overflow": always("gradients are always checked; onefold.on_nonfinite says more"),
    **rows("", "bf16_master_weights_and_grads bf16_optimizer_states", _FP32_MASTER),
}

_FP16: dict[str, Key] = {
    "enabled": honoured("precision", "true or false", {True: "fp16", False: None}, derivable=True),
    "auto_cast": refused("inputs are not cast here; cast them to fp16 before the forward"),
    "loss_scale": honoured(
        "loss_scale.loss_scale", "0 (dynamic), or a number from 2**-126 to 2**126", derivable=True
    ),
    "initial_scale_power": honoured(
        "loss_scale.initial_scale_power", "an integer from 0 to 126", derivable=True
    ),
    "loss_scale_window": honoured(
        "loss_scale.loss_scale_window", "an integer above 0", derivable=True
    ),
    "hysteresis": honoured("loss_scale.hysteresis", "an integer above 0", derivable=True),
    "consecutive_hysteresis": honoured(
        "loss_scale.consecutive_hysteresis", "true or false", derivable=True
    ),
    "min_loss_scale": honoured("loss_scale.min_loss_scale", "a number above 0", derivable=True),
    "fp16_master_weights_and_grads": _FP32_MASTER,
}

_SECTIONS: dict[str, Key] = {
    **{f"bf16.{name}": key for name, key in _BF16.items()},
    **{f"bfloat16.{name}": key for name, key in _BF16.items()},
    **{f"fp16.{name}": key for name, key in _FP16.items()},
    "torch_autocast.dtype": honoured("autocast_dtype", '"bf16" or "fp16"', _HALVES, derivable=True),
    "torch_autocast.enabled": honoured(
        "autocast_dtype", "true or false", {True: "bf16", False: None}, derivable=True
    ),
    "torch_autocast.lower_precision_safe_modules": always(
        "torch.autocast chooses by operation, and gradients cross the wire in "
        "communication_data_type",
        "any",
    ),
    "expert_parallel": section(
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
    "tensor_parallel": section(
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
    "pipeline.stages": refused("there is no pipeline parallelism here", 1),
    **rows(
        "pipeline",
        "partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned "
        "use_reentrant",
        always(_NO_SPLIT, "any"),
    ),
    "activation_checkpointing.cpu_checkpointing": refused(
        "activations are not offloaded here; use torch.autograd.graph.save_on_cpu"
    ),
    "activation_checkpointing.partition_activations": always(_NO_SPLIT),
    "activation_checkpointing.number_checkpoints": always(_ACTIVATIONS.text, "int"),
    **rows(
        "activation_checkpointing",
        "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
        _ACTIVATIONS,
    ),
    "flops_profiler": section(
        refused("onefold has no FLOPs profiler; use torch.profiler"),
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        "enabled",
    ),
    **rows(
        "",
        "tensorboard csv_monitor",
        section(_MONITOR, "enabled output_path job_name", "enabled"),
    ),
    "wandb": section(_MONITOR, "enabled group team project", "enabled"),
    "comet": section(
        _MONITOR,
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key "
        "online mode",
        "enabled",
    ),
    "comms_logger": section(
        always("the ledger counts every collective"), "enabled prof_all prof_ops verbose debug"
    ),
    "timers": section(_QUIET, "throughput.enabled throughput.synchronized"),
    "aio": section(
        always(_NVME),
        "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    ),
    "checkpoint.load_universal": honoured("load_universal", "true or false"),
    "checkpoint.use_node_local_storage": refused("checkpoints are written to one shared place"),
    "checkpoint.tag_validation": always(_CHECKPOINT_WRITER, "str"),
    "checkpoint.checkpoint_serialization": always(_CHECKPOINT_WRITER),
    "checkpoint.parallel_write": section(always(_CHECKPOINT_WRITER), "pipeline_stage"),
    "checkpoint.writer": section(
        always(_CHECKPOINT_WRITER),
        "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled "
        "io_multiplier",
    ),
    "datastates_ckpt": section(refused("this checkpoint engine is not here"), None),
    "weight_quantization": section(_QUANTIZED, None),
    "compile": section(
        refused("DeepCompile is not here; torch.compile the model instead"),
        "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
        "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
        "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
        "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes",
        "deepcompile",
    ),
    "hybrid_engine": section(
        refused("onefold only trains; there is no inference engine"),
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size enable_cuda_graph",
        "enabled",
    ),
    "autotuning": section(
        refused("onefold does not tune or launch runs"),
        "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric "
        "metric_path tuner_type tuner_early_stopping tuner_num_trials arg_mappings mp_size "
        "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
        "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes model_info_path "
        "model_info.profile model_info.num_params model_info.hidden_size model_info.num_layers",
        "enabled",
    ),
    "data_efficiency": section(
        refused("the engine neither samples data nor changes the model's input"),
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
    **rows(
        "",
        "amp nebula compression_training quantize_training eigenvalue sparse_attention elasticity "
        "graph_harvesting curriculum_learning progressive_layer_drop",
        section(_REMOVED, None),
    ),
}

TABLE: dict[str, Key] = {
    **_TOP,
    **{f"zero_optimization.{name}": key for name, key in _ZERO.items()},
    **_SECTIONS,
}
"""Every known key by its full dotted path."""

SWITCHED: dict[str, str] = {
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "torch_autocast"), "enabled"),
    **dict.fromkeys(
        ("zero_optimization.offload_param", "zero_optimization.offload_optimizer"), "device"
    ),
}
"""Sections that one key turns on, and that key."""

OLDER: dict[str, str] = {
    "bfloat16": "bf16",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
}
"""From an older name to what DeepSpeed calls it now; only one of the two may be given."""

FIELD_PATHS: dict[str, str] = {
    key.field: path for path, key in reversed(TABLE.items()) if key.field
}
"""From a field of ``Config`` to the dotted path it is read from; the first in the table if many."""


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
