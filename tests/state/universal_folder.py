"""Writes what DeepSpeed's ``save_checkpoint`` and ``ds_to_universal.py`` leave behind, without it.

Seen in the files of DeepSpeed 0.19.8, W = 2, ZeRO 1, 2 and 3. ``is_sharded`` is how 3 has it.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

NUM_RANKS = 2
STEPS, SKIPPED = 5, 2
TAG = "global_step5_universal"
MODEL_FILES = {
    False: "mp_rank_00_model_states.pt",
    True: "zero_pp_rank_0_mp_rank_00_model_states.pt",
}
KEYS = ("fp32", "exp_avg", "exp_avg_sq")


class Values(NamedTuple):
    """What is in the folder."""

    params: dict[str, dict[str, Tensor]]
    """By name; moments of the trainable ones."""
    buffers: dict[str, Tensor]


def values_of(module: nn.Module, seed: int = 3) -> Values:
    """Random fp32 numbers in the shapes of a model."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    params = {}
    for name, param in module.named_parameters():
        params[name] = {"fp32": numbers(param)}
        if param.requires_grad:
            params[name]["exp_avg"] = 0.1 * numbers(param)
            params[name]["exp_avg_sq"] = 0.1 + numbers(param).square()
    return Values(params, {name: numbers(buffer) for name, buffer in module.named_buffers()})


@contextmanager
def deepspeeds_classes() -> Iterator[dict[str, type]]:
    """Classes of the names that its pickles have; no others' code knows them."""
    scaler, config = "deepspeed.runtime.fp16.loss_scaler", "deepspeed.runtime.zero.config"
    found: dict[str, type] = {
        short: type(short, (), {"__module__": scaler})
        for short in ("LossScaler", "DynamicLossScaler", "Unknown")
    }
    members = [("optimizer_states", 1), ("gradients", 2), ("weights", 3)]
    found["ZeroStageEnum"] = cast("type", IntEnum("ZeroStageEnum", members, module=config))
    modules = {}
    for where in (scaler, config):
        for end in (i for i, letter in enumerate(f"{where}.") if letter == "."):
            modules[where[:end]] = ModuleType(where[:end])
    for short, cls in found.items():
        setattr(modules[cls.__module__], short, cls)
    sys.modules.update(modules)
    try:
        yield found
    finally:
        for name in modules:
            del sys.modules[name]


def instance(cls: type, **attributes: Any) -> Any:
    one = cls()
    one.__dict__.update(attributes)
    return one


