"""watch_hf: what is recorded of a real trainer.train(), and that nothing is changed by it."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from tl_hf import watch_hf
from tl_hf._setup import unwrapped

TAPPED = (
    "on_train_begin",
    "on_step_end",
    "on_substep_end",
    "on_train_end",
    "training_step",
    "_maybe_log_save_evaluate",
)


def taps(trainer: Any) -> list[str]:
    return [name for owner in (trainer, trainer.callback_handler) for name in TAPPED if name in vars(owner)]


def result(trainer: Any) -> tuple[list[Any], ...]:
    logs = [
        {k: v for k, v in log.items() if k in ("loss", "eval_loss", "grad_norm")} for log in trainer.state.log_history
    ]
    return [p.tolist() for p in trainer.model.parameters()], torch.get_rng_state().tolist(), logs


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
LOGGED = {"logging_strategy": "steps", "logging_steps": 1}
HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {},
    "incomplete groups": {"gradient_accumulation_steps": 3, "num_train_epochs": 2},
    "evaluated": {**EVALUATED, **LOGGED, "load_best_model_at_end": True},
    "bfloat16": {"bf16": True},
    "checkpointed": {"activation_checkpointing": True},
    "built by the Trainer": {"model_init": True},
    "SGD": {"optim": "sgd"},
    "Adafactor": {"optim": "adafactor"},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", **EVALUATED},
    "warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "noisy embeddings": {"neftune_noise_alpha": 5.0},
    "no clip": {"max_grad_norm": 0.0},
    "one update": {"max_steps": 1},
    "stopped early": {**EVALUATED, "load_best_model_at_end": True, "patience": True, "metric_for_best_model": "loss"},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_is_left_alone(hf, name):
    """Nothing is found in it, its weights, losses and random numbers are those of the unwatched training."""

    def make() -> Any:
        given = copy.deepcopy(HEALTHY[name])
        torch.manual_seed(0)
        if given.pop("patience", False):
            given["callbacks"] = [EarlyStoppingCallback(1, 100.0)]
        if given.get("model_init"):
            return hf.trainer(None, eval_dataset=hf.tokens(8), **{**given, "model_init": lambda: hf.llama(0.1)})
        return hf.trainer(hf.llama(0.1), eval_dataset=hf.tokens(8), **given)

    unwatched = make()
    unwatched.train()
    expected = result(unwatched)
    watched = make()
    with watch_hf(watched) as run:
        watched.train()
    assert result(watched) == expected
    assert run.findings == ()
    assert {note.rule for note in run.notes} <= {"clip-every-update"}
    assert sum(record.optimizer_steps["optimizer"] for record in run.records) == watched.state.global_step
    assert taps(watched) == []


@pytest.mark.parametrize(("model", "data"), [("gpt2", "tokens"), ("bert", "classes")])
def test_other_models_are_healthy_too(hf, model, data):
    """Nothing hangs on Llama."""
    trainer = hf.trainer(getattr(hf, model)(), getattr(hf, data)())
    with watch_hf(trainer) as run:
        trainer.train()
    assert run.assert_healthy().assert_num_updates(8) is run


def test_there_is_a_record_for_each_micro_batch(hf):
    """With the loss of its own, so that the mean over a group is what the Trainer logs for the update."""
    arguments = {"gradient_accumulation_steps": 2, "max_steps": 3, **LOGGED}
    trainer = hf.trainer(**arguments)
    with watch_hf(trainer) as run:
        trainer.train()
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(run.records) == 6
    assert [record.num_examples for record in run.records] == [4] * 6
    assert [record.optimizer_steps["optimizer"] for record in run.records] == [0, 1, 0, 1, 0, 1]
    means = [sum(pair) / 2 for pair in zip(run.losses[::2], run.losses[1::2], strict=True)]
    assert means == pytest.approx(logged)
    assert [event.kind for event in run.records[1].events] == [
        *("backward", "clip", "optimizer_step", "zero_grad", "scheduler_step")
    ]
    run.assert_lr(lambda step: 0.01 * (1 - step // 2 / 3))


class StepsScheduler(TrainerCallback):
    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        lr_scheduler.step()


class Clears(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        model.zero_grad()


class TrainsHeadOnly(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.lm_head.parameters(), lr=0.1)
        return self.optimizer


TWICE = """\
[scheduler-stepped-twice] 'scheduler' (LambdaLR) stepped 16 times in 8 updates (steps 0-7)
  cause: transformers steps it by itself, and so does code of your own: the schedule runs ahead
  fix: take the call of its step() out of your code (a hook, a callback), and leave it to the Trainer"""
CLEARED = """\
[zeroed-before-step] the gradients of all 21 parameters were None when 'optimizer' stepped, although a backward pass \
had filled them just before (8 of 8 updates, steps 0-7)
  cause: they were cleared between backward() and step(), as by a zero_grad() in the wrong place: the update has no \
