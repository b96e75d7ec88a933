"""Contract 6, reproducible: sums in rank order, one division, the same bits however it is cut."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onefold.wire.buffer import Arena
from onefold.wire.transports import DirectTransport, base, direct
from tests.contract.helpers import STAGES, House, Program, Tower, run_program, start
from tests.harness import RankContext, distributed

Bits = list[dict[str, Tensor]]


def trained(
    ctx: RankContext,
    stage: int,
    program: Program | None = None,
    *,
    zero: dict[str, Any] | None = None,
    onefold_config: dict[str, Any] | None = None,
    dtypes: dict[str, Any] | None = None,
) -> Bits:
    """Weights and moments-driven updates of three clipped AdamW steps, and the norms.

    In fp32 but for what the config keys ``dtypes`` say.
    """
    torch.manual_seed(7)
    config = {"gradient_clipping": 0.05, "onefold": onefold_config or {}, **(dtypes or {})}
    make = lambda params: torch.optim.AdamW(params, lr=0.01)  # noqa: E731
    model = Tower(width=7, dtype=torch.float32)
    engine = start(ctx, model, stage, optimizer=make, zero=zero, config=config)
    states: Bits = []
    for step in range(3):

        def backward(k: int, step: int = step) -> None:
            tokens = torch.randint(
                11, (4, 5), generator=torch.Generator().manual_seed(k + 9 * step)
            )
            target = ctx.data(4, key=10 * step + k)
            engine.backward((engine((tokens + ctx.rank) % 11) - target).square().mean())

        run_program(engine, program or [("armed", [3])], backward)
        engine.step()
        states.append(engine.full_state_dict())
        states[-1]["norm"] = torch.tensor(engine.get_global_grad_norm())
    return states


def assert_same_bits(one: Bits, other: Bits, note: object) -> None:
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]), f"{note}: {name} differs in step {step}"


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_same_bits_for_every_bucket_size(ctx: RankContext, stage: int) -> None:
    reference = trained(ctx, stage)
    for numel in (1, 17, 60, 10**9):
        zero = {"reduce_bucket_size": numel}
        assert_same_bits(reference, trained(ctx, stage, zero=zero), numel)


@distributed(world_size=[2, 3])
def test_same_bits_for_every_unit_size(ctx: RankContext) -> None:
    """Stage 3: every layer a block, every module a block, or one block in all."""
    reference = trained(ctx, 3)
    for classes in (
        ["Linear"],
        ["LayerNorm"],
        ["Linear", "Embedding", "LayerNorm"],
        ["NoSuchClass"],
    ):
        found = trained(ctx, 3, onefold_config={"block_classes": classes})
        assert_same_bits(reference, found, classes)


@distributed(world_size=[2, 3, 4])
def test_same_bits_at_every_stage(ctx: RankContext) -> None:
    """A stage is only where things live."""
    reference = trained(ctx, 0)
    for stage in STAGES[1:]:
        assert_same_bits(reference, trained(ctx, stage), stage)


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_same_bits_armed_or_not(ctx: RankContext, stage: int) -> None:
    """Whether the reductions overlap the last backward, by declaration or by the flag."""
    reference = trained(ctx, stage, [("window", [3])])
    for program in ([("armed", [3])], [("window", [2, "mark", 1])], [("no_sync", [3])]):
        assert_same_bits(reference, trained(ctx, stage, program), program)


@distributed(world_size=[2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_same_bits_with_every_transport(ctx: RankContext, stage: int) -> None:
    """Of two ranks there is only one sum; of more, native takes an order of its own."""
    reference = trained(ctx, stage, onefold_config={"transport": "direct"})
    for transport in ("cross-memory", "native")[: 2 if ctx.world_size == 2 else 1]:
        found = trained(ctx, stage, onefold_config={"transport": transport})
        assert_same_bits(reference, found, transport)


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_same_bits_in_a_second_run(ctx: RankContext, stage: int) -> None:
    program: Program = [("no_sync", [1]), ("armed", [2]), 2]
    assert_same_bits(trained(ctx, stage, program), trained(ctx, stage, program), "again")


# A narrow wire.

NARROW: dict[str, dict[str, Any]] = {
    "bf16 model": {"bf16": {"enabled": True}},
    "fp32 model": {"communication_data_type": "bf16"},
}
CUTS: dict[int, list[dict[str, Any]]] = {
    1: [{"reduce_bucket_size": 17}],
    2: [{"reduce_bucket_size": numel} for numel in (1, 60, 10**9)],
    3: [{"block_classes": classes} for classes in (["Linear"], ["LayerNorm"], ["NoSuchClass"])],
}
"""Where shards are cut, by stage."""


def cut_and_trained(
    ctx: RankContext, stage: int, cut: dict[str, Any], transport: str, model: str
) -> Bits:
    settings: dict[str, Any] = {"transport": transport}
    settings, zero = ({**settings, **cut}, {}) if stage == 3 else (settings, cut)
    return trained(ctx, stage, zero=zero, onefold_config=settings, dtypes=NARROW[model])


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("transport", ["cross-memory", "direct", "native"])
@pytest.mark.parametrize("model", list(NARROW))
def test_same_bits_on_a_narrow_wire(ctx: RankContext, transport: str, model: str) -> None:
    """Every term is rounded, so neither stage nor cuts nor who adds can be seen."""
    reference = cut_and_trained(ctx, 2, CUTS[2][0], "direct", model)
    for stage, cuts in CUTS.items():
        for cut in cuts:
            found = cut_and_trained(ctx, stage, cut, transport, model)
            assert_same_bits(reference, found, (stage, cut))


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("model", list(NARROW))
def test_an_own_term_that_is_not_rounded_shows_the_cuts(ctx: RankContext, model: str) -> None:
    """The control."""
    start_sum = direct._RankOrderedSum.__init__

    def unrounded(
        self: Any, transport: Any, source: Tensor, out: Tensor, tag: int, wire: torch.dtype
    ) -> None:
        start_sum(self, transport, source, out, tag, wire)
        self._terms[transport.rank] = base.cut(source, transport.size)[transport.rank]

    setattr(direct._RankOrderedSum, "__init__", unrounded)  # noqa: B010
    ctx.cleanup(setattr, direct._RankOrderedSum, "__init__", start_sum)
    one, *others = (cut_and_trained(ctx, 2, cut, "direct", model) for cut in CUTS[2])
    for other in others:
        with pytest.raises(AssertionError, match="differs in step 0"):
            assert_same_bits(one, other, "cut")


# The order of the sum.

TERMS = {2: (1e8, 1.0), 3: (1e8, 1.0, -1e8), 4: (1.0, 1e8, -1e8, 1.0)}
"""fp32 numbers whose sum depends on the order."""


@distributed(world_size=[3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_are_summed_in_rank_order(ctx: RankContext, stage: int) -> None:
    terms = TERMS[ctx.world_size]
    engine = start(ctx, House(70), stage)
    for program in ([("window", [1])], [("armed", [1])], [1], [("no_sync", [1])]):
        run_program(engine, program, lambda _k: engine.backward(engine(terms[ctx.rank])))
        engine.reduce_gradients()
        found = engine.full_grad(engine.module.w)  # type: ignore[arg-type]
        total = torch.zeros(())
        for term in terms:
            total = total + torch.tensor(term)
        assert found is not None
        assert torch.equal(found, (total / ctx.world_size).expand(70)), program
        engine.zero_grad()


class Wire(DirectTransport):
    """One of 64 ranks; what its peers send is already there."""

    def __init__(self, rank: int, sources: list[Tensor]) -> None:
        self.arena = Arena(torch.device("cpu"))
        self.rank, self.size = rank, len(sources)
        self._sources = sources

    def receive(self, buffer: Tensor, peer: int, tag: int) -> list[Any]:
        begin = self.rank * buffer.numel()
        buffer.copy_(self._sources[peer][begin : begin + buffer.numel()])
        return []

    def send(self, buffer: Tensor, peer: int, tag: int) -> list[Any]:
        return []


def in_order(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total = total + term
    return total


@pytest.mark.parametrize("rank", [0, 1, 2, 31, 63])
@pytest.mark.parametrize("in_place", [False, True])
def test_64_ranks_are_summed_in_rank_order(rank: int, in_place: bool) -> None:
    """One add after another: ``sum(0)`` and other orders give other bits."""
    numel = 48
    generator = torch.Generator().manual_seed(1)
    sources = [
        torch.randn(64 * numel, generator=generator) * 10.0 ** (peer % 7) for peer in range(64)
    ]
    own = slice(rank * numel, (rank + 1) * numel)
    slices = [source[own].clone() for source in sources]
    wanted = in_order(slices)
    assert not torch.equal(wanted, torch.stack(slices).sum(0)), "the order must matter here"
    assert not torch.equal(wanted, in_order(slices[::-1]))
    assert not torch.equal(wanted, in_order(slices[rank:] + slices[:rank])) or rank == 0
    transport = Wire(rank, sources)
    out = sources[rank][own] if in_place else torch.empty(numel)
    transport.reduce_scatter(sources[rank], out, tag=0, wire_dtype=torch.float32).wait()
    assert torch.equal(out, wanted)
    assert transport.arena.leased_bytes == 0


# The divisor.


@distributed(world_size=[3])
@pytest.mark.parametrize("stage", STAGES)
def test_the_sum_is_divided_once_by_a_division(ctx: RankContext, stage: int) -> None:
    """Neither by each rank before the sum, nor by W and then by k, nor by a reciprocal."""
    engine = start(ctx, House(1), stage, config={"gradient_accumulation_steps": 3})
    x = {0: 0.3, 1: 5.7, 2: 11.9}[ctx.rank]
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()
    engine.backward(engine(x))
    engine.reduce_gradients()
    nine, three = torch.tensor(9.0), torch.tensor(3.0)
    locals_ = [torch.tensor(v) for v in (0.3, 5.7, 11.9)]
    windowed = in_order([term + term + term for term in locals_])
    bare = in_order([in_order(locals_)] * 3)
    total = windowed if stage < 2 else bare
    found = engine.full_grad(engine.module.w)  # type: ignore[arg-type]
    assert found is not None
    assert torch.equal(found, (total / nine).expand(1))
    others = [total * (1.0 / nine), total / three / three]
    assert any(not torch.equal(other, total / nine) for other in others), "numbers must tell"


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_norms_are_summed_in_fp64_and_rounded(ctx: RankContext, stage: int) -> None:
    """In fp32 the small squares would be lost beside the large one."""
    module = nn.ModuleList([House(1), House(5000)])
    engine = start(ctx, module, stage, zero={"reduce_bucket_size": 1})
    with engine.coalesce_grad_reduction():
        engine.backward(module[0](4096.0) + module[1](0.7))
    engine.step()
    small = torch.tensor(0.7)
    mean = in_order([small] * ctx.world_size) / ctx.world_size
    exact = (4096.0**2 + 5000 * float(mean) ** 2) ** 0.5
    assert engine.get_global_grad_norm() == float(torch.tensor(exact, dtype=torch.float32))
    assert float(torch.tensor(4096.0)) != engine.get_global_grad_norm()


@distributed(world_size=[2])
def test_fp64_models_are_summed_in_fp64(ctx: RankContext) -> None:
    engine = start(ctx, House(3, torch.float64), 2)
    engine.backward(engine(1.0 + 2.0**-40 * (1 + ctx.rank)))
    engine.reduce_gradients()
    found = engine.full_grad(engine.module.w)  # type: ignore[arg-type]
    assert found is not None
    assert torch.equal(found, torch.full((3,), 1.0 + 2.0**-41 * 3, dtype=torch.float64))
