"""Peers, set up as their users do: DDP and FSDP2 of torch, and DeepSpeed."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.engines import Engine, Setting, losses, make_optimizer, trainable


class Ddp(Engine):
    """DDP; ``defers`` puts all but the last forward and backward under ``no_sync``."""

    def __init__(self, setting: Setting, *, defers: bool) -> None:
        self._setting = setting
        self._defers = defers
        model = setting.workload.model().to(setting.dtype)
        self._model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._optimizer = make_optimizer(trainable(model), setting.workload)

    def step(self, num_backwards: int) -> float:
        total, last = 0.0, self._setting.workload.num_outermost(num_backwards) - 1
        for k, loss_of in enumerate(losses(self._setting, self._model, num_backwards)):
            with self._model.no_sync() if self._defers and k < last else contextlib.nullcontext():
                loss = loss_of()
                loss.backward()
            total += loss.item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def destroy(self) -> None:
        del self._model, self._optimizer


class Fsdp2(Engine):
    """FSDP2 over the blocks and the root; "stage 2" is ``reshard_after_forward=False``.

    ``defers`` is what its users write: no reduction and no resharding but in the last backward.
    """

    def __init__(self, setting: Setting, *, defers: bool) -> None:
        self._setting = setting
        self._defers = defers
        model = setting.workload.model().to(setting.dtype)
        mesh = init_device_mesh("cpu", (setting.world_size,))
        self._group = mesh.get_group()
        classes = tuple(setting.workload.block_classes(model))
        reshards = setting.stage == 3
        for module in list(model.modules()):
            if isinstance(module, classes):
                fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
        root: Any = fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
        assert isinstance(root, FSDPModule)
        self._root = root
        self.model: nn.Module = model
        self.optimizer = make_optimizer(trainable(model), setting.workload)

    def step(self, num_backwards: int) -> float:
        total, last = 0.0, self._setting.workload.num_outermost(num_backwards) - 1
        for k, loss_of in enumerate(losses(self._setting, self.model, num_backwards)):
            if self._defers:
                self._root.set_requires_gradient_sync(k == last)
                self._root.set_is_last_backward(k == last)
                self._root.set_reshard_after_backward(k == last)
            loss = loss_of()
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def destroy(self) -> None:
        del self.model, self._root, self.optimizer
        if self._group is not dist.group.WORLD:
            dist.destroy_process_group(self._group)


class DeepSpeed(Engine):
    """DeepSpeed with its defaults, without clipping; ``coalesces`` as its context does."""

    def __init__(self, setting: Setting, *, coalesces: bool) -> None:
        import deepspeed

        self._setting = setting
        self._coalesces = coalesces
        model = setting.workload.model()
        steps = setting.workload.num_outermost(setting.num_backwards)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1 if coalesces else steps,
            "zero_optimization": {"stage": setting.stage},
            "bf16": {"enabled": setting.dtype == torch.bfloat16},
            "gradient_clipping": 0,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        optimizer = make_optimizer(trainable(model), setting.workload)
        self.engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(self, num_backwards: int) -> float:
        total, last = 0.0, self._setting.workload.num_outermost(num_backwards) - 1
        scope = self.engine.coalesce_grad_reduction
        with scope() if self._coalesces else contextlib.nullcontext():
            for k, loss_of in enumerate(losses(self._setting, self.engine, num_backwards)):
                if not self._coalesces:
                    self.engine.set_gradient_accumulation_boundary(k == last)
                loss = loss_of()
                self.engine.backward(loss, scale_wrt_gas=False)  # the loss is scaled already
                total += loss.item()
                if not self._coalesces:
                    self.engine.step()
        if self._coalesces:
            self.engine.step()
        return total

    def destroy(self) -> None:
        self.engine.destroy()
        del self.engine