gradient to apply
  fix: move zero_grad() before backward(), or after step()"""


@pytest.mark.parametrize(("callback", "message"), [(StepsScheduler, TWICE), (Clears, CLEARED)])
def test_a_callback_that_does_what_the_trainer_does_is_named(hf, callback, message):
    """A scheduler that is stepped by both, gradients that are cleared too early: with the whole message."""
    trainer = hf.trainer(callbacks=[callback()])
    with watch_hf(trainer) as run:
        trainer.train()
    assert list(map(str, run.findings)) == [message]


def test_an_optimizer_that_misses_parameters_is_named(hf):
    """The Trainer's optimizer is compared with its model."""
    trainer = hf.trainer(trainer_class=TrainsHeadOnly)
    with watch_hf(trainer) as run:
        trainer.train()
    assert [finding.rule for finding in run.findings] == ["uncovered-parameter"]


def test_a_rule_may_be_allowed(hf):
    """As in any run."""
    trainer = hf.trainer(callbacks=[StepsScheduler()])
    with watch_hf(trainer, allow=["scheduler-stepped-twice"]) as run:
        trainer.train()
    assert run.findings == ()


def test_updates_need_not_be_tracked(hf):
    """Without the copy of the parameters there are no update norms."""
    trainer = hf.trainer(max_steps=2)
    with watch_hf(trainer, track_updates=False) as run:
        trainer.train()
    assert [record.update_norm for record in run.records] == [{}, {}]


class Breaks(Trainer):
    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == 2:
            raise ZeroDivisionError("in the third update")
        return super().compute_loss(*args, **kwargs)


def test_an_error_passes_through_and_nothing_stays(hf):
    """The records up to it are there, and the Trainer is as it was."""
    trainer = hf.trainer(trainer_class=Breaks)
    with pytest.raises(ZeroDivisionError, match="in the third update"), watch_hf(trainer) as run:
        trainer.train()
    assert len(run.records) == 3
    assert run.records[2].loss is None
    assert taps(trainer) == []


def test_before_the_training_there_is_nothing_to_look_at(hf):
    """Any look at the run is an error until train() has begun."""
    trainer = hf.trainer()
    with watch_hf(trainer) as run, pytest.raises(RuntimeError) as caught:
        run.assert_healthy()
    assert str(caught.value) == "nothing was observed: the training that this run waits for has not begun"
    assert taps(trainer) == []


def test_a_second_training_needs_a_watch_of_its_own(hf):
    """A run is that of one training."""
    trainer = hf.trainer(max_steps=1)
    with watch_hf(trainer):
        trainer.train()
        with pytest.raises(RuntimeError) as caught:
            trainer.train()
    assert str(caught.value) == "a second training began inside of one watch: give each a watch of its own"
    assert taps(trainer) == []
    with watch_hf(trainer) as run:
        trainer.train()
    assert len(run.records) == 1


