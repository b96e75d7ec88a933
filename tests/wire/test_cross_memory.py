"""Cross-memory: the same bits as messages give, no order of waiting that blocks, no stale reads."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onefold.wire import cross_memory
from onefold.wire.buffer import Arena
from onefold.wire.transports import choice, choose_transport
from onefold.wire.transports.cross import CHUNK_BYTES
from onefold.wire.transports.notes import Note
from onefold.wire.transports.progress import Progress
from tests.harness import RankContext, distributed

LONG = 3 * CHUNK_BYTES // 8 + 16  # in fp32 a chunk and a half, in fp64 three


def both(ctx: RankContext) -> tuple[Any, Any]:
    group, arena = ctx.new_group(), Arena(torch.device("cpu"))
    transport = choose_transport(group, "cross-memory", arena, 60.0)
    ctx.cleanup(transport.close)
    return transport, choose_transport(group, "direct", arena, 60.0)


@distributed(world_size=[2, 3, 4])
@pytest.mark.parametrize("numel", [0, 16, LONG])
@pytest.mark.parametrize(
    ("dtype", "out", "wire"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float64, torch.float64, torch.float32),
    ],
    ids=str,
)
def test_the_same_bits_as_messages(
    ctx: RankContext, numel: int, dtype: torch.dtype, out: torch.dtype, wire: torch.dtype
) -> None:
    """Random numbers, so that another order of the sum would show; more than one chunk."""
    results: list[list[Tensor]] = []
    for transport in both(ctx):
        source = ctx.data(numel * ctx.world_size, dtype=torch.float64).to(dtype)
        summed = torch.empty(numel, dtype=out)
        transport.reduce_scatter(source, summed, 1, wire).wait()
        gathered = torch.empty(numel * ctx.world_size, dtype=out)
        transport.all_gather(summed, gathered, 2).wait()
        reduced = ctx.data(numel + 3, key=1, dtype=torch.float64).to(out)
        transport.all_reduce(reduced, 3, wire).wait()
        results.append([summed, gathered, reduced])
    for read, sent in zip(*results, strict=True):
        assert torch.equal(read, sent)


@distributed(world_size=[2, 3, 4])
def test_the_sum_may_lie_in_its_own_source(ctx: RankContext) -> None:
    transport, _ = both(ctx)
    source = ctx.data(LONG * ctx.world_size)
    own = source[ctx.rank * LONG : (ctx.rank + 1) * LONG]
    total = ctx.data(LONG * ctx.world_size, rank=0)
    for rank in range(1, ctx.world_size):
        total = total + ctx.data(LONG * ctx.world_size, rank=rank)
    transport.reduce_scatter(source, own, 1, torch.float32).wait()
    assert torch.equal(own, total[ctx.rank * LONG : (ctx.rank + 1) * LONG])


@distributed(world_size=[2, 3])
def test_ranks_may_wait_in_different_orders(ctx: RankContext) -> None:
    """Gathers that all ranks start alike, and need in an order of their own."""
    transport, _ = both(ctx)
    shards = [torch.full((16,), float(10 * unit + ctx.rank)) for unit in range(6)]
    outs = [torch.empty(16 * ctx.world_size) for _ in shards]
    works = [
        transport.all_gather(shard, out, unit)
        for unit, (shard, out) in enumerate(zip(shards, outs, strict=True))
    ]
    for unit in range(6) if ctx.rank == 0 else reversed(range(6)):
        works[unit].wait()
        expected = [10.0 * unit + rank for rank in range(ctx.world_size)]
        assert outs[unit].view(ctx.world_size, 16).unique(dim=1).flatten().tolist() == expected


@distributed(world_size=2)
def test_a_buffer_is_free_only_when_every_reader_is_done(ctx: RankContext) -> None:
    """A fast rank overwrites what a slow one has yet to read, as soon as its own wait returns."""
    transport, _ = both(ctx)
    if ctx.rank == 1:
        original = transport._read_slices

        def slowly(addresses: list[int], slices: list[Tensor]) -> None:
            time.sleep(0.2)
            original(addresses, slices)

        transport._read_slices = slowly
    shard, out = torch.full((16,), ctx.rank + 1.0), torch.empty(32)
    transport.all_gather(shard, out, 1).wait()
    shard.fill_(-1.0)
    assert out.tolist() == [1.0] * 16 + [2.0] * 16


def pair(timeout_s: float = 60.0) -> tuple[Progress, Progress]:
    """Two ranks in one process."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Progress({1: left}, timeout_s), Progress({0: right}, timeout_s)


def waits(*phases: int) -> Generator[int, list[int], None]:
    for phase in phases:
        _ = yield phase


def test_notes_are_told_apart_by_tag_and_kept_until_needed() -> None:
    """The peer tells of collectives in another order, and before they are started here."""
    first, second = pair()
    found: list[list[int]] = []

    def steps() -> Generator[int, list[int], None]:
        found.append((yield 1))

    for tag in (3, 2, 1):
        second.tell(0, Note(tag, 1, 10 * tag))
    for tag in (1, 2, 3):
        first.start(tag, steps()).result(10)
    assert found == [[0, 10], [0, 20], [0, 30]]
    for tag in (5, 4):  # two of each tag, waited for before they are told of
        started = [first.start(tag, steps()) for _ in range(2)]
        for address in (7, 8):
            second.tell(0, Note(tag, 1, address))
        for future in started:
            future.result(10)
    assert found[3:] == [[0, 7], [0, 8]] * 2
    first.close()
    second.close()


