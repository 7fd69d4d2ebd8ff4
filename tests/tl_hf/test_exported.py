"""What callbacks export with state() must come back, whether or not training shows an effect of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from tl_hf import check_hf_resume_equivalent

RESTORED = {"restore_callback_states_from_checkpoint": True}
NOT_LOOKED_AT = (
    "  cause: the checkpoint holds what state() of the callback returns, and the resumed Trainer does not look at it\n"
    "  fix: set restore_callback_states_from_checkpoint=True in TrainingArguments"
)


class Lists(TrainerCallback, ExportableState):
    """An average of the weights as plain lists, and the number of updates."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.shadow: Any = None
        self.seen = 0

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen += 1
        now = model.lm_head.weight.detach().double().numpy()
        self.shadow = (now if self.shadow is None else self.decay * self.as_read() + (1 - self.decay) * now).tolist()

    def as_read(self):
        import numpy

        return numpy.array(self.shadow)

    def state(self) -> dict[str, Any]:
        return {"args": {"decay": self.decay}, "attributes": {"shadow": self.shadow, "seen": self.seen}}


class Arrays(Lists):
    """The same in an array that state() makes a list of; the class does not make an array of it again."""

    def state(self):
        return {"args": {"decay": self.decay}, "attributes": {"shadow": self.shadow, "count": self.seen}}


class Average(TrainerCallback, ExportableState):
    """Averages in tensors, which are set as the lists that they were saved as."""

    def __init__(self, average: Any = None) -> None:
        self.average: dict[str, Any] = {name: torch.tensor(values) for name, values in (average or {}).items()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            now, average = parameter.detach(), self.average.get(name)
            self.average[name] = average.lerp(now, 0.1) if isinstance(average, torch.Tensor) else now.clone()

    def listed(self) -> dict[str, Any]:
        return {"average": {name: torch.as_tensor(tensor).tolist() for name, tensor in self.average.items()}}

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": self.listed()}


class RaisingAverage(Average):
    """Takes what was set for tensors."""

    def listed(self):
        return {"average": {name: tensor.tolist() for name, tensor in self.average.items()}}


class MadeAverage(Average):
    """The same, as is advised: __init__ makes tensors of the lists."""

    def state(self):
        return {"args": self.listed(), "attributes": {}}


def check(hf: Any, callback: Any, **arguments: Any) -> Any:
    allow = arguments.pop("allow", ())
    return check_hf_resume_equivalent(
        lambda: hf.trainer(callbacks=[callback()], eval_dataset=hf.tokens(8), **arguments), allow=allow
    )


def test_a_state_that_is_exported_and_not_looked_at(hf):
    """It is a finding: who wrote state() said that it must come back."""
    report = check(hf, Lists)
    assert list(map(str, report.findings)) == [
        "[attribute-not-restored] callback Lists: shadow another one after resuming; seen 4 when saved, 0 after "
        f"resuming\n{NOT_LOOKED_AT}"
    ]
    assert report.notes == ()


def test_a_state_that_comes_back_passes(hf):
    """The near miss."""
    assert str(check(hf, Lists, **RESTORED)) == "Resume equivalence: passed"


def test_a_state_that_the_class_does_not_restore(hf):
    """An entry under a name that is no attribute of the class."""
    assert list(map(str, check(hf, Arrays, **RESTORED).findings)) == [
        "[attribute-not-restored] callback Arrays: count 4 when saved, 0 after resuming\n"
        "  cause: its class does not restore from state() what it returns there\n"
        '  fix: have state() return it under "args" (what __init__ takes) or "attributes" (what is set afterwards)'
    ]


PLAINLY = (
    'have state() return it as plain data: under "attributes" what is set as it is, and under "args" what __init__ '
    "takes and makes something of (a tensor, which tolist() makes a list of, comes back as that list)"
)


AS_LISTS = "; ".join(
    f"callback Average.average['model.{layer}.weight'] a float32 tensor of shape ({rows}, 16) when saved, a list of "
    f"{rows} items after loading"
    for layer, rows in (("embed_tokens", 32), *((f"layers.0.self_attn.{kind}_proj", 16) for kind in "qkv"))
)


def test_a_tensor_is_made_by_init(hf):
    """Under "attributes" it comes back as a list, and the remedy that is told for that is one."""
    assert list(map(str, check(hf, Average, **RESTORED).findings)) == [
        f"[attribute-not-restored] {AS_LISTS}; and 17 more; still different at the end of the run\n"
        "  cause: state() of the callback does not return it, or its class does not restore it from that\n"
        f"  fix: {PLAINLY}"
    ]
    assert str(check(hf, MadeAverage, **RESTORED)) == "Resume equivalence: passed"


def test_a_state_that_raises_once_it_was_restored(hf):
    """The next checkpoint could not be written: the error says what was restored, and how else it is."""
    with pytest.raises(AttributeError, match="'list' object has no attribute 'tolist'") as caught:
        check(hf, RaisingAverage, **RESTORED)
    assert caught.value.__notes__ == [
        "raised in state() of callback RaisingAverage",
        f"raised with what was restored: {PLAINLY}",
        "raised in load(), with a fresh setup",
    ]


def test_it_may_be_allowed(hf):
    """By the rule's id."""
    assert check(hf, Lists, allow=["attribute-not-restored"]).ok


EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "metric_for_best_model": "loss",
    "load_best_model_at_end": True,
}


@pytest.mark.parametrize("restored", [True, False])
def test_the_patience_of_early_stopping(hf, restored):
    """transformers' own callback is noted, with what restores it."""
    report = check(
        hf,
        lambda: EarlyStoppingCallback(20, 100.0),
        restore_callback_states_from_checkpoint=restored,
        **EVALUATED,
    )
    assert report.ok
    assert list(map(str, report.notes)) == (
        []
        if restored
        else [
            "[unsaved-attribute] callback EarlyStoppingCallback: early_stopping_patience_counter 3 when saved, 0 after "
            f"resuming\n{NOT_LOOKED_AT}"
        ]
    )
