"""onefold on one GPU, in one go of a few minutes: ``python -m benchmarks.gpu``.

- one rank, whose group is NCCL's, and then two ranks that share the GPU, with gloo carrying CUDA
  tensors, because NCCL refuses two ranks on one device;
- ``native``: the transport's collectives on that group, narrow wires too, against sums by hand;
- ``exact``: stages 0-3 in bf16 on two streams, gradients that come late, weights that are small
  integers, so that a missing wait shows as a wrong number;
- ``overlap``: AdamW steps of a bf16 network, in a window and in an armed window: the
  same bits with overlap and without;
- ``time``: a step in a window and in an armed one against the passes alone.

Without a GPU the same runs on the CPU with tiny sizes, so that the script is known to work; its
times mean nothing then. Needs torch and onefold alone. Prints a table, writes
``benchmarks/results/gpu.json``, and ends with 1 if a check failed.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import onefold
from benchmarks.streams import Late, on_side
from onefold.wire.buffer import Arena
from onefold.wire.transports import NativeTransport

RESULTS: Final = Path(__file__).parent / "results" / "gpu.json"
STAGES: Final = (0, 1, 2, 3)
MODES: Final = ("bare", "window", "armed")
BF16: Final = {"bf16": {"enabled": True}}


class Sizes(NamedTuple):
    """How large everything is."""

    room_numel: int
    width: int
    layers: int
    batch: int
    steps: int


GPU: Final = Sizes(room_numel=1 << 18, width=4096, layers=12, batch=4096, steps=10)
CPU: Final = Sizes(room_numel=1 << 8, width=32, layers=2, batch=8, steps=1)


class Bench:
    """One rank's part, and what it found."""

    def __init__(self, rank: int, num_ranks: int, device: torch.device) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.sizes = GPU if device.type == "cuda" else CPU
        self.rows: list[dict[str, Any]] = []

    def note(self, check: str, subject: str, outcome: bool | float, detail: str = "") -> None:
        """Enter a row; ``outcome`` is whether a check passed, or milliseconds."""
        row = {"ranks": self.num_ranks, "check": check, "subject": subject, "detail": detail}
        is_check = isinstance(outcome, bool)
        self.rows.append({**row, "passed" if is_check else "ms": outcome})

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seeded(self, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same numbers on every machine, rank and device."""
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.device, dtype)

    @contextlib.contextmanager
    def engine(self, model: nn.Module, stage: int, optimizer: Any) -> Iterator[onefold.Engine]:
        """An engine in bf16, destroyed at the end."""
        zero = {"stage": stage, "reduce_bucket_size": 2 * self.sizes.room_numel}
        config = {"zero_optimization": zero, **BF16}
        engine = onefold.initialize(model=model, optimizer=optimizer, config=config).engine
        try:
            yield engine
        finally:
            engine.destroy()


@contextlib.contextmanager
def scope(engine: onefold.Engine, mode: str, backwards: int) -> Iterator[None]:
    if mode == "bare":
        yield
        return
    with engine.coalesce_grad_reduction(backwards=backwards if mode == "armed" else None):
        yield


# -- native: the transport by itself ---------------------------------------------------------------


def check_native(bench: Bench) -> None:
    """Every collective of the transport: integers, so that every order of the sum is exact."""
    transport = NativeTransport(dist.group.WORLD, Arena(bench.device))  # type: ignore[arg-type]
    numel, ranks, rank = 96, bench.num_ranks, bench.rank
    steps = torch.arange(numel * ranks, device=bench.device) % 50
    sources = [steps.float() + r for r in range(ranks)]
    whole = torch.stack(sources).sum(0)
    own = slice(rank * numel, (rank + 1) * numel)
    for wire in (torch.float32, torch.bfloat16):
        out = torch.empty(numel, device=bench.device)
        transport.reduce_scatter(sources[rank].clone(), out, 0, wire).wait()
        bench.note("native", f"reduce_scatter {wire}", torch.equal(out, whole[own]))
        total = sources[rank].clone()
        transport.all_reduce(total, 1, wire).wait()
        bench.note("native", f"all_reduce {wire}", torch.equal(total, whole))
        gathered = torch.empty(numel * ranks, device=bench.device, dtype=wire)
        transport.all_gather(sources[rank][own].to(wire), gathered, 2).wait()
        wanted = torch.cat([s[r * numel : (r + 1) * numel] for r, s in enumerate(sources)])
        bench.note("native", f"all_gather {wire}", torch.equal(gathered, wanted.to(wire)))


# -- exact: streams --------------------------------------------------------------------------------


class Room(nn.Module):
    """The mean of ``w * x`` times its size: the gradient of every element is ``x``."""

    def __init__(self, numel: int, is_on_side: bool) -> None:
        super().__init__()
        self.is_on_side = is_on_side
        self.w = nn.Parameter(torch.zeros(numel))

    def forward(self, x: float) -> Tensor:
        with on_side(self.w.device, self.is_on_side):
            weight: Tensor = Late.apply(self.w)  # type: ignore[no-untyped-call]
            loss = (weight.float() * x).sum()
        if loss.is_cuda:
            loss.record_stream(torch.cuda.current_stream())
        return loss


class Rooms(nn.Module):
    """Eight repeated blocks; every other one runs on the side stream."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        numel = bench.sizes.room_numel
        self.rooms = nn.ModuleList(Room(numel, index % 2 == 1) for index in range(8))

    def forward(self, x: float) -> Tensor:
        return torch.stack([room((i % 3 + 1) * x) for i, room in enumerate(self.rooms)]).sum()


def check_exact(bench: Bench) -> None:
    """SGD at lr 1: each step moves the weights of room i by minus (i % 3 + 1) times the mean."""
    backwards, steps = 2, 2
    mean = sum(1 + 2 * r + k for r in range(bench.num_ranks) for k in range(backwards))
    for stage in STAGES:
        for mode in MODES:
            model = Rooms(bench).to(bench.device)
            sgd = lambda params: torch.optim.SGD(params, lr=float(bench.num_ranks))  # noqa: E731
            wrong: list[str] = []
            with bench.engine(model, stage, sgd) as engine:
                for step in range(1, steps + 1):
                    with scope(engine, mode, backwards):
                        for k in range(backwards):
                            engine.backward(engine(1.0 + 2 * bench.rank + k))
                    engine.step()
                    for name, tensor in engine.full_state_dict().items():
                        wanted = -float(step * mean * (int(name.split(".")[1]) % 3 + 1))
                        rounded = torch.tensor(wanted).bfloat16()
                        if not (tensor == rounded).all():
                            wrong.append(f"step {step} {name}: {tensor.unique()[:3].tolist()}")
            bench.note("exact", f"stage {stage} {mode}", not wrong, "; ".join(wrong[:2]))


# -- overlap: the same bits ------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


class Network(nn.Module):
    """Repeated blocks and a head; ``[B, width]`` -> a scalar in fp32."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.head(x)
        return output.float().square().mean()


def network(bench: Bench) -> Network:
    torch.manual_seed(0)
    return Network(bench.sizes.width, bench.sizes.layers).to(bench.device)


def batch(bench: Bench, k: int) -> Tensor:
    shape = (bench.sizes.batch, bench.sizes.width)
    return bench.seeded(*shape, seed=1000 * bench.rank + k, dtype=torch.bfloat16)


def check_overlap(bench: Bench) -> None:
    """Whether reductions hide behind the last backward must not change a bit.

    Nor may the stage, of one rank. Of several, a narrow wire rounds all terms but the owner's, and
    where shards are cut decides who the owner is.
    """
    backwards = 3
    batches = [batch(bench, k) for k in range(backwards)]
    adamw = lambda params: torch.optim.AdamW(params, lr=1e-3)  # noqa: E731
    reference: dict[str, Tensor] = {}
    for stage in STAGES:
        reference = reference if bench.num_ranks == 1 else {}
        for mode in ("window", "armed"):
            with bench.engine(network(bench), stage, adamw) as engine:
                for _ in range(2):
                    with scope(engine, mode, backwards):
                        for one in batches:
                            engine.backward(engine(one))
                    engine.step()
                found = engine.full_state_dict()
            reference = reference or found
            differing = [name for name in found if not torch.equal(found[name], reference[name])]
            bench.note("overlap", f"stage {stage} {mode}", not differing, ", ".join(differing[:3]))
    start = dict(network(bench).bfloat16().state_dict())
    moved = any(not torch.equal(reference[name], start[name].cpu()) for name in reference)
    bench.note("overlap", "the weights have moved", moved)


# -- time ------------------------------------------------------------------------------------------


def median_ms(bench: Bench, step: Callable[[], object]) -> float:
    times = []
    for index in range(2 + bench.sizes.steps):
        bench.settle()
        begin = time.perf_counter()
        step()
        bench.settle()
        if index >= 2:
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def measure(bench: Bench) -> None:
    """A step of n backwards against the same passes and a torch optimizer, without an engine."""
    backwards = 4
    batches = [batch(bench, k) for k in range(backwards)]
    adamw = lambda params: torch.optim.AdamW(params, lr=1e-4)  # noqa: E731

    def passes(model: nn.Module) -> None:
        for one in batches:
            torch.autograd.backward(model(one))

    plain = network(bench).bfloat16()
    passes(plain)  # from here on gradients are added to existing ones
    floor = median_ms(bench, lambda: passes(plain))
    bench.note("time", f"floor: {backwards} passes", floor)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    bench.note("time", "floor: bf16 AdamW", median_ms(bench, optimizer.step))
    optimizer.zero_grad()
    for stage in STAGES:
        for mode in ("window", "armed"):
            with bench.engine(network(bench), stage, adamw) as engine:

                def step(engine: onefold.Engine = engine, mode: str = mode) -> None:
                    with scope(engine, mode, backwards):
                        passes(engine.module)
                    engine.step()

                took = median_ms(bench, step)
            bench.note("time", f"stage {stage} {mode}", took, f"{took / floor:.2f} x the passes")


# -- the script ------------------------------------------------------------------------------------


def run_process(rank: int, kind: str, folder: str) -> None:
    """One of two processes: the first is a world of its own, and then both are one."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", 0)
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory would hide what is read before it was written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    for num_ranks in (1, 2):
        if rank < num_ranks:
            rows = run_world(rank, num_ranks, device, Path(folder) / f"rendezvous{num_ranks}")
            (Path(folder) / f"rows{num_ranks}.{rank}.json").write_text(json.dumps(rows))


