"""The harness itself: every way to fail is reported, and never reaches the next test."""

import importlib.util
import os
import signal
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import CommLog, RankContext, WorkerError, WorkerPool, distributed, pool_for


def rank_and_size(ctx: RankContext) -> tuple[int, int]:
    return ctx.rank, ctx.world_size


def process_id(ctx: RankContext) -> int:
    return os.getpid()


def sum_over_ranks(ctx: RankContext, value: int) -> int:
    tensor = torch.tensor(value * (ctx.rank + 1))
    dist.all_reduce(tensor)
    return int(tensor)


def fail_on(ctx: RankContext, how: str, rank: int = 1) -> None:
    """Fail on one rank while its peers wait for it in a collective."""
    if ctx.rank == rank:
        match how:
            case "raise":
                raise ValueError("no such unit")
            case "exit":
                os._exit(3)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                time.sleep(100)
            case "unpicklable":
                return lambda: None  # type: ignore[return-value]
            case "skip":
                pytest.skip("not here")
    if how not in ("unpicklable", "skip"):
        dist.barrier()
    return None


def leak(ctx: RankContext, what: str) -> None:
    match what:
        case "thread":
            threading.Thread(target=time.sleep, args=(100,), daemon=True, name="left").start()
        case "environment":
            os.environ["ONEFOLD_LEFT"] = "1"
        case "group":
            dist.new_group()


# Results.


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    expected = [(rank, world_size) for rank in range(world_size)]
    assert pool_for(world_size).run(rank_and_size) == expected


@settings(max_examples=20)
@given(st.integers(-1000, 1000))
def test_hypothesis_can_call_the_pool(value: int) -> None:
    assert pool_for(2).run(sum_over_ranks, value=value) == [3 * value] * 2


def test_workers_persist_between_calls() -> None:
    pool = pool_for(2)
    assert pool.run(process_id) == pool.run(process_id)


def test_a_call_takes_milliseconds() -> None:
    pool = pool_for(2)
    pool.run(sum_over_ranks, value=1)
    start = time.perf_counter()
    for _ in range(20):
        pool.run(sum_over_ranks, value=1)
    # 3 ms when the machine is idle: this bound only catches a lost pool or a full collection.
    assert (time.perf_counter() - start) / 20 < 0.05


# The decorator.


@distributed(world_size=[1, 2, 4])
@pytest.mark.parametrize("stage", [0, 3])
def test_parametrization(ctx: RankContext, stage: int) -> None:
    assert stage in (0, 3)
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == ctx.world_size


@pytest.mark.parametrize("pair", [("a", 1)])
@distributed(world_size=2)
def test_parametrization_outside_and_fixtures(
    ctx: RankContext, pair: tuple[str, int], tmp_path: Path
) -> None:
    assert pair == ("a", 1)
    (tmp_path / str(ctx.rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2


def _expect_different(results: list[torch.Tensor]) -> None:
    assert not torch.equal(results[0], results[1])


@distributed(world_size=2, check=_expect_different)
def test_check_sees_return_values(ctx: RankContext) -> torch.Tensor:
    peer = ctx.data(3, rank=1 - ctx.rank)
    torch.testing.assert_close(ctx.data(3), ctx.data(3))
    assert not torch.equal(peer, ctx.data(3))
    return torch.rand(3)  # seeded by rank


@distributed(world_size=2)
def decorated_skip(ctx: RankContext) -> None:
    pytest.skip("on every rank")


def test_all_ranks_may_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="on every rank"):
        decorated_skip(world_size=2)


def test_a_failure_in_a_decorated_body_fails_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"--- rank 1 of 2\n(?s:.*)no such unit"):
        decorated_failure(world_size=2)


@distributed(world_size=2)
def decorated_failure(ctx: RankContext) -> None:
    fail_on(ctx, "raise")


def test_a_body_without_ctx_is_refused() -> None:
    with pytest.raises(TypeError, match="must take ctx first"):

        @distributed()
        def body(stage: int) -> None: ...


# Failures, each followed by a call that must work.


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "ValueError: no such unit"),
        ("exit", "the process died (exit code 3)"),
        ("crash", "the process died (SIGSEGV)\nFatal Python error"),
        ("unpicklable", "Can't "),
        ("skip", "skipped, unlike other ranks: not here"),
    ],
)
def test_failure_on_one_rank(how: str, text: str) -> None:
    pool = pool_for(2)
    start = time.perf_counter()
    with pytest.raises(WorkerError) as caught:
        pool.run(fail_on, how=how)
    assert text in caught.value.texts[1]
    assert time.perf_counter() - start < 10  # not the deadline
    assert pool.run(sum_over_ranks, value=1) == [3, 3]


def test_hang_is_ended_at_the_deadline_and_located() -> None:
    pool = pool_for(2)
    with pytest.raises(WorkerError) as caught:
        pool.run_within(0.3, fail_on, how="hang")
    assert set(caught.value.texts) == {0, 1}
    assert "no answer within 0.3 s" in caught.value.texts[1]
    assert "in fail_on" in caught.value.texts[1]
    assert "in barrier" in caught.value.texts[0]
    assert pool.run(sum_over_ranks, value=1) == [3, 3]


