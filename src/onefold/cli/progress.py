"""Progress: the live view of a run, fed with the events of its ranks."""

from collections import defaultdict
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from onefold.cli.events import Event
from onefold.cli.retrieval import CUTOFF

TRAINING = "fine-tuning"


class DemoProgress:
    """A context manager around the run; ``on_event`` may be called on another thread.

    Attributes:
        losses: per step, the losses of the ranks that have reported it.
        retrieval: ``before`` and ``after``, as soon as known.
    """

    def __init__(self, console: Console, *, steps: int, pairs_per_step: int) -> None:
        self.losses: dict[int, list[float]] = defaultdict(list)
        self.retrieval: dict[str, Event] = {}
        self._console = console
        self._steps = steps
        self._pairs_per_step = pairs_per_step
        self._seen: dict[int, int] = defaultdict(int)
        self._training_s = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("starting the ranks", total=steps, figures="")

    def __enter__(self) -> "DemoProgress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._bar.update(self._task, description="fine-tuned")
        else:
            self._bar.remove_task(self._task)
        self._bar.stop()

    def on_event(self, event: Event) -> None:
        """Show one event."""
        if event["kind"] == "phase" and event["rank"] == 0:
            self._bar.update(self._task, description=event["name"])
            if event["name"] == TRAINING:
                self._bar.reset(self._task, total=self._steps)
        elif event["kind"] == "retrieval":
            self.retrieval[event["when"]] = event
            self._console.print(
                f"{event['when']:>6}: MRR@{CUTOFF} {event['mrr']:.3f}, "
                f"recall@1 {event['recall']:.3f}",
                highlight=False,
            )
        elif event["kind"] == "step":
            self._on_step(event)

    def _on_step(self, event: Event) -> None:
        step = self._seen[event["rank"]]
        self._seen[event["rank"]] += 1
        self.losses[step].append(event["loss"])
        if event["rank"] == 0:
            self._training_s += event["seconds"]
            rate = self._pairs_per_step * (step + 1) / self._training_s
            figures = f"loss {event['loss']:.3f}  {rate:.1f} samples/s"
            self._bar.update(self._task, completed=step + 1, figures=figures)