def test_watches_nest_and_leave_in_any_order(hf):
    """Each has the whole record, and the last one that leaves takes the taps away."""
    trainer = hf.trainer(max_steps=2)
    first, second = ExitStack(), ExitStack()
    one = first.enter_context(watch_hf(trainer))
    other = second.enter_context(watch_hf(trainer))
    trainer.train()
    first.close()
    assert taps(trainer) != []
    second.close()
    assert taps(trainer) == []
    assert one.losses == other.losses
    assert len(one.losses) == 2


def test_a_tap_of_somebody_elses_is_left_alone(hf):
    """What was put before a method inside of the watch stays, and goes on working."""
    trainer = hf.trainer(max_steps=2)
    calls = []
    with watch_hf(trainer) as run:
        tapped = trainer.training_step

        def training_step(*args: Any) -> Any:
            calls.append(len(args))
            return tapped(*args)

        trainer.training_step = training_step
        trainer.train()
    assert trainer.training_step is training_step
    assert (calls, len(run.records)) == ([3, 3], 2)
    trainer.train()
    assert len(calls) == 4


def test_an_own_method_of_the_instance_comes_back(hf):
    """A Trainer that was patched before the watch is patched after it."""
    trainer = hf.trainer(max_steps=1)
    original = trainer.training_step
    trainer.training_step = mine = lambda *args: original(*args)
    with watch_hf(trainer):
        trainer.train()
    assert trainer.training_step is mine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trainer": 3}, "TypeError: trainer must be a transformers.Trainer, got a int"),
        ({"allow": "no-update"}, "TypeError: allow must be a list of rule ids, got 'no-update': write ['no-update']"),
    ],
)
def test_misuse_is_named(hf, arguments, message):
    """Before anything is tapped."""
    with pytest.raises(TypeError) as caught, watch_hf(**{"trainer": hf.trainer(), **arguments}):
        pass
    assert f"TypeError: {caught.value}" == message


def test_callbacks_of_executed_code_are_the_persons(hf):
    """A callback is the person's also where no module of its name was imported, and its methods are decorated."""
    namespace = {"__name__": "executed"}
    exec(
        "import torch\nfrom transformers import TrainerCallback\n"
        "class Average(TrainerCallback):\n    @torch.no_grad()\n    def on_step_end(self, *given, **named): pass\n",
        namespace,
    )
    trainer = hf.trainer(max_steps=1, callbacks=[namespace["Average"]])
    with watch_hf(trainer) as run:
        trainer.train()
    assert isinstance(run.setup.Average, namespace["Average"])


def test_a_wrapper_that_stays_does_not_hear_twice(hf):
    """What somebody wraps around a watched method and leaves there makes no further records in the next watch."""
    trainer = hf.trainer(max_steps=2)
    with watch_hf(trainer) as first:
        watched = trainer.training_step
        trainer.training_step = lambda *given: watched(*given)
        trainer.train()
    with watch_hf(trainer) as second:
        trainer.train()
    assert [len(run.losses) for run in (first, second)] == [2, 2]
    assert [len(run.records) for run in (first, second)] == [2, 2]


class RunsOutOfMemory(Trainer):
    """Cannot train on more than 2 examples at once, as shows in the second micro-batch."""

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.state.global_step and len(inputs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss


def test_a_training_that_begins_anew_with_smaller_batches(hf):
    """auto_find_batch_size tries again: one run goes on, with the first attempts' records before the last one's."""
    trainer = hf.trainer(trainer_class=RunsOutOfMemory, auto_find_batch_size=True, per_device_train_batch_size=8)
    with watch_hf(trainer) as run:
        trainer.train()
    sizes = [record.num_examples for record in run.records]
    assert (sizes[0], sizes[-8:], trainer.state.global_step) == (8, [2] * 8, 8)
    assert run.facts.setup.optimizer is unwrapped(trainer.optimizer)
    assert taps(trainer) == []
    assert run.ok
