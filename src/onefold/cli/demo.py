"""Demo: the command ``onefold demo``, from its options to its report."""

import json
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from onefold.cli.failure import BadInput, Failure
from onefold.cli.job import Job
from onefold.cli.model import DEFAULT_MODEL, find_model, require_extras
from onefold.cli.pairs import Split, read_pairs, split, standard_library, write_pairs

INTERRUPTED: Final = 130
SUMMARY, PICTURE, LOG, MODEL = "summary.json", "traffic.png", "demo.log", "model"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for; see ``run_demo``."""

    nproc: int
    stage: int
    model: str
    data: Path | None
    output: Path
    steps: int
    bare_steps: int
    batch_size: int
    mini_batch_size: int
    tokens: int
    lr: float

    def check(self) -> None:
        """Refuse numbers that cannot work.

        Raises:
            BadInput: names the first.
        """
        for option, value in (
            ("--nproc", self.nproc),
            ("--bare-steps", self.bare_steps),
            ("--mini-batch-size", self.mini_batch_size),
        ):
            if value < 1:
                raise BadInput(f"{option}: expected at least 1, got {value}.")
        if self.stage not in range(4):
            raise BadInput(f"--stage: expected 0, 1, 2 or 3, got {self.stage}.")
        if self.batch_size < 2:
            raise BadInput(
                f"--batch-size: expected at least 2, got {self.batch_size}. The other pairs of a "
                "rank's batch are its negatives."
            )
        if self.tokens < 3:
            raise BadInput(f"--tokens: expected at least 3, got {self.tokens}.")
        if not 0 < self.lr < float("inf"):
            raise BadInput(f"--lr: expected a number above 0, got {self.lr}.")
        if self.steps <= self.bare_steps:
            raise BadInput(
                f"--steps: expected more than the {self.bare_steps} that run without the window "
                f"(--bare-steps), got {self.steps}."
            )


def run_demo(  # noqa: PLR0913, PLR0917
    nproc: Annotated[int, typer.Option(help="Ranks, all on this machine.")] = 2,
    stage: Annotated[int, typer.Option(help="ZeRO stage: 0, 1, 2 or 3.")] = 3,
    model: Annotated[
        str, typer.Option(help="A sentence-transformers model: a folder, or a cached name.")
    ] = DEFAULT_MODEL,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Your own pairs: JSON lines with 'anchor' and 'positive'. Default: docstrings and "
            "functions of Python's standard library.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="The folder for the results.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(help="Optimizer steps, bare ones included.")] = 20,
    bare_steps: Annotated[
        int, typer.Option(help="Steps that run without the window, for comparison.")
    ] = 3,
    batch_size: Annotated[int, typer.Option(help="Pairs per rank and step.")] = 32,
    mini_batch_size: Annotated[int, typer.Option(help="Texts per backward.")] = 8,
    tokens: Annotated[int, typer.Option(help="Longer texts are cut.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 5e-5,
) -> None:
    """Fine-tune a small model for code search on local ranks, and show what the window saves.

    Each step is one contrastive batch that a cached loss replays in many backwards. Most steps run
    inside coalesce_grad_reduction(), a few without, and the engine's ledger counts what both send.
    Everything runs on the CPU and nothing is downloaded.
    """
    options = Options(
        nproc=nproc,
        stage=stage,
        model=model,
        data=data,
        output=output,
        steps=steps,
        bare_steps=bare_steps,
        batch_size=batch_size,
        mini_batch_size=mini_batch_size,
        tokens=tokens,
        lr=lr,
    )
    try:
        _run(options, Console())
    except Failure as failure:
        _complain(str(failure))
        raise typer.Exit(failure.exit_code) from None
    except KeyboardInterrupt:
        _complain("interrupted; the ranks have been stopped.")
        raise typer.Exit(INTERRUPTED) from None


def _complain(message: str) -> None:
    Console(stderr=True).print(
        f"onefold demo: {message}", style="red", markup=False, highlight=False, soft_wrap=True
    )


def _run(options: Options, console: Console) -> None:
    begin = time.perf_counter()
    options.check()
    require_extras(options.model)
    found = find_model(options.model)
    pairs = _pairs(options, console)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--output {options.output}: {error.strerror}.") from None
    with tempfile.TemporaryDirectory(prefix="onefold-demo-") as folder:
        job = Job(
            model=found,
            stage=options.stage,
            steps=options.steps,
            bare_steps=options.bare_steps,
            batch_size=options.batch_size,
            mini_batch_size=options.mini_batch_size,
            max_tokens=options.tokens,
            learning_rate=options.lr,
            folder=folder,
            model_folder=str((options.output / MODEL).resolve()),
        )
        write_pairs(job.train_path, pairs.train)
        write_pairs(job.held_out_path, pairs.held_out)
        _train_and_report(options, job, pairs, console, begin)


def _pairs(options: Options, console: Console) -> Split:
    if options.data is None:
        with console.status("reading the standard library"):
            found = standard_library()
        source = f"the standard library of Python {platform.python_version()}"
    else:
        found = read_pairs(options.data)
        source = str(options.data)
    pairs = split(found)
    needed = options.nproc * options.batch_size
    if len(pairs.train) < needed or len(pairs.held_out) < 2:
        raise BadInput(
            f"{source}: {len(found)} pairs are too few. {len(pairs.held_out)} of them would be "
            f"held out (at least 2 are needed) and {len(pairs.train)} trained on, but one step of "
            f"{options.nproc} rank(s) with {options.batch_size} pairs each takes {needed}. Give "
            "more pairs, or lower --batch-size or --nproc."
        )
    console.print(
        f"{len(found):,} pairs from {source}; {len(pairs.held_out)} held out",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return pairs


def _train_and_report(
    options: Options, job: Job, pairs: Split, console: Console, begin: float
) -> None:
    from onefold.cli.launch import launch
    from onefold.cli.progress import DemoProgress
    from onefold.cli.record import StepRecord
    from onefold.cli.report import Comparison
    from onefold.cli.timeline import draw

    pairs_per_step = options.nproc * options.batch_size
    setting = f"{Path(options.model).name}, {options.nproc} rank(s), stage {options.stage}"
    console.print(
        f"{setting}: {options.steps} steps of {pairs_per_step} pairs, {options.bare_steps} of them "
        "without the window",
        highlight=False,
        soft_wrap=True,
    )
    progress = DemoProgress(console, steps=options.steps, pairs_per_step=pairs_per_step)
    with progress:
        launch(job, options.nproc, progress.on_event, options.output / LOG)
    rows = json.loads(job.records_path.read_text(encoding="utf-8"))
    comparison = Comparison.of([StepRecord.from_json(row) for row in rows])
    draw(
        options.output / PICTURE,
        window=comparison.window,
        bare=comparison.bare,
        setting=setting,
    )
    losses = [sum(each) / len(each) for _, each in sorted(progress.losses.items())]
    summary: dict[str, Any] = {
        "model": options.model,
        "pairs_train": len(pairs.train),
        "pairs_eval": len(pairs.held_out),
        "world_size": options.nproc,
        "stage": options.stage,
        "steps": options.steps,
        "mrr_before": progress.retrieval["before"]["mrr"],
        "mrr_after": progress.retrieval["after"]["mrr"],
        "loss_first": losses[0],
        "loss_last": losses[-1],
        **comparison.summary(),
        "seconds": time.perf_counter() - begin,
    }
    text = json.dumps(summary, indent=2) + "\n"
    (options.output / SUMMARY).write_text(text, encoding="utf-8")
    console.print(comparison.table(setting))
    names = ", ".join((SUMMARY, PICTURE, f"{MODEL}/", LOG))
    console.print(
        f"{summary['seconds']:.0f} s; written to {options.output}: {names}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
