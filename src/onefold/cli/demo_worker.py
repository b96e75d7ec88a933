"""Demo worker: what one rank runs. ``python -m onefold.cli.demo_worker job.json`` under torchrun.

It reports through events; what it prints is the log.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onefold.cli import model as models
from onefold.cli.events import EventWriter
from onefold.cli.job import Job
from onefold.cli.pairs import Pair, read_pairs, take
from onefold.cli.record import Recorder, StepRecord
from onefold.cli.retrieval import evaluate
from onefold.engine import Engine
from onefold.initialize import initialize

ENCODE_BATCH = 32


def main(job_path: str) -> int:
    """Run the job; the exit code."""
    job = Job.load(Path(job_path))
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    events = EventWriter(job.events_path, rank)
    try:
        DemoRank(job, rank, num_ranks, events).run()
    except Exception as error:
        traceback.print_exc()
        events.emit("failed", message=_in_one_line(error))
        return 1
    return 0


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class DemoRank:
    """One rank of the demo, from loading the model to saving it."""

    def __init__(self, job: Job, rank: int, num_ranks: int, events: EventWriter) -> None:
        self._job = job
        self._rank = rank
        self._num_ranks = num_ranks
        self._events = events
        self._train = read_pairs(job.train_path)
        self._held_out = read_pairs(job.held_out_path)

    def run(self) -> None:
        """Evaluate, train, evaluate, save."""
        torch.manual_seed(self._rank)  # dropout differs between ranks
        self._events.emit("phase", name="loading the model")
        model = models.load(self._job.model, self._job.max_tokens)
        self._events.emit("phase", name="evaluating")
        self._encode_own_share(model, "before")
        engine = self._start(model)  # all ranks meet here, so every share is written
        self._report_retrieval("before")
        self._fit(engine, model)
        self._events.emit("phase", name="evaluating")
        with engine.full_parameters():  # ranks meet at its end, so every share is written
            self._encode_own_share(model, "after")
        self._report_retrieval("after")
        self._events.emit("phase", name="saving the model")
        self._save(engine)
        engine.destroy()

    def _start(self, model: nn.Module) -> Engine:
        job = self._job
        config = {
            "zero_optimization": {"stage": job.stage},
            "onefold": {"block_classes": models.block_classes(model)},
        }
        return initialize(
            model=model,
            optimizer=lambda params: torch.optim.AdamW(
                params, lr=job.learning_rate, weight_decay=0.0
            ),
            config=config,
        ).engine

    # -- training -------------------------------------------------------------------------------

    def _fit(self, engine: Engine, model: Any) -> None:
        from sentence_transformers.sentence_transformer.losses import (
            CachedMultipleNegativesRankingLoss,
        )

        job = self._job
        loss_of = CachedMultipleNegativesRankingLoss(model, mini_batch_size=job.mini_batch_size)
        recorder = Recorder(engine, _count_backwards(model))
        records: list[StepRecord] = []
        self._events.emit("phase", name="fine-tuning")
        model.train()
        for step in range(job.steps):
            batch = take(
                self._train,
                step=step,
                rank=self._rank,
                num_ranks=self._num_ranks,
                batch_size=job.batch_size,
            )
            features = [model.preprocess(list(texts)) for texts in zip(*batch, strict=True)]
            is_bare = job.is_bare(step)
            with recorder.step(is_bare=is_bare) as record:
                window = engine.coalesce_grad_reduction()
                with contextlib.nullcontext() if is_bare else window:
                    loss = engine.backward(loss_of(features, None))
                engine.step()
            records.append(record)
            self._events.emit("step", loss=loss.item(), seconds=record.seconds, is_bare=is_bare)
        if self._rank == 0:
            rows = [record.to_json() for record in records]
            job.records_path.write_text(json.dumps(rows), encoding="utf-8")

    # -- evaluation -----------------------------------------------------------------------------

    def _encode_own_share(self, model: Any, when: str) -> None:
        own = self._held_out[self._rank :: self._num_ranks]
        columns = list(zip(*own, strict=True)) or [()] * len(Pair._fields)
        encoded = [
            model.encode(
                list(texts),
                batch_size=ENCODE_BATCH,
                show_progress_bar=False,
                convert_to_tensor=True,
                normalize_embeddings=True,
            )
            for texts in columns
        ]
        torch.save([tensor.cpu() for tensor in encoded], self._share_path(when, self._rank))

    def _share_path(self, when: str, rank: int) -> Path:
        return Path(self._job.folder) / f"embeddings_{when}_{rank}.pt"

    def _report_retrieval(self, when: str) -> None:
        if self._rank != 0:
            return
        shares: list[list[Tensor]] = [
            torch.load(self._share_path(when, rank)) for rank in range(self._num_ranks)
        ]
        filled = [share for share in shares if share[0].numel()]
        anchors, positives = (torch.cat(column) for column in zip(*filled, strict=True))
        found = evaluate(anchors, positives)
        self._events.emit("retrieval", when=when, mrr=found.mrr, recall=found.recall)

    # -- the result -----------------------------------------------------------------------------

    def _save(self, engine: Engine) -> None:
        state = engine.full_state_dict()
        if self._rank == 0:
            fresh = models.load(self._job.model, self._job.max_tokens)
            fresh.load_state_dict(state)
            fresh.save_pretrained(self._job.model_folder, create_model_card=False)


def _count_backwards(model: nn.Module) -> Callable[[], int]:
    """Count the gradients that arrive at the model's output: its backward passes."""
    count = 0

    def arrived(_grad: Tensor) -> None:
        nonlocal count
        count += 1

    def after_forward(_module: nn.Module, _args: Any, output: dict[str, Any]) -> None:
        embedding = output["sentence_embedding"]
        if embedding.requires_grad:
            embedding.register_hook(arrived)

    model.register_forward_hook(after_forward)
    return lambda: count


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
