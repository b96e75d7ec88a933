"""torch.compile of blocks and of whole modules, before and after ``initialize``.

The engine's module hooks are run by dynamo, never traced. What is compiled reads parameters whose
values change in place, and which are freed and gathered again at stage 3, also if it was compiled
before there was an engine.
"""

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.autograd.helpers import Forward, Net, Twin, check, engine_over, own_name, plain
from tests.harness import RankContext, distributed
from tests.rig import STAGES

BLOCKS = ["wrapped blocks", "blocks in place"]
WHOLES = ["wrapped model", "model in place", "model in place, after", "engine.module wrapped"]
WARM = ["warm blocks", "warm model"]
WAYS = BLOCKS + WHOLES + WARM

Compiler = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]


class Counting:
    """The aot_eager backend, counting graphs."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        compiled: Compiler = torch._dynamo.lookup_backend("aot_eager")
        return compiled(graph, inputs)


def _compile_before(module: nn.Module, way: str, backend: Any) -> nn.Module:
    """What a user does to the model before ``initialize``."""
    layers = module.layers
    assert isinstance(layers, nn.ModuleList)
    if way == "wrapped blocks":
        for index, layer in enumerate(layers):
            layers[index] = torch.compile(layer, backend=backend)  # type: ignore[assignment]
    elif way in ("blocks in place", "warm blocks"):
        for layer in layers:
            layer.compile(backend=backend)
    elif way in ("model in place", "warm model"):
        module.compile(backend=backend)
    elif way == "wrapped model":
        wrapped: Any = torch.compile(module, backend=backend)
        assert isinstance(wrapped, nn.Module)
        return wrapped
    if way in WARM:
        plain(module, module, rank=7, k=0)
        module.zero_grad()
    return module


class Compiled:
    """An engine over a compiled net, its twin, which is not compiled, and what to call."""

    def __init__(self, ctx: RankContext, way: str, stage: int, backend: Any) -> None:
        torch.compiler.reset()
        ctx.cleanup(torch.compiler.reset)
        self._ctx = ctx
        self._twin = Twin(Net(), ctx.world_size)
        module = _compile_before(Net(), way, backend)
        self.engine = engine_over(ctx, module, stage)
        self._forward: Forward = self.engine
        if way == "model in place, after":
            module.compile(backend=backend)
        elif way == "engine.module wrapped":
            self._forward = torch.compile(self.engine.module, backend=backend)

    def _backward(self, module: nn.Module, forward: Forward, rank: int, k: int) -> None:
        plain(module, self._forward if forward is self.engine else forward, rank, k)

    def check(self, mode: str) -> None:
        """One step of three backwards."""
        check(self._ctx, self.engine, self._twin, mode, self._backward)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2, timeout_s=180)
def test_compiled_code_sees_every_step(ctx: RankContext, stage: int, way: str) -> None:
    """Over several steps and scopes, without compiling anything again after the second."""
    backend = Counting()
    compiled = Compiled(ctx, way, stage, backend)
    for mode in ("bare", "window"):
        compiled.check(mode)
    num_graphs = backend.num_graphs
    assert num_graphs > 0, "nothing was compiled"
    for mode in ("bare", "armed", "no_sync", "window"):
        compiled.check(mode)
    assert backend.num_graphs == num_graphs, "compiled again although only values changed"


@pytest.mark.parametrize("way", ["blocks in place", "wrapped model"])
@distributed(world_size=2, timeout_s=180)
def test_a_second_engine_over_compiled_code(ctx: RankContext, way: str) -> None:
    """Stage 3 after the first engine has gone: nothing calls what belonged to that."""
    first = Compiled(ctx, way, 2, Counting())
    first.check("bare")
    first.engine.destroy()
    module, twin = first.engine.module, Twin(Net(), ctx.world_size)
    twin.module.load_state_dict({own_name(n): t for n, t in module.state_dict().items()})
    second = engine_over(ctx, module, 3)
    for mode in ("bare", "window"):
        check(ctx, second, twin, mode, plain)


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
@distributed(world_size=2, timeout_s=400)
def test_inductor(ctx: RankContext) -> None:
    """Generated code, in place of blocks, where parameters come and go."""
    import torch._inductor.config

    # Inductor sets it when it first builds a kernel.
    ctx.cleanup(os.environ.pop, "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)
    # One process, scalar code, and neither headers nor instruction sets are tried out beforehand.
    settings = {
        "compile_threads": 1,
        "cpp_cache_precompile_headers": False,
        "cpp.simdlen": 1,
        "cpp.vec_isa_ok": True,
    }
    with torch._inductor.config.patch(settings):
        compiled = Compiled(ctx, "wrapped blocks", 3, "inductor")
        for mode in ("bare", "window", "bare"):
            compiled.check(mode)
