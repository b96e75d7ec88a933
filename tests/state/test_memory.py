"""Memory: what a rank holds beyond its shard while it loads and saves, and what it reads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from onefold.state.files import Reader
from tests.harness import RankContext, pool_for
from tests.rig import start

MB = 1 << 20
WIDTH = 2048
FEW = 16 * MB


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    text = Path("/proc/self/smaps_rollup").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("Anonymous:")]
    return int(line.split()[1]) * 1024


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most, above what is held at the beginning, as the only element at the end."""
    begin, seen, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen[0] = max(seen[0], anonymous() - begin)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        seen[0] = max(seen[0], anonymous() - begin)
        done.set()
        thread.join()


def held(ctx: RankContext, folder: str, stage: int, saves: bool) -> tuple[int, int, int, int]:
    """Peaks of a save, an asynchronous one, or of a load; and bytes read."""
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
    engine = start(ctx, net, stage, optimizer=torch.optim.AdamW(net.parameters()))
    if saves:
        engine.backward(engine(torch.ones(1, WIDTH)).sum())
        engine.step()
        with peak() as synchronous:
            engine.save_checkpoint(folder)
        with peak() as asynchronous:
            engine.save_checkpoint(Path(folder) / "async", async_save=True)
            engine._saver.wait()
        return synchronous[0], asynchronous[0], 0, 0
    read = Reader.read
    total = 0

    def counted(self: Reader, file: str, name: str, begin: int, out: torch.Tensor) -> None:
        nonlocal total
        total += out.nbytes
        read(self, file, name, begin, out)

    Reader.read = counted  # type: ignore[method-assign]
    try:
        with peak() as loading:
            engine.load_checkpoint(folder)
        with peak() as again:
            engine.load_checkpoint(folder)
    finally:
        Reader.read = read  # type: ignore[method-assign]
    states = sum(s["exp_avg"].nbytes for s in engine.optimizer.state.values())
    assert again[0] < FEW  # and fills them where they are
    return loading[0], 2 * states, total, 2 * 3 * states


def test_peaks_are_a_few_mb_above_the_shard(tmp_path: Path) -> None:
    """64 MB of weights: 192 MB of state, which 2 ranks save, and 3 or 1 load."""
    state = 3 * 4 * WIDTH * WIDTH * 4
    for synchronous, asynchronous, *_ in pool_for(2).run(
        held, folder=str(tmp_path), stage=3, saves=True
    ):
        assert synchronous < FEW
        assert asynchronous < state / 2 + FEW
        assert asynchronous > synchronous + FEW  # negative control: a copy is seen
    for world_size, stage in ((3, 2), (1, 3), (2, 1)):
        for loading, made, read, needed in pool_for(world_size).run(
            held, folder=str(tmp_path), stage=stage, saves=False
        ):
            assert loading < made + FEW  # the optimizer's states are made by it
            assert read == needed
