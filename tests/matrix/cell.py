"""One field of the matrix: what a rank does, and the single process it is compared with."""

import functools
import hashlib
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import onefold
from tests import rig
from tests.harness import RankContext
from tests.matrix.features import Setup, setup_of
from tests.matrix.model import Model, Options, inputs

MODES = ("bare", "window", "armed", "no_sync", "nested")
LR = 0.5
_REFUSALS = (ValueError, NotImplementedError, onefold.StateError)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SMALL = 1e-6  # of gradient clipping, in torch and here


@dataclass(frozen=True, slots=True)
class Result:
    """What one rank saw of one field.

    Attributes:
        ulps: the worst deviation of a gradient from the reference.
        refusal: the engine's message, if it refused.
        problem: what was wrong beside the ulps.
        digest: of all weights after the step; equal on all ranks.
    """

    ulps: float = 0.0
    refusal: str = ""
    problem: str = ""
    digest: str = ""


class _Refused(Exception):
    pass


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except _REFUSALS as error:
        raise _Refused(str(error)) from error


def play(
    ctx: RankContext, names: tuple[str, ...], stage: int, runs: list[tuple[str, int]]
) -> list[Result]:
    """One step in each mode of ``runs``, with so many backwards, each on an engine of its own."""
    setup = setup_of(names)
    mesh = None
    if setup.mesh is not None:
        mesh = ctx.device_mesh(*setup.mesh, names=("replicate", "shard"))
    if setup.model.compiled:
        _prepare_to_compile(ctx)
    return [_play_one(ctx.rank, setup, mesh, stage, mode, n) for mode, n in runs]


def _prepare_to_compile(ctx: RankContext) -> None:
    """No block goes back to eager in silence."""
    strict = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=256)
    strict.__enter__()
    ctx.cleanup(strict.__exit__, None, None, None)


def _play_one(
    rank: int, setup: Setup, mesh: DeviceMesh | None, stage: int, mode: str, backwards: int
) -> Result:
    with ExitStack() as stack:
        try:
            with _refusing():
                engine = _start(setup, mesh, stage)
            stack.callback(engine.destroy)
            mark = engine.ledger.mark()
            _run(rank, engine, setup, mode, backwards)
        except _Refused as refused:
            return Result(refusal=str(refused))
        engine.reduce_gradients()
        counted = rig.counts(engine, mark)
        found = _of_all_experts(setup, _gradients(engine))
        wanted, sizes = reference(setup.model.plain(), _ks(setup, backwards), setup.divisor)
        problem = _compare_counts(engine, setup, mode, counted)
        ulps, wrong = deviation(found, wanted, sizes, _DTYPES[setup.wire])
        norm = engine.get_global_grad_norm()
        engine.step()
        with engine.full_parameters():
            own = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        weights = _of_all_experts(setup, own)
        wrong = wrong or _compare_norm(setup, found, norm)
        wrong = wrong or _compare_weights(setup, found, norm or 0.0, weights)
        return Result(ulps, problem=problem or wrong, digest=_digest(weights))


def _start(setup: Setup, mesh: DeviceMesh | None, stage: int) -> onefold.Engine:
    zero = {"stage": stage, **setup.config["zero_optimization"]}
    return onefold.initialize(
        model=Model(setup.model),
        optimizer=lambda params: _optimizer(params, setup, fused=None),
        config={**setup.config, "zero_optimization": zero},
        mesh=mesh,
    ).engine


def _optimizer(params: Any, setup: Setup, fused: bool | None) -> torch.optim.Optimizer:
    kind = torch.optim.Adam if setup.adam else torch.optim.SGD
    return kind(params, lr=LR, fused=fused)


# -- the backwards of one step -----------------------------------------------------------------


def _num(setup: Setup, rank: int, backwards: int) -> int:
    return max(0, backwards - rank) if setup.uneven else backwards


