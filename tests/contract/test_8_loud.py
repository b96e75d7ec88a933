"""Contract 8, loud: bad input is refused before the first collective, on all ranks together."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.errors import RankMismatchError, StateError
from tests.contract.helpers import STAGES, Books, House, feed, params_of, start, street
from tests.harness import RankContext, distributed
from tests.rig import counts

# Errors of one rank, in initialize().


class Attempt:
    """Good arguments of ``initialize``, of which one rank changes some."""

    def __init__(self, stage: int) -> None:
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
        self.optimizer: Any = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5)
        self.more: dict[str, Any] = {}

    def run(self, ctx: RankContext) -> onefold.Engine:
        engine = onefold.initialize(
            model=self.model, optimizer=self.optimizer, config=self.config, **self.more
        ).engine
        ctx.cleanup(engine.destroy)
        return engine


def unknown_key(attempt: Attempt) -> None:
    attempt.config["zero_optimisation"] = {}


def bad_value(attempt: Attempt) -> None:
    attempt.config["gradient_clipping"] = -1.0


def bad_batch(attempt: Attempt) -> None:
    attempt.config |= {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}


def unreadable_file(attempt: Attempt) -> None:
    attempt.config = "no/such/file.json"  # type: ignore[assignment]


def sparse(attempt: Attempt) -> None:
    attempt.model = nn.Sequential(nn.Embedding(4, 3, sparse=True))


def half(attempt: Attempt) -> None:
    attempt.model = attempt.model.half()


def no_optimizer(attempt: Attempt) -> None:
    attempt.optimizer = None


def foreign_optimizer(attempt: Attempt) -> None:
    attempt.optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)


def used_optimizer(attempt: Attempt) -> None:
    attempt.optimizer = attempt.optimizer(attempt.model.parameters())
    attempt.model(torch.ones(3)).sum().backward()
    attempt.optimizer.step()


def factory_raises(attempt: Attempt) -> None:
    def raise_(_params: object) -> None:
        raise ValueError("no such optimizer today")

    attempt.optimizer = raise_


def foreign_scheduler(attempt: Attempt) -> None:
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    attempt.more["lr_scheduler"] = torch.optim.lr_scheduler.LinearLR(other)


ERRORS: dict[str, Callable[[Attempt], None]] = {
    "zero_optimisation": unknown_key,
    "gradient_clipping": bad_value,
    "train_batch_size": bad_batch,
    "file": unreadable_file,
    "sparse": sparse,
    "float16": half,
    "no optimizer": no_optimizer,
    "no parameter of the model": foreign_optimizer,
    "already stepped": used_optimizer,
    "no such optimizer today": factory_raises,
    "scheduler": foreign_scheduler,
}


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("said", list(ERRORS))
def test_an_error_of_one_rank_is_raised_on_all(ctx: RankContext, said: str) -> None:
    """The rank itself gets its own error, the others one that quotes it."""
    for stage, culprit in ((0, 0), (3, ctx.world_size - 1)):
        attempt = Attempt(stage)
        if ctx.rank == culprit:
            ERRORS[said](attempt)
            with pytest.raises(ValueError, match=said):
                attempt.run(ctx)
        else:
            with pytest.raises(RankMismatchError, match=f"rank {culprit}.*(?s:.*){said}"):
                attempt.run(ctx)
    Attempt(1).run(ctx)  # nothing is left behind


def other_stage(attempt: Attempt) -> None:
    attempt.config["zero_optimization"]["stage"] = 1


def other_clipping(attempt: Attempt) -> None:
    attempt.config["gradient_clipping"] = 0.5


def other_accumulation(attempt: Attempt) -> None:
    attempt.config["gradient_accumulation_steps"] = 4


def other_shape(attempt: Attempt) -> None:
    attempt.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))


def other_depth(attempt: Attempt) -> None:
    attempt.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def other_names(attempt: Attempt) -> None:
    model = nn.Sequential()
    model.add_module("0", nn.Linear(3, 4))
    model.add_module("last", nn.Linear(4, 2))
    attempt.model = model


def other_dtype(attempt: Attempt) -> None:
    attempt.model = attempt.model.double()


def other_trainable(attempt: Attempt) -> None:
    attempt.model[0].bias.requires_grad_(False)  # type: ignore[index]


def other_class(attempt: Attempt) -> None:
    attempt.optimizer = lambda params: torch.optim.AdamW(params, lr=0.1)


def other_rate(attempt: Attempt) -> None:
    attempt.optimizer = lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.5)


def other_groups(attempt: Attempt) -> None:
    attempt.optimizer = lambda params: torch.optim.SGD(
        [{"params": [param]} for param in params], lr=0.1, momentum=0.5
    )


def other_members(attempt: Attempt) -> None:
    first, *rest = attempt.model.parameters()
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": [first], "lr": 0.3}]
    attempt.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)


DIFFERENCES: dict[str, Callable[[Attempt], None]] = {
    function.__name__: function
    for function in (
        other_stage,
        other_clipping,
        other_accumulation,
        other_shape,
        other_depth,
        other_names,
        other_dtype,
        other_trainable,
        other_class,
        other_rate,
        other_groups,
        other_members,
    )
}


@distributed(world_size=3)
@pytest.mark.parametrize("difference", list(DIFFERENCES))
def test_what_differs_between_ranks_is_raised_on_all(ctx: RankContext, difference: str) -> None:
    """Each would step the ranks apart, or hang them, if it were let through."""
    for stage, culprit in ((0, ctx.world_size - 1), (3, 1)):
        attempt = Attempt(stage)
        if ctx.rank == culprit:
            DIFFERENCES[difference](attempt)
        with pytest.raises(RankMismatchError, match=f"rank {culprit} was given another"):
            attempt.run(ctx)
    Attempt(1).run(ctx)


# Errors later on.


def close_a_window(engine: onefold.Engine) -> None:
    with engine.coalesce_grad_reduction():
        pass


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_at_different_places_are_told(ctx: RankContext, stage: int) -> None:
    """What stands where is named. (At stage 3 a window's entry already gathers.)"""
    engine = street(ctx, stage)
    with engine.no_sync():
        engine.backward(engine(1.0))
    calls = {"step()": engine.step, "reduce_gradients()": engine.reduce_gradients}
    if stage < 3:
        calls["coalesce_grad_reduction()"] = lambda: close_a_window(engine)
    names = list(calls)
    for one, other in zip(names, [*names[1:], names[0]], strict=True):
        with pytest.raises(RankMismatchError) as caught:
            calls[one if ctx.rank == 0 else other]()
        assert one in str(caught.value)
        assert other in str(caught.value)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_reduced_gradients_dropped_on_one_rank_only(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    engine.backward(engine(1.0))
    engine.reduce_gradients()
    if ctx.rank == 1:
        engine.zero_grad()
    with pytest.raises(RankMismatchError, match="on every rank"):
        engine.step()
    engine.zero_grad()
    feed(ctx, engine, books, 0)
    engine.step()
    books.close()
    books.check(engine)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_bad_arguments_are_refused_before_any_collective(ctx: RankContext, stage: int) -> None:
    """On one rank alone, which then goes on as if nothing had been."""
    engine = street(ctx, stage)
    books = Books(ctx.world_size)
    mark, exchanges = engine.ledger.mark(), engine._world.control.count
    if ctx.rank == 0:
        with pytest.raises(ValueError, match=r"backward\(loss\).*expected.*got"):
            engine.backward(torch.ones(2, requires_grad=True))
        with pytest.raises(ValueError, match=r"backward\(loss\).*expected.*got"):
            engine.backward(torch.ones(()))
        with pytest.raises(ValueError, match=r"backwards=.*expected.*got 0"):
            engine.coalesce_grad_reduction(backwards=0)
        with pytest.raises(ValueError, match=r"full_grad.*expected"):
            engine.full_grad(nn.Parameter(torch.ones(2)))
        with pytest.raises(StateError, match="save_checkpoint"):
            engine.optimizer.state_dict()
    assert counts(engine, mark) == {}
    assert engine._world.control.count == exchanges
    feed(ctx, engine, books, 0)
    engine.step()
    books.close()
    books.check(engine)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_scope_is_used_once(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    for scope in (engine.no_sync(), engine.coalesce_grad_reduction()):
        with scope, pytest.raises(StateError, match="again"):
            scope.__enter__()


@distributed(world_size=[2])
def test_mixed_scale_wrt_gas_is_refused(ctx: RankContext) -> None:
    engine = street(ctx, 1, config={"gradient_accumulation_steps": 2})
    engine.backward(engine(1.0))
    with pytest.raises(StateError, match="scale_wrt_gas"):
        engine.backward(engine(1.0), scale_wrt_gas=False)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_replaced_storage_is_refused_by_name_on_all_ranks(ctx: RankContext, stage: int) -> None:
    engine = street(ctx, stage)
    engine.backward(engine(1.0))
    if ctx.rank == 0:
        param = params_of(engine)[1]
        param.data = torch.ones(param.shape)
    with pytest.raises(StateError, match=r"houses\.1\.w"):
        engine.step()


@distributed(world_size=[1, 2])
def test_freed_parameters_are_never_read_in_silence(ctx: RankContext) -> None:
    """Stage 3: reading gives NaN, state dicts name the right call, a gradient is refused."""
    engine = street(ctx, 3)
    param = params_of(engine)[0]
    assert bool(param.isnan().all())
    with pytest.raises(StateError, match=r"full_state_dict\(\)"):
        engine.module.state_dict()
    with pytest.raises(StateError, match=r"full_parameters\(\)"):
        engine.module.load_state_dict({})
    with pytest.raises(StateError, match=r"houses\.0\.w.*sharded"):
        (param * 2.0).sum().backward()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda param: param.add_(1.0),
    "copy_": lambda param: param.copy_(torch.ones(param.shape)),
    "fill_": lambda param: param.fill_(1.0),
    "zero_": lambda param: param.zero_(),
    "normal_": lambda param: param.normal_(),
}


@distributed(world_size=2)
@pytest.mark.parametrize("write", list(WRITES))
@pytest.mark.parametrize("index", [0, 1])
def test_freed_parameters_are_never_written_in_silence(
    ctx: RankContext, index: int, write: str
) -> None:
    """At once where torch can tell, else at the next forward or step. House 1 has one element."""
    engine = street(ctx, 3)
    with torch.no_grad(), pytest.raises((RuntimeError, StateError)):  # noqa: PT012 (one of three)
        WRITES[write](params_of(engine)[index])
        engine(1.0)
        engine.step()


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_sparse_gradients_are_refused_by_name(ctx: RankContext, stage: int) -> None:
    """Also where no module says so beforehand, and on all ranks."""
    engine = start(ctx, House(4), stage)
    with engine.no_sync():
        engine.backward(engine(1.0))
        if ctx.rank == 0:
            param = engine.module.w
            param.grad = None
            indices = torch.tensor([[0]])
            param.grad = torch.sparse_coo_tensor(indices, torch.ones(1), (4,), dtype=torch.float32)
    with pytest.raises(StateError, match=r"rank 0.*parameter w.*sparse"):
        engine.step()


def test_what_is_treated_as_frozen_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A parameter that requires gradients and stands in no param group."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with caplog.at_level(logging.INFO, logger="onefold"):
        onefold.initialize(model=model, optimizer=optimizer).engine.destroy()
    said = [r.getMessage() for r in caplog.records if "frozen" in r.getMessage()]
    assert sum("0.weight, 0.bias" in text for text in said) == 1
