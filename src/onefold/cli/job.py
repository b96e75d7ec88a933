"""Job: everything a rank needs to know, written by the command and read by every rank."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Job:
    """One run of the demo.

    Attributes:
        model: what ``SentenceTransformer`` loads.
        stage: the ZeRO stage.
        steps: optimizer steps, the bare ones included.
        bare_steps: how many of them run without the window, to measure what that sends.
        batch_size: pairs of one rank in one step.
        mini_batch_size: texts that one backward goes through.
        max_tokens: longer texts are cut.
        learning_rate: AdamW's.
        folder: scratch shared by the command and its ranks.
        model_folder: where rank 0 saves the trained model.
    """

    model: str
    stage: int
    steps: int
    bare_steps: int
    batch_size: int
    mini_batch_size: int
    max_tokens: int
    learning_rate: float
    folder: str
    model_folder: str

    @property
    def path(self) -> Path:
        """The job itself."""
        return Path(self.folder) / "job.json"

    @property
    def events_path(self) -> Path:
        """What ranks report."""
        return Path(self.folder) / "events.jsonl"

    @property
    def train_path(self) -> Path:
        """Pairs to train on."""
        return Path(self.folder) / "train.jsonl"

    @property
    def held_out_path(self) -> Path:
        """Pairs to evaluate on."""
        return Path(self.folder) / "held_out.jsonl"

    @property
    def records_path(self) -> Path:
        """Rank 0's records of its steps."""
        return Path(self.folder) / "records.json"

    @property
    def log_folder(self) -> Path:
        """What the launcher and the ranks print."""
        return Path(self.folder) / "log"

    def is_bare(self, step: int) -> bool:
        """Whether ``step`` runs without the window; such steps lie evenly among the others."""
        until, before = (
            ((2 * index + 1) * self.bare_steps + self.steps) // (2 * self.steps)
            for index in (step, step - 1)
        )
        return until > before

    def save(self) -> None:
        """Write it where ``load`` finds it."""
        self.path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Job":
        """Read what ``save`` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
