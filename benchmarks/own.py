"""onefold's engines, and the wire floor over its transports."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

import onefold
from benchmarks.engines import Engine, Setting, losses, make_optimizer
from onefold.wire.buffer import Arena
from onefold.wire.collectives import Collectives
from onefold.wire.grid import DENSE
from onefold.wire.ledger import Ledger
from onefold.wire.mesh import build_mesh, join_world, leave_world

_TIMEOUT_S = 600.0


class Onefold(Engine):
    """``bare``, in a ``window``, or in one that is ``armed`` with the number of backwards."""

    def __init__(self, setting: Setting, mode: str) -> None:
        assert setting.stage is not None
        self._setting = setting
        self._mode = mode
        self.is_bare = mode == "bare"
        model = setting.workload.model()
        blocks = [one.__name__ for one in setting.workload.block_classes(model)]
        config: dict[str, Any] = {
            "zero_optimization": {"stage": setting.stage},
            "bf16": {"enabled": setting.dtype == torch.bfloat16},
            "onefold": {"block_classes": blocks, "transport": setting.transport},
        }
        self.engine = onefold.initialize(
            model=model,
            optimizer=lambda params: make_optimizer(params, setting.workload),
            config=config,
        ).engine
        self.ledger = self.engine.ledger

    def step(self, num_backwards: int) -> float:
        total = 0.0
        with self._scope(self._setting.workload.num_outermost(num_backwards)):
            for loss_of in losses(self._setting, self.engine.module, num_backwards):
                total += self.engine.backward(loss_of()).item()
        self.engine.step()
        return total

    def _scope(self, num_outermost: int) -> AbstractContextManager[object]:
        if self.is_bare:
            return contextlib.nullcontext()
        declared = num_outermost if self._mode == "armed" else None
        return self.engine.coalesce_grad_reduction(backwards=declared)

    def expected_bytes(self, num_backwards: int) -> int | None:
        """Volumes of the architecture's table: reductions of trainable units, gathers of all."""
        plan, world = self.engine.plan, self._setting.world_size
        is_bare = self.is_bare
        reductions = num_backwards if is_bare and plan.home.shards_gradients else 1
        gathers = 0
        if plan.home.shards_parameters:
            uses = self._setting.workload.gathers_per_backward * num_backwards
            gathers = uses if is_bare else 1
        elif plan.home.shards_optimizer:
            gathers = 1
        reduced = sum(
            unit.layout.numel * unit.wire_dtype.itemsize for unit in plan.units if unit.is_trainable
        )
        gathered = sum(
            unit.layout.numel * unit.dtype.itemsize
            for unit in plan.units
            if unit.is_trainable or plan.home.shards_parameters
        )
        if not plan.home.shards_optimizer:
            reductions *= 2  # an all-reduce
        return (reductions * reduced + gathers * gathered) * (world - 1) // world

    def table_bytes(self) -> int | None:
        """Peak of a window by the architecture's buffer table, with AdamW's two moments.

        ``param_full`` + ``param_shard`` + ``grad_full`` + ``grad_shard`` + ``master`` + 2 S.
        """
        home, total = self.engine.plan.home, 0
        for unit in self.engine.plan.units:
            full, shard = unit.layout.numel, unit.layout.shard_numel
            total += full * unit.dtype.itemsize
            if home.shards_parameters:
                total += shard * unit.dtype.itemsize
            if unit.is_trainable:
                master = unit.master_dtype.itemsize
                own_master = unit.dtype != unit.master_dtype
                total += full * unit.accumulation_dtype.itemsize
                total += shard * master * (3 + own_master)
        return total

    def destroy(self) -> None:
        self.engine.destroy()


class WireFloor(Engine):
    """2V bytes through the best transport here: one reduce-scatter and one all-gather of the model.

    Buffers stay from step to step. A step has no passes.
    """

    def __init__(self, setting: Setting) -> None:
        device = torch.device("cpu")
        model = setting.workload.model()
        step = 64 * setting.world_size
        numel = -(-sum(param.numel() for param in model.parameters()) // step) * step
        arena = Arena(device)
        self._world = join_world(None, device, _TIMEOUT_S)
        cut = self._world.grid.cut(DENSE, self._world.rank, shards=True)
        self._mesh = build_mesh(
            self._world, cut, arena, transport=setting.transport, timeout_s=_TIMEOUT_S
        )
        self.ledger = ledger = Ledger()
        self._collectives = Collectives(self._mesh, ledger)
        self._full = arena.lease(numel, setting.dtype, zeroed=True)
        self._shard = arena.lease(numel // setting.world_size, setting.dtype, zeroed=True)
        self._volume = self._full.nbytes * (setting.world_size - 1) // setting.world_size

    def step(self, num_backwards: int) -> float:
        full, shard = self._full, self._shard
        self._collectives.start_reduce_scatter(full, shard, 0, "all", full.dtype).wait()
        self._collectives.start_all_gather(shard, full, 0, "all").wait()
        return 0.0

    def expected_bytes(self, num_backwards: int) -> int | None:
        return 2 * self._volume

    def table_bytes(self) -> int | None:
        return self._full.nbytes + self._shard.nbytes

    def destroy(self) -> None:
        self._mesh.destroy()
        leave_world(self._world)
