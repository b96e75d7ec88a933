"""Checkpointed: the part of an engine's interface that is about checkpoints."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onefold.param.publish import Publisher
from onefold.parts import Parts
from onefold.state.agree import on_all_ranks
from onefold.state.export import save_model
from onefold.state.index import Progress
from onefold.state.loader import Loader
from onefold.state.restore import Wanted
from onefold.state.saver import Request, Saver
from onefold.step import Stepper
from onefold.transaction import Transaction


class Checkpointed:
    """Saves and loads. ``Engine`` builds what it stands on."""

    _saver: Saver
    _loader: Loader
    _transaction: Transaction
    _stepper: Stepper
    parts: Parts

    @property
    def global_steps(self) -> int:
        """Real steps."""
        return self._stepper.global_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that were dropped because a gradient was not finite."""
        return self._stepper.skipped_steps

    @property
    def micro_steps(self) -> int:
        """Calls of ``step()``, on and off the boundary."""
        return self._stepper.micro_steps

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        keep_last: int | None = None,
        async_save: bool = False,
    ) -> Path:
        """Write everything that a later run needs to go on; every rank calls it.

        Each rank writes its part, as safetensors, into a folder with a temporary name; renaming the
        folder makes it a checkpoint, and ``latest`` moves after that. A job that dies on the way
        leaves the earlier ones as they were.

        Args:
            save_dir: on a file system that all ranks share.
            tag: name of the checkpoint's folder; default ``global_step<N>``. One of the same name
                is replaced.
            client_state: what JSON can say; comes back from ``load_checkpoint``.
            keep_last: how many checkpoints to leave in ``save_dir``, this one included.
            async_save: return as soon as everything is copied to the host, and write in another
                thread, while training goes on. An error is raised, on all ranks alike, by a later
                ``step()`` (which has stepped all the same), by the next ``save_checkpoint`` or
                ``load_checkpoint``, which wait for it, or by ``destroy``. A process that ends
                finishes its save first.

        Returns:
            The checkpoint's folder; with ``async_save`` it is there when the save has ended.

        Raises:
            StateError: inside an open scope or a backward, or with gradients since the last step.
            TypeError: something in ``client_state``, a param group or the scheduler is no data.
            ValueError: ``tag`` is no folder name, or ranks were given different things.
            CheckpointError: another rank failed, or another job saves here.
            OSError: of the file system; nothing is left of this checkpoint then.
        Communication: exchanges on the control group; with ``async_save`` one more in every step
            until it has ended, and the last ones over a group of its own.
        Memory: a few MB; with ``async_save`` a copy on the host of what this rank writes.
        Source: the signature is that of DeepSpeed's ``save_checkpoint``.
        """
        stepper = self._stepper
        request = Request(
            directory=Path(save_dir).absolute(),
            tag=f"global_step{stepper.global_steps}" if tag is None else tag,
            client_state=client_state or {},
            keep_last=keep_last,
            progress=Progress(
                global_steps=stepper.global_steps,
                skipped_steps=stepper.skipped_steps,
                micro_steps=stepper.micro_steps,
            ),
        )
        return self._saver.save(request, is_async=async_save)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        *,
        max_shard_bytes: int | None = None,
    ) -> list[Path]:
        """Write the model alone, as safetensors, for ``from_pretrained`` and others to load.

        In the dtype of the model, if that is bf16 or fp16, else in bf16; integers as they are. Of
        several names of one tensor the first is written. For fp32 there is ``onefold export``.

        Args:
            save_dir: where a model's ``config.json`` would be; rank 0 writes there.
            save_filename: of the file.
            max_shard_bytes: cut into files of at most this size, with an index as Hugging Face has
                it; None for one file.

        Returns:
            The files with tensors, on every rank.

        Raises:
            StateError: inside a window.
            OSError: of the file system, on rank 0; CheckpointError on the others. The model that
                was there before is there still.
        Communication: one all-gather per sharded unit, one broadcast per persistent buffer; experts
            go over the control group. Two exchanges.
        Memory: one unit, on every rank's device and host.
        Source: the name is that of DeepSpeed's ``save_16bit_model``.
        """
        parts = self.parts
        on_all_ranks(
            parts.world.control,
            "save_16bit_model()",
            lambda: self._transaction.refuse_inside("save_16bit_model()"),
        )
        return save_model(parts, Path(save_dir).absolute() / save_filename, max_shard_bytes)

    def load_checkpoint(  # noqa: PLR0913 (DeepSpeed's signature, and two more)
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        *,
        load_module_only: bool = False,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
    ) -> tuple[Path | None, dict[str, Any]]:
        """Go on where a checkpoint was saved, at any world size, stage, mesh or precision.

        Gradients since the last step are dropped. With the world size, stage and data of the run
        that saved, what follows has the bits of that run.

        With ``"checkpoint": {"load_universal": true}`` in the config it is a universal checkpoint
        of DeepSpeed's, of Adam and data parallelism alone; a warning names what that does not have.

        Args:
            load_dir: what ``save_checkpoint`` was given.
            tag: which; default the newest that is not damaged, or that in ``latest_universal``.
            load_module_only: weights and buffers alone.
            load_optimizer_states: with optimizer states and param group settings.
            load_lr_scheduler_states: with the state of the engine's scheduler.
            include: patterns (as in ``fnmatch``) of parameters and buffers to load; the others
                stay as they are.
            exclude: patterns of those to leave, a new head for example.

        Returns:
            The checkpoint's folder and its ``client_state``; ``(None, {})`` if there is none.

        Raises:
            StateError: inside an open scope or a backward.
            CheckpointError: damaged, and no ``tag`` says which other one will do, or of another
                model: lists what is missing, surplus or of another shape; or DeepSpeed's and not
                asked for, or the reverse. Nothing was loaded then.
        Communication: exchanges on the control group; where parameters are Replicate over sharded
            masters one all-gather per unit.
        Memory: a few MB.
        Source: the signature is that of DeepSpeed's ``load_checkpoint``.
        """
        self._saver.wait()
        self._loader.check_may_load()
        wanted = Wanted(include, exclude, load_optimizer_states, load_lr_scheduler_states)
        if load_module_only:
            wanted = wanted._replace(optimizer=False, scheduler=False, progress=False)
        found = self._loader.find(Path(load_dir).absolute(), tag, wanted)
        if found is None:
            return None, {}
        self._transaction.restart()
        self._stepper.hide()
        self._loader.load(found, wanted)
        publisher = Publisher()
        publisher.start(self.parts.units)
        publisher.finish()
        if not load_module_only:
            self._stepper.resume(*found.index.progress.counters)
        return found.folder, found.index.client_state