def write_universal(
    directory: Path,
    module: nn.Module,
    groups: Sequence[Sequence[str]],
    *,
    is_sharded: bool,
    loss_scaler: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Values:
    """Write a folder of random values.

    Args:
        directory: where ``latest_universal`` goes.
        module: whose shapes and names to take.
        groups: names of the trainable parameters.
        is_sharded: as from a run whose parameters were.
        loss_scaler: attributes of a dynamic one.
        more: further items of the model's file, the scheduler's state for example.
    """
    values = values_of(module)
    folder = directory / TAG
    first = {id(param): name for name, param in module.named_parameters()}
    names = {
        name: first[id(param)] for name, param in module.named_parameters(remove_duplicate=False)
    }
    for name, tensors in values.params.items():
        is_trainable = len(tensors) > 1
        if is_sharded and is_trainable:
            for key, tensor in tensors.items():
                save(tensor.reshape(-1).clone(), folder / "zero" / name / f"{key}.pt")
        elif not is_sharded:
            more_keys = {"cat_dim": 0} if is_trainable else {}
            for key, tensor in tensors.items():
                save({**more_keys, "param": tensor}, folder / "zero" / name / f"{key}.pt")
            if is_trainable:
                step = torch.tensor(float(STEPS - SKIPPED))
                save(step, folder / "zero" / name / "step.pt")
    if not is_sharded:  # the converter writes all else that the model's state dict has, too
        for name, tensor in values.buffers.items():
            save({"param": tensor.float()}, folder / "zero" / name / "fp32.pt")
        for name, other in names.items():
            if name != other:
                tensor = values.params[other]["fp32"]
                save({"param": tensor}, folder / "zero" / name / "fp32.pt")
    for path, state in _model_states(folder, values, groups, names, is_sharded).items():
        save(state | dict(more or {}), path)
    with deepspeeds_classes() as classes:
        state = _optimizer_state(values, groups, classes, is_sharded, loss_scaler)
        save(state, folder / "zero" / "optimizer_state.pt")
    (directory / "latest_universal").write_text(TAG)
    return values


def save(data: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(data, path)


def flat_buffers(groups: Sequence[Sequence[str]], is_sharded: bool) -> list[tuple[int, list[str]]]:
    """Group and names of each; a sharded group is cut into several, at ``sub_group_size``."""
    found = []
    for position, names in enumerate(groups):
        half = len(names) // 2 if is_sharded and len(names) > 1 else len(names)
        found += [(position, list(part)) for part in (names[:half], names[half:]) if part]
    return found


def _model_states(
    folder: Path,
    values: Values,
    groups: Sequence[Sequence[str]],
    names: Mapping[str, str],
    is_sharded: bool,
) -> dict[Path, dict[str, Any]]:
    whole = {name: values.params[first]["fp32"] for name, first in names.items()}
    kept = {name: torch.zeros(0) for name in whole} if is_sharded else whole
    frozen = {name: one["fp32"] for name, one in values.params.items() if len(one) == 1}
    state: dict[str, Any] = {
        "module": OrderedDict(kept | values.buffers),
        "buffer_names": list(values.buffers),
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, values.params[name]["fp32"].shape) for name in part)
            for _, part in flat_buffers(groups, is_sharded)
        ],
        "frozen_param_shapes": None,
        "shared_params": {name: first for name, first in names.items() if name != first},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": SKIPPED,
        "global_steps": STEPS,
        "global_samples": 12 * STEPS,
        "dp_world_size": NUM_RANKS,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"train_micro_batch_size_per_gpu": 6},
        "ds_version": "0.19.8",
        "epoch": 7,
    }
    if not is_sharded:
        return {folder / MODEL_FILES[False]: state}
    state["frozen_param_shapes"] = OrderedDict((n, tensor.shape) for n, tensor in frozen.items())
    found = {}
    for rank in range(NUM_RANKS):
        fragments = OrderedDict()
        for name, tensor in frozen.items():
            length = -(-tensor.numel() // NUM_RANKS)
            padded = torch.full((length * NUM_RANKS,), 99.0)
            padded[: tensor.numel()] = tensor.reshape(-1)
            fragments[name] = padded[rank * length : (rank + 1) * length].clone()
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        found[path] = state | {"frozen_param_fragments": fragments}
    return found


def settings_of(group: int) -> dict[str, Any]:
    return {
        "weight_decay": (0.1, 0.0)[group],
        "lr": (0.05, 0.01)[group],
        "betas": (0.8, 0.99),
        "eps": 1e-6,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }


def _optimizer_state(
    values: Values,
    groups: Sequence[Sequence[str]],
    classes: Mapping[str, type],
    is_sharded: bool,
    loss_scaler: Mapping[str, Any] | None,
) -> dict[str, Any]:
    buffers = flat_buffers(groups, is_sharded)
    param_groups = [
        settings_of(g) | {"params": [n for n, (own, _) in enumerate(buffers) if own == g]}
        for g in range(len(groups))
    ]
    state: dict[str, Any] = {
        "loss_scaler": instance(classes["LossScaler"], cur_scale=1.0, dynamic=False)
        if loss_scaler is None
        else instance(classes["DynamicLossScaler"], dynamic=True, **loss_scaler),
        "dynamic_loss_scale": loss_scaler is not None,
        "overflow": False,
        "zero_stage": classes["ZeroStageEnum"](3 if is_sharded else 1),
        "ds_version": "0.19.8",
        "param_groups": param_groups,
    }
    if is_sharded:
        flat = {
            number: {
                "step": torch.tensor(float(STEPS - SKIPPED)),
                **{
                    key: torch.cat([values.params[name][key].reshape(-1) for name in names])
                    for key in KEYS[1:]
                },
            }
            for number, (_, names) in enumerate(buffers)
        }
        state["optimizer_state_dict"] = {"state": flat, "param_groups": param_groups}
    return state