def test_a_failing_step_fails_its_collective_alone() -> None:
    first, second = pair()

    def fail() -> Generator[int, list[int], None]:
        yield 1
        raise RuntimeError("cannot read")

    failing, other = first.start(1, fail()), first.start(2, waits(1))
    second.tell(0, Note(1, 1, 0))
    with pytest.raises(RuntimeError, match="cannot read"):
        failing.result(10)
    assert not other.done()
    second.tell(0, Note(2, 1, 0))
    other.result(10)
    first.close()
    second.close()


def test_a_lost_peer_fails_what_still_needs_it() -> None:
    """What the peer had told before it left counts; what it had not is an error at once."""
    first, second = pair()
    served, waiting = first.start(1, waits(1, 2)), first.start(2, waits(1, 2))
    for tag, phase in ((1, 1), (1, 2), (2, 1)):
        second.tell(0, Note(tag, phase, 0))
    second.close()
    served.result(10)
    for future in (waiting, first.start(3, waits(1))):
        with pytest.raises(RuntimeError, match="rank 1 of it has ended or left"):
            future.result(10)
    first.close()


def test_no_answer_is_an_error_in_time() -> None:
    first, second = pair(timeout_s=0.05)
    with pytest.raises(RuntimeError, match="no answer in time"):
        first.start(1, waits(1)).result(10)
    first.close()
    second.close()


def test_more_notes_than_there_is_room_for() -> None:
    """Both threads tell more than their sockets hold, inside a step: neither may block."""
    both_ranks, number = pair(), 3000

    def steps(mine: Progress, peer: int) -> Generator[int, list[int], None]:
        for tag in range(number):
            mine.tell_on_thread(peer, Note(tag, 1, tag))
        yield 2

    told = [mine.start(number, steps(mine, 1 - r)) for r, mine in enumerate(both_ranks)]
    for rank, mine in enumerate(both_ranks):
        for tag in range(number):
            mine.start(tag, waits(1)).result(20)
        both_ranks[1 - rank].tell(rank, Note(number, 2, 0))
        told[rank].result(20)
    for mine in both_ranks:
        mine.close()


@distributed(world_size=2)
def test_ranks_that_may_not_be_read_send_messages(ctx: RankContext) -> None:
    """One rank cannot read another: every rank falls back, and the log says why."""
    group, arena = ctx.new_group(), Arena(torch.device("cpu"))
    able = cross_memory.can_read
    setattr(choice, "can_read", lambda card, own: ctx.rank == 0 and able(card, own))  # noqa: B010
    ctx.cleanup(setattr, choice, "can_read", able)
    records: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Kept()
    choice.log.addHandler(handler)
    ctx.cleanup(choice.log.removeHandler, handler)
    choice.log.setLevel(logging.INFO)
    ctx.cleanup(choice.log.setLevel, logging.NOTSET)
    assert choose_transport(group, "auto", arena, 60.0).name == "direct"
    assert len(records) == (1 if ctx.rank == 0 else 0)
    assert all("direct instead of cross-memory" in record.getMessage() for record in records)
    with pytest.raises(ValueError, match="not on one host, or may not read"):
        choose_transport(group, "cross-memory", arena, 60.0)


def test_another_host_is_not_tried() -> None:
    own = cross_memory.own_card()
    assert cross_memory.can_read(own, own)
    assert not cross_memory.can_read(own._replace(host=("elsewhere", *own.host[1:])), own)
    assert not cross_memory.can_read(own._replace(secret=bytes(16)), own)
    assert not cross_memory.can_read(own._replace(address=8), own)


@pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is Linux's")
def test_a_killed_process_is_an_error_and_leaves_nothing() -> None:
    before = set(Path("/dev/shm").iterdir())
    program = (
        "import sys, time; from onefold.wire.cross_memory import own_card; card = own_card(); "
        "print(card.pid, card.address, card.secret.hex(), flush=True); time.sleep(60)"
    )
    peer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert peer.stdout is not None
    pid, address, secret = peer.stdout.readline().split()
    found = torch.empty(16, dtype=torch.uint8)
    cross_memory.read(int(pid), int(address), found)
    assert found.numpy().tobytes().hex() == secret
    with pytest.raises(RuntimeError, match="could not be read"):
        cross_memory.read(int(pid), 8, found)  # no such memory
    os.kill(peer.pid, signal.SIGKILL)
    peer.wait()
    with pytest.raises(RuntimeError, match="could not be read"):
        cross_memory.read(int(pid), int(address), found)
    assert set(Path("/dev/shm").iterdir()) <= before


def test_the_thread_ends_with_its_owner() -> None:
    others = set(threading.enumerate())
    for is_closed in (True, False):
        first, second = pair()
        mine = set(threading.enumerate()) - others
        assert len(mine) == 2
        pending = first.start(1, waits(1))
        if is_closed:
            first.close()
            with pytest.raises(RuntimeError, match="its group was destroyed"):
                pending.result(10)
            with pytest.raises(RuntimeError, match="a group that was destroyed"):
                first.start(2, waits(1))
        del first, second
        for thread in mine:
            thread.join(10)
        assert not any(thread.is_alive() for thread in mine)
