"""What a step costs the host as the world grows: ``python -m benchmarks.scale``.

One process plays one rank of W = 8 ... 4096 on torch's fake process group, whose collectives do not
wait for anybody. Reported per step: calls and bytes of the ledger, bytes held, and the time of our
own code, which is the time outside of forward and backward less what is spent inside the group's
own calls. Prints a table and writes ``benchmarks/results/scale.json``.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onefold.wire import single
from tests.scale.test_memory import home_bytes
from tests.scale.world import SIZES, STAGES, counted, engine_of

RESULTS: Final = Path(__file__).parent / "results" / "scale.json"
NUM_BLOCKS: Final = 10
PARAM_NUMEL: Final = 16384
"""Of each parameter, so that no unit of ten or more is padded much at any W."""
STEPS: Final = 7
WARM_UP: Final = 2


class Blocks(nn.Module):
    """``params`` vectors in ten repeated blocks."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(params // NUM_BLOCKS) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """``[PARAM_NUMEL]`` -> a scalar."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Block(nn.Module):
    def __init__(self, params: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(PARAM_NUMEL) for _ in range(params))

    def forward(self, x: Tensor) -> Tensor:
        """``[PARAM_NUMEL]`` -> the same."""
        for scale in self.scales:
            x = x * scale
        return x


@dataclass
class Row:
    """One cell of the grid; milliseconds are medians, per step."""

    stage: int
    ranks: int
    params: int
    backwards: int
    initialize_ms: float
    calls: int
    sent_bytes: int
    home_bytes: int
    leased_bytes: int
    own_ms: float
    backward_ms: float
    group_ms: float
    instructions: int


class Clock:
    """Time spent inside the process group's calls."""

    def __init__(self) -> None:
        self.group_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch every call through which the wire starts something."""
        calls = [(single, "all_gather"), (single, "reduce_scatter"), (dist, "all_reduce")]
        calls += [(dist, "all_to_all_single"), (dist, "isend"), (dist, "irecv")]
        with ExitStack() as stack:
            for module, name in calls:
                stack.enter_context(patch.object(module, name, self._timed(getattr(module, name))))
            yield

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.group_s += time.perf_counter() - begin

        return timed


def measure(stage: int, ranks: int, params: int, backwards: int) -> Row:
    x = torch.linspace(0.5, 1.5, PARAM_NUMEL)
    clock = Clock()
    begin = time.perf_counter()
    with engine_of(ranks, stage, Blocks(params), bucket_numel=10**9) as engine:
        initialize_ms = 1e3 * (time.perf_counter() - begin)

        def step() -> tuple[float, float, float]:
            """Seconds of forward and backward, of the whole step, and of the group in it."""
            clock.group_s, passes_s, start = 0.0, 0.0, time.perf_counter()
            with engine.coalesce_grad_reduction():
                for _ in range(backwards):
                    before = time.perf_counter()
                    engine.backward(engine(x))
                    passes_s += time.perf_counter() - before
            engine.step()
            return passes_s, time.perf_counter() - start, clock.group_s

        with clock.running():
            for _ in range(WARM_UP):
                step()
            mark = engine.ledger.mark()
            times = [step() for _ in range(STEPS)]
            sent = engine.ledger.since(mark).values()
        with counted() as work:
            step()
        return Row(
            stage=stage,
            ranks=ranks,
            params=params,
            backwards=backwards,
            initialize_ms=initialize_ms,
            calls=sum(total.count for total in sent) // STEPS,
            sent_bytes=sum(total.bytes_out for total in sent) // STEPS,
            home_bytes=home_bytes(engine),
            leased_bytes=engine.parts.arena.peak_bytes,
            own_ms=1e3
            * statistics.median(whole - passes - group for passes, whole, group in times),
            backward_ms=1e3 * statistics.median(one[0] / backwards for one in times),
            group_ms=1e3 * statistics.median(one[2] for one in times),
            instructions=work.total(),
        )


def main() -> None:
    torch.set_num_threads(1)
    rows: list[Row] = []
    titles = "stage ranks params n | init ms | calls  sent MiB | home MiB  leased MiB"
    print(f"{titles} | own ms  backward ms  group ms  instructions")
    for stage in STAGES:
        for params, backwards in ((100, 1), (100, 4), (100, 16), (800, 4)):
            for ranks in SIZES:
                row = measure(stage, ranks, params, backwards)
                rows.append(row)
                print(
                    f"{stage:5} {ranks:5} {params:6} {backwards:1} | {row.initialize_ms:7.0f} | "
                    f"{row.calls:5} {row.sent_bytes / 2**20:9.1f} | {row.home_bytes / 2**20:8.1f} "
                    f"{row.leased_bytes / 2**20:11.1f} | {row.own_ms:6.1f} {row.backward_ms:12.1f} "
                    f"{row.group_ms:9.1f} {row.instructions:13}",
                    flush=True,
                )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    machine = {"python": sys.version.split()[0], "torch": torch.__version__}
    RESULTS.write_text(
        json.dumps({"machine": machine, "rows": [asdict(r) for r in rows]}, indent=1)
    )
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
