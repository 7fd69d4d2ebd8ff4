"""What a Trainer's checkpoint holds beside weights, optimizers and schedulers, for the training state of a setup."""

from __future__ import annotations

from typing import Any

from tl_lightning._feed import Feed

# A setup saves these itself.
_ELSEWHERE = ("state_dict", "optimizer_states", "lr_schedulers", "loops")


class TrainerState:
    """The Trainer's progress and callbacks, and what the hooks for checkpoints save.

    ``state_dict`` makes the Trainer's own checkpoint, so that ``on_save_checkpoint`` runs as it does in ``fit``;
    ``load_state_dict`` gives it back to ``on_load_checkpoint``. To be used while the Trainer waits for a batch.
    """

    def __init__(self, trainer: Any, feed: Feed) -> None:
        self._trainer = trainer
        self._feed = feed

    def state_dict(self) -> dict[str, Any]:
        connector = self._trainer._checkpoint_connector
        # code that saves may rely on a batch having been there: Lightning saves no earlier
        begun = self._trainer.fit_loop.total_batch_idx >= 0
        checkpoint = connector.dump_checkpoint(weights_only=False) if begun else {}
        rest = {key: value for key, value in checkpoint.items() if key not in _ELSEWHERE}
        return {"checkpoint": rest, "progress": {name: one.state_dict() for name, one in self._counters().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        module = trainer.lightning_module
        checkpoint = {**state["checkpoint"], "state_dict": module.state_dict()}
        if state["checkpoint"]:
            for callback in trainer.callbacks:
                callback.on_load_checkpoint(trainer, module, checkpoint)
            module.on_load_checkpoint(checkpoint)
        states = checkpoint.get("callbacks", {})
        for callback in trainer.callbacks:
            if callback.state_key in states:
                callback.load_state_dict(states[callback.state_key])
        for name, counter in self._counters().items():
            counter.load_state_dict(state["progress"][name])
        place = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._feed.place = trainer.fit_loop._data_fetcher.fetched = place

    def _counters(self) -> dict[str, Any]:
        """Return what counts epochs, batches and updates: what ``current_epoch`` and ``global_step`` are read from."""
        fit = self._trainer.fit_loop
        batches = fit.epoch_loop
        return {
            "epochs": fit.epoch_progress,
            "batches": batches.batch_progress,
            "schedulers": batches.scheduler_progress,
            "updates": batches.automatic_optimization.optim_progress,
            "manual updates": batches.manual_optimization.optim_step_progress,
        }