def _ks(setup: Setup, backwards: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of all backwards of a step, rank by rank."""
    return tuple(
        tuple(
            100 * micro + k
            for micro in range(setup.micro_steps)
            for k in range(_num(setup, rank, backwards))
        )
        for rank in range(setup.world_size)
    )


def _run(rank: int, engine: onefold.Engine, setup: Setup, mode: str, backwards: int) -> None:
    own = _num(setup, rank, backwards)

    def run(micro: int, ks: range) -> None:
        for k in ks:
            engine.backward(engine(inputs(rank, 100 * micro + k, setup.model.real)))

    for micro in range(setup.micro_steps):
        if micro:
            engine.step()  # off the boundary
        with ExitStack() as stack:
            _enter(stack, engine, setup, mode, own)
            if mode == "nested":
                run(micro, range(min(1, own)))
                with ExitStack() as inner:
                    _enter(inner, engine, setup, mode, own)
                    run(micro, range(1, own - 1))
                run(micro, range(max(1, own - 1), own))
            else:
                run(micro, range(own))


def _enter(
    stack: ExitStack, engine: onefold.Engine, setup: Setup, mode: str, backwards: int
) -> None:
    """Open the scope of ``mode``; the engine may refuse."""
    arguments: dict[str, Any] = {"across": "replicate"} if setup.across else {}
    with _refusing():
        if mode == "no_sync":
            stack.enter_context(engine.no_sync())
        elif mode == "armed":
            declared = max(1, backwards)
            stack.enter_context(engine.coalesce_grad_reduction(backwards=declared, **arguments))
        elif mode != "bare":
            stack.enter_context(engine.coalesce_grad_reduction(**arguments))


# -- what came out -----------------------------------------------------------------------------


def _gradients(engine: onefold.Engine) -> dict[str, Tensor | None]:
    return {
        name: engine.full_grad(param)
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }


def _of_all_experts(setup: Setup, own: dict[str, Any]) -> dict[str, Any]:
    """What all ranks hold, where they hold different experts; alike on all ranks."""
    everybody = rig.gathered(own) if setup.model.experts > 1 else [own]
    return {name: value for one in everybody for name, value in one.items()}


@functools.lru_cache(maxsize=256)
def reference(
    options: Options, ks: tuple[tuple[int, ...], ...], divisor: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every gradient in one process and in fp64, and the sums of its terms' sizes.

    The sizes are the gradients of a model whose weights and inputs are all positive: the sum over
    all ways through the layers of the products' magnitudes. ReLU only leaves some of them out.
    """
    model, positive = Model(options), Model(options)
    for param in positive.parameters():
        param.data.abs_()
    for rank, own in enumerate(ks):
        for k in own:
            data = inputs(rank, k, options.real)
            model(data).backward()
            positive(data.abs()).backward()
    return _divided(model, divisor), _divided(positive, divisor)


def _divided(model: nn.Module, divisor: int) -> dict[str, Tensor]:
    return {
        name: param.grad / divisor
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def deviation(
    found: dict[str, Tensor | None],
    wanted: dict[str, Tensor],
    sizes: dict[str, Tensor],
    dtype: torch.dtype,
) -> tuple[float, str]:
    """The worst distance in ulps of ``dtype`` at the terms' size, and what is missing."""
    if found.keys() != wanted.keys():
        return math.inf, f"gradients of {sorted(found)}, expected {sorted(wanted)}"
    worst = 0.0
    for name, own in found.items():
        if own is None:
            return math.inf, f"{name} has no gradient"
        distance = (own.double() - wanted[name]).abs()
        if not distance.isfinite().all():
            return math.inf, f"{name} has a gradient that is not finite"
        worst = max(worst, float((distance / _ulp(sizes[name], dtype)).max()))
    return worst, ""


def _ulp(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours in ``dtype``; of zero, that of the smallest normal number."""
    _, exponent = torch.frexp(sizes.clamp(min=torch.finfo(dtype).tiny))
    return torch.ldexp(torch.full_like(sizes, torch.finfo(dtype).eps), exponent - 1)


def _compare_norm(setup: Setup, found: dict[str, Tensor | None], norm: float | None) -> str:
    order = math.inf if "norm_order" in setup.config.get("onefold", {}) else 2.0
    whole = torch.cat([own.double().flatten() for own in found.values() if own is not None])
    wanted = torch.linalg.vector_norm(whole, order)
    # One rounding to fp32, and the order of a sum in fp64.
    error = abs((norm or 0.0) - float(wanted)) / float(_ulp(wanted, torch.float32))
    return "" if error <= 0.51 else f"the norm of order {order} is {norm}, expected {wanted}"


def _compare_weights(
    setup: Setup, found: dict[str, Tensor | None], norm: float, weights: dict[str, Tensor]
) -> str:
    """The weights are those of a torch optimizer fed with the same gradients, bit for bit."""
    model = Model(replace(setup.model.plain(), dtype=setup.model.dtype))
    is_half = any(setup.config.get(half, {}).get("enabled") for half in ("bf16", "fp16"))
    if is_half:
        model.float()
    params = dict(model.named_parameters())
    max_norm = setup.config.get("gradient_clipping", 0.0)
    factor = min(1.0, max_norm / (norm + _SMALL)) if max_norm else 1.0
    for name, own in found.items():
        assert own is not None
        params[name].grad = own.to(params[name].dtype) * factor
    trainable = [param for param in params.values() if param.requires_grad]
    _optimizer(trainable, setup, fused=True if setup.offloads else None).step()
    for name, own in weights.items():
        wanted = params[name].detach().to(own.dtype)
        if not torch.equal(own, wanted):
            worst = (own.double() - wanted.double()).abs().max()
            return f"after the step {name} is up to {worst} from what its gradient makes of it"
    return ""


def _compare_counts(
    engine: onefold.Engine, setup: Setup, mode: str, counted: dict[str, int]
) -> str:
    """Inside one scope: one reduction per trainable unit and axis."""
    if mode == "bare" or setup.micro_steps > 1 or (setup.across and mode != "no_sync"):
        return ""
    units = [unit for unit in engine.plan.units if unit.is_trainable]
    wanted = {
        "reduce_scatter": sum(unit.layout.num_shards > 1 for unit in units),
        "all_reduce": sum(unit.num_replicas > 1 for unit in units),
    }
    found = {kind: counted.get(kind, 0) for kind in wanted}
    return "" if found == wanted else f"collectives {found}, expected {wanted}"


def _digest(weights: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in weights.values():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
