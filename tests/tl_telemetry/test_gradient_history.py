from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import observe
from tl_telemetry._events import BY_HAND

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

HELD = {"first": "abc", "second": "def"}
NAMES = "".join(HELD.values())
REACHES = ("abc", "def", "abcdef", "ad", "f")


@dataclass
class Account:
    """What a reference that is told of every act knows of one parameter's gradient."""

    exists: bool = False
    source: tuple[int, ...] = ()
    used: int = 0
    lost: bool = False
    kept: bool = False
    onto: int = 0
    onto_edited: bool = False

    def fresh(self):
        return bool(self.source) and self.source[-1] > self.used

    def backward(self, number):
        if self.kept:
            self.onto, self.onto_edited = number, False
        elif self.onto_edited:
            self.onto, self.onto_edited = 0, False
        self.exists, self.kept, self.lost = True, False, False
        self.source = (*self.source, number)

    def change(self, source, exists):
        self.lost = self.lost or self.fresh()
        self.exists, self.source, self.kept = exists, source, False

    def clear(self):
        self.change((), exists=False)
        self.onto, self.onto_edited = 0, False

    def assign(self):
        self.change((BY_HAND,), exists=True)
        self.onto, self.onto_edited = 0, False

    def edit(self):
        if self.exists:
            self.change((BY_HAND,), exists=True)
            self.onto_edited = self.onto > 0

    def step(self, number):
        self.used, self.lost, self.kept = number, False, self.exists
        self.onto, self.onto_edited = 0, False


class Reference:
    """Keeps the books of a loop from the acts themselves, with no look at any tensor."""

    def __init__(self):
        self.accounts = {name: Account() for name in NAMES}
        self.number = 0
        self.last_loss = None  # which parameters it reaches, and the last pass from it
        self.events = []

    def backward(self, which, again=False):
        earlier = self.last_loss[1] if again else 0
        self.number += 1
        holding = [n for n, account in self.accounts.items() if again and earlier in account.source]
        leftover = [n for n, account in self.accounts.items() if account.kept]
        for name in which:
            self.accounts[name].backward(self.number)
        self.last_loss = (which, self.number)
        repeats = (earlier, holding) if holding else (None, [])
        self.events.append(("backward", self.number, list(which), leftover, repeats))

    def step(self, optimizer):
        held = {name: self.accounts[name] for name in HELD[optimizer]}
        histories = {name: (a.source, a.used, a.onto) for name, a in held.items() if a.exists}
        self.events.append(("step", optimizer, histories, [name for name, account in held.items() if account.lost]))
        for account in held.values():
            account.step(self.number)


def named(indices):
    return [NAMES[i] for i in indices]


def told(records):
    """Return a run's events in the form of the reference's."""
    told = []
    for event in (event for record in records for event in record.events):
        if event.kind == "backward":
            repeats = (event.repeats, named(event.repeated))
            told.append(("backward", event.number, named(event.filled), named(event.leftover), repeats))
        elif event.kind == "optimizer_step":
            histories = {n: (p.source, p.used, p.onto) for p in event.portions for n in named(p.parameters)}
            told.append(("step", event.optimizer, histories, named(event.lost)))
    return told


ACTS = st.one_of(
    st.tuples(st.just("backward"), st.sampled_from(REACHES)),
    st.tuples(st.sampled_from(("step", "clear", "zero")), st.sampled_from(sorted(HELD))),
    st.tuples(st.sampled_from(("drop", "scale", "assign")), st.sampled_from(NAMES)),
    st.tuples(st.sampled_from(("again", "clip", "schedule", "next")), st.none()),
)


class Loop:
    """Does the acts to a model of six parameters and two optimizers, and tells them to the reference."""

    def __init__(self):
        self.model = nn.Module()
        for name in NAMES:
            self.model.register_parameter(name, nn.Parameter(torch.ones(2)))
        optimizers = {
            name: torch.optim.SGD([getattr(self.model, n) for n in held], lr=0.01) for name, held in HELD.items()
        }
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers["first"], 0.9)
        self.setup = TrainingSetup(self.model, optimizers, scheduler)
        self.reference = Reference()
        self.loss = None
        self.alive = []  # an identity is not used again while its tensor lives

    def act(self, kind, argument):
        books = self.reference
        self.alive += [p.grad for p in self.model.parameters()]
        if kind == "backward":
            self.loss = sum((3 * getattr(self.model, name)).sum() for name in argument)
            self.loss.backward(retain_graph=True)
            books.backward(argument)
        elif kind == "again" and self.loss is not None:
            self.loss.backward(retain_graph=True)
            books.backward(books.last_loss[0], again=True)
        elif kind == "step":
            self.setup.optimizers[argument].step()
            books.step(argument)
        elif kind in ("clear", "zero"):
            self.setup.optimizers[argument].zero_grad(set_to_none=kind == "clear")
            for name in HELD[argument]:
                books.accounts[name].clear() if kind == "clear" else books.accounts[name].edit()
        elif kind in ("drop", "scale", "assign"):
            self.by_hand(kind, getattr(self.model, argument), books.accounts[argument])
        elif kind == "clip":
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        elif kind == "schedule":
            self.setup.scheduler.step()

    def by_hand(self, kind, parameter, account):
        if kind == "drop":
            parameter.grad = None
            account.clear()
        elif kind == "assign":
            parameter.grad = torch.ones(2)
            account.assign()
        elif parameter.grad is not None:
            parameter.grad.mul_(0.5)
            account.edit()


@hypothesis.settings(max_examples=120, deadline=None, database=None, derandomize=True)
@hypothesis.given(st.lists(ACTS, min_size=1, max_size=30))
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_the_history_of_gradients_is_the_one_that_happened(acts):
    """What is read off the gradients between two acts is what a bookkeeper of every act knows."""
    loop = Loop()
    with observe(loop.setup) as run:
        step = run.step()
        step.__enter__()
        for kind, argument in acts:
            if kind == "next":
                step.__exit__(None, None, None)
                step = run.step()
                step.__enter__()
            else:
                loop.act(kind, argument)
        step.__exit__(None, None, None)
    assert told(run.records) == loop.reference.events


def test_the_bookkeeper_would_see_a_wrong_history():
    """An act that the reference is not told of makes the two accounts differ."""
    loop = Loop()
    with observe(loop.setup) as run, run.step():
        loop.act("backward", "ad")
        loop.model.a.grad = None
        loop.act("step", "first")
    assert told(run.records)[-1] == ("step", "first", {}, ["a"])
    assert loop.reference.events[-1] == ("step", "first", {"a": ((1,), 0, 0)}, [])