def test_equal_failures_are_told_once_and_short_ones_first() -> None:
    error = WorkerError("f", {0: "long text", 1: "short", 2: "long text"}, 4)
    assert str(error) == (
        "f failed on ranks 0, 1, 2\n--- rank 1 of 4\nshort\n--- ranks 0, 2 of 4\nlong text"
    )


def test_a_killed_worker_is_replaced() -> None:
    pool = pool_for(2)
    os.kill(pool.run(process_id)[1], signal.SIGKILL)
    time.sleep(0.05)
    assert pool.run(sum_over_ranks, value=1) == [3, 3]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("thread", "threads left"),
        ("environment", "environment variables ONEFOLD_LEFT"),
        ("group", "process groups "),
    ],
)
def test_a_leak_fails_the_test_that_leaked(what: str, text: str) -> None:
    pool = pool_for(2)
    with pytest.raises(WorkerError, match=text):
        pool.run(leak, what=what)
    assert pool.run(sum_over_ranks, value=1) == [3, 3]


def run_one_collective_too_many(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(()), async_op=True)


def test_a_collective_that_a_peer_lacks_does_not_reach_the_next_call() -> None:
    pool = pool_for(2)
    pool.run(run_one_collective_too_many)
    assert pool.run(sum_over_ranks, value=1) == [3, 3]


# Cleaning up.


def clean_up(ctx: RankContext, folder: Path, fails: bool) -> None:
    log = folder / f"{ctx.rank}"
    ctx.cleanup(lambda: log.write_text(log.read_text() + " first"))
    ctx.cleanup(log.write_text, "last")
    if fails:
        raise ValueError("in the body")


@pytest.mark.parametrize("fails", [False, True])
def test_cleanup_runs_backwards_also_after_a_failure(tmp_path: Path, fails: bool) -> None:
    try:
        pool_for(2).run(clean_up, folder=tmp_path, fails=fails)
    except WorkerError:
        assert fails
    assert [(tmp_path / name).read_text() for name in "01"] == ["last first"] * 2


def raise_in_cleanup(ctx: RankContext) -> None:
    ctx.cleanup(time.sleep, "not a number")


def test_a_failing_cleanup_fails_the_test() -> None:
    with pytest.raises(WorkerError, match="TypeError"):
        pool_for(2).run(raise_in_cleanup)


@distributed(world_size=2)
def test_new_group_is_destroyed_by_the_context(ctx: RankContext) -> None:
    dist.barrier(ctx.new_group())
    ctx.new_group([0])


def change_globals(ctx: RankContext) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    warnings.simplefilter("error")


def read_globals(ctx: RankContext) -> tuple[torch.dtype, bool, int, list[float]]:
    warnings.warn("an error if the filter survived", stacklevel=1)
    random = torch.rand(2).tolist()
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), random


def test_globals_are_restored() -> None:
    pool = pool_for(2)
    before = pool.run(read_globals)
    pool.run(change_globals)
    assert pool.run(read_globals) == before
    assert before[0][:3] == (torch.float32, True, 1)


def warn_in_package(ctx: RankContext) -> None:
    warnings.warn_explicit("deprecated", FutureWarning, "f.py", 1, module="onefold.wire")


def test_warnings_of_the_package_are_errors() -> None:
    with pytest.raises(WorkerError, match="FutureWarning: deprecated"):
        pool_for(1).run(warn_in_package)


# The witness.


@distributed(world_size=2)
def test_comm_log_counts_collectives_inside_backward_too(ctx: RankContext) -> None:
    weight = torch.ones(4, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    with CommLog() as log:
        (weight * ctx.data(4)).sum().backward()
        dist.all_reduce(torch.ones(3))
    assert [record.largest_bytes for record in log.records] == [16, 12]
    assert log.counts == {"allreduce_": 2}


# What can be called.


def test_functions_without_a_name_are_refused() -> None:
    with pytest.raises(TypeError, match="top level"):
        pool_for(1).run(lambda ctx: None)


def test_arguments_must_pickle() -> None:
    with pytest.raises(TypeError, match="must pickle"):
        pool_for(1).run(sum_over_ranks, value=lambda: 1)


def test_world_size_is_one_of_four() -> None:
    with pytest.raises(ValueError, match="expected one of"):
        pool_for(5)


def test_modules_with_equal_basenames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are what counts: neither folder is on any search path."""
    pool = pool_for(2)
    for folder in ("a", "b"):
        path = tmp_path / folder / "test_same.py"
        path.parent.mkdir()
        path.write_text(
            "class Box:\n    def __init__(self, value): self.value = value\n"
            f"def body(ctx, box): return Box({folder!r} + box.value)\n"
        )
        name = f"{folder}.test_same"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, folder, types.ModuleType(folder))
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        results = pool.run(module.body, box=module.Box("!"))
        assert [result.value for result in results] == [f"{folder}!"] * 2


def test_a_pool_of_its_own_can_be_killed() -> None:
    pool = WorkerPool(1, timeout_s=30)
    (pid,) = pool.run(process_id)
    pool.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