def run_world(
    rank: int, num_ranks: int, device: torch.device, rendezvous: Path
) -> list[dict[str, Any]]:
    """One rank's rows."""
    has_nccl = device.type == "cuda" and num_ranks == 1
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        init_method=rendezvous.as_uri(),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=300),  # the second process waits here for the first
    )
    bench = Bench(rank, num_ranks, device)
    try:
        for part in (check_native, check_exact, check_overlap, measure):
            part(bench)
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) / 2**30
            bench.note("memory", f"peak {peak:.2f} GiB", outcome=True)
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()
    return bench.rows


def run(kind: str) -> list[dict[str, Any]]:
    """Both worlds, one after the other: rank 0's rows, and of the others what failed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_process, args=(kind, folder), nprocs=2)
        for num_ranks, rank in ((1, 0), (2, 0), (2, 1)):
            found = json.loads((Path(folder) / f"rows{num_ranks}.{rank}.json").read_text())
            rows += [row for row in found if rank == 0 or not row.get("passed", True)]
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available()
    kind = options.device if options.device != "auto" else "cuda" if has_gpu else "cpu"
    begin = time.perf_counter()
    rows = run(kind)
    for row in rows:
        outcome = f"{row['ms']:.2f} ms" if "ms" in row else "ok" if row["passed"] else "WRONG"
        print(f"{row['ranks']} {row['check']:8} {row['subject']:32} {outcome:>12}  {row['detail']}")
    name = torch.cuda.get_device_name(0) if kind == "cuda" else "CPU, tiny: times mean nothing"
    machine = {"device": name, "torch": torch.__version__, "python": sys.version.split()[0]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    failed = sum(not row.get("passed", True) for row in rows)
    print(f"{len(rows)} rows on {name}, {failed} wrong, {time.perf_counter() - begin:.0f} s")
    print(f"written to {options.out}")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
