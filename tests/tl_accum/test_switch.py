"""Dropout is off while steps run, however it is written, and nothing of that stays behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tl_accum import check_accumulation_equivalent
from tl_accum._switch import Met, switched
from tl_core import TrainingSetup
from tl_telemetry import observe

Form = Callable[[Tensor], Tensor]
HALF = 0.5


class Drop(torch.autograd.Function):
    """A function of one's own whose forward pass drops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.dropout(x, HALF)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Residual(nn.Module):
    """A module of one's own, which is told to drop by an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drops = True

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(x, HALF, self.drops)


def packed(kind: type[nn.RNNBase]) -> Form:
    rnn = kind(8, 8, 2, dropout=HALF, batch_first=True)

    def run(x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        return rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data

    return run


def attention(**options: Any) -> Form:
    module = nn.MultiheadAttention(8, 2, dropout=HALF, batch_first=True)
    return lambda x: module(x, x, x, **options)[0]


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Form:
    rnn = kind(8, 8, 2, dropout=HALF, batch_first=True, **options)
    return lambda x: rnn(x)[0]


def decoder(module: nn.Module) -> Form:
    return lambda x: module(x, x)


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=HALF, batch_first=True)


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, HALF) * x.tanh()


FORMS: dict[str, Callable[[], Form]] = {
    "Dropout": lambda: nn.Dropout(HALF),
    "Dropout in place": lambda: lambda x: nn.Dropout(HALF, inplace=True)(x * 1),
    "Dropout1d": lambda: nn.Dropout1d(HALF),
    "Dropout2d": lambda: lambda x: nn.Dropout2d(HALF)(x[..., None]),
    "Dropout3d": lambda: lambda x: nn.Dropout3d(HALF)(x[..., None, None]),
    "AlphaDropout": lambda: nn.AlphaDropout(HALF),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(HALF),
    "RReLU": lambda: nn.RReLU(),
    "dropout by default": lambda: F.dropout,
    "dropout by position": lambda: lambda x: F.dropout(x * 1, HALF, True, True),
    "dropout by keyword": lambda: lambda x: F.dropout(input=x, p=HALF, training=True, inplace=False),
    "dropout1d": lambda: lambda x: F.dropout1d(x, HALF),
    "dropout2d": lambda: lambda x: F.dropout2d(x[..., None], HALF),
    "dropout3d": lambda: lambda x: F.dropout3d(x[..., None, None], HALF),
    "alpha_dropout": lambda: lambda x: F.alpha_dropout(x, HALF, True),
    "feature_alpha_dropout": lambda: lambda x: F.feature_alpha_dropout(x, HALF, training=True),
    "rrelu": lambda: lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda: lambda x: F.rrelu_(x * 1, 0.1, 0.3, True),
    "torch.rrelu": lambda: lambda x: torch.rrelu(x, training=True),
    "torch.dropout": lambda: lambda x: torch.dropout(x, HALF, True),
    "torch.dropout by keyword": lambda: lambda x: torch.dropout(x, p=HALF, train=True),
    "torch.dropout_": lambda: lambda x: torch.dropout_(x * 1, HALF, True),
    "torch.native_dropout": lambda: lambda x: torch.native_dropout(x, HALF, True)[0],
    "torch.feature_dropout": lambda: lambda x: torch.feature_dropout(x, HALF, True),
    "an operator": lambda: lambda x: torch.ops.aten.dropout.default(x, HALF, True),
    "an operator's packet": lambda: lambda x: torch.ops.aten.dropout(x, HALF, True),
    "attention by keyword": lambda: lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=HALF),
    "attention by position": lambda: lambda x: F.scaled_dot_product_attention(x, x, x, None, HALF, True, scale=0.1),
    "MultiheadAttention": attention,
    "MultiheadAttention, fast": lambda: attention(need_weights=False),
    "TransformerEncoder": lambda: nn.TransformerEncoder(layer(), 2),
    "TransformerDecoderLayer": lambda: decoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=HALF, batch_first=True)),
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU, bidirectional=True),
    "RNN, tanh": lambda: recurrent(nn.RNN),
    "RNN, relu": lambda: recurrent(nn.RNN, nonlinearity="relu", bias=False),
    "packed LSTM": lambda: packed(nn.LSTM),
    "packed GRU": lambda: packed(nn.GRU),
    "packed RNN": lambda: packed(nn.RNN),
    "reentrant checkpoint": lambda: lambda x: checkpoint(dropped, x, use_reentrant=True, preserve_rng_state=False),
    "checkpoint": lambda: lambda x: checkpoint(dropped, x, use_reentrant=False, preserve_rng_state=False),
    "a module of one's own": Residual,
    "an autograd function of one's own": lambda: Drop.apply,
    "a compiled module": lambda: torch.compile(layer(), backend="eager"),
    "a compiled function": lambda: torch.compile(dropped, backend="eager"),
}


def draws(form: Form, *, no_dropout: bool) -> bool:
    """Tell whether a forward and a backward pass draw random numbers."""
    x = torch.randn(2, 3, 8, requires_grad=True)
    before = torch.get_rng_state()
    with switched(Met(), no_dropout=no_dropout) as switch, switch:
        form(x).sum().backward()
    return not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", FORMS)
def test_no_form_of_dropout_draws_while_it_is_off(name: str) -> None:
    """Neither the forward nor the backward pass draws."""
    assert not draws(FORMS[name](), no_dropout=True)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_dropout_draws_where_it_is_left_on(name: str) -> None:
    """disable_dropout=False leaves dropout as it is: so the test above would see one that is not switched off."""
    assert draws(FORMS[name](), no_dropout=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_again_does_not_drop_either(reentrant: bool) -> None:
    """The second forward pass, within backward, sees what the first one saw."""
    passes = []

    def run(x: Tensor) -> Tensor:
        passes.append(F.dropout(x, 0.9).detach().clone())
        return F.dropout(x, 0.9) * x

    draws(lambda x: checkpoint(run, x, use_reentrant=reentrant, preserve_rng_state=False), no_dropout=True)
    first, second = passes
    assert torch.equal(first, second)
    assert bool(first.all())


def test_hooks_that_run_in_backward_do_not_drop() -> None:
    """A gradient hook runs within backward(), where a function mode would be off by itself."""

    def run(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda gradient: F.dropout(gradient, HALF))
        return y

    assert not draws(run, no_dropout=True)
    assert draws(run, no_dropout=False)


class TwoDropouts(nn.Module):
    """Two dropouts draw different masks for a batch and for its micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.drop(self.first(x)).relu(), 0.2, self.training))


def make_setup() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = TwoDropouts()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_a_loop_with_dropout_passes_and_is_noisy_where_dropout_stays() -> None:
    """With disable_dropout=False the loop's own noise is measured and said."""
    batch = torch.randn(64, 4)
    assert str(check_accumulation_equivalent(make_setup, batch, loss_fn=loss_fn)) == "Gradient accumulation: passed"
    report = check_accumulation_equivalent(make_setup, batch, loss_fn=loss_fn, disable_dropout=False)
    assert report.noise > 0.01
    assert report.findings == ()
    assert {note.rule for note in report.notes} <= {"noise", "not-judged"}
    assert "since the step draws random numbers" in report.notes[0].seen


def state_of(model: nn.Module) -> set[tuple[bool, int, int]]:
    return {(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()}


def test_modes_and_hooks_of_modules_stay_as_they_are() -> None:
    """The step sees its modules in training mode, without hooks of the check's; nothing stays behind."""
    seen: SimpleQueue[Any] = SimpleQueue()  # a list would be set back with what lies outside of the setup

    def looking(model: nn.Module, batch: Tensor) -> Tensor:
        seen.put((model, state_of(model)))
        return loss_fn(model, batch)

    assert check_accumulation_equivalent(make_setup, torch.randn(8, 4), loss_fn=looking).ok
    assert seen.qsize() == 10
    while not seen.empty():
        model, inside = seen.get()
        assert inside == state_of(model) == {(True, 0, 0)}


def norm_setup(norm: Callable[[], nn.Module]) -> Callable[[], Any]:
    def build() -> Any:
        model = nn.Sequential(nn.Linear(4, 6), norm(), nn.Linear(6, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    return build


class FunctionalNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize(
    ("norm", "layers"),
    [
        (lambda: nn.BatchNorm1d(6), "the layer '1'"),
        (lambda: nn.BatchNorm1d(6, momentum=None), "the layer '1'"),
        (lambda: nn.BatchNorm1d(6, track_running_stats=False), "the layer '1'"),
        (FunctionalNorm, "batch_norm()"),
    ],
    ids=["BatchNorm1d", "cumulative average", "without running statistics", "a function"],
)
def test_every_form_of_batch_statistics_is_fixed(norm: Callable[[], nn.Module], layers: str) -> None:
    """With fixed statistics nothing else differs, which the report says; and the modules are as they were."""
    seen: SimpleQueue[Any] = SimpleQueue()

    def looking(model: nn.Module, batch: Tensor) -> Tensor:
        seen.put((model, state_of(model)))
        return loss_fn(model, batch)

    report = check_accumulation_equivalent(norm_setup(norm), torch.randn(16, 4), loss_fn=looking)
    assert (report.findings, report.judged) == ((), False)
    assert [note.rule for note in report.notes] == ["not-judged"]
    assert layers in report.notes[0].seen
    found = [seen.get() for _ in range(seen.qsize())]
    # with hooks while they are held in eval mode, for those that are modules
    assert ((True, 1, 1) in set().union(*(inside for _, inside in found))) == ("'1'" in layers)
    assert all(state_of(model) == {(True, 0, 0)} for model, _ in found)


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(6), FunctionalNorm], ids=["BatchNorm1d", "a function"])
def test_a_mistake_beside_batch_statistics_is_found(norm: Callable[[], nn.Module]) -> None:
    """What still differs with fixed statistics is a finding."""

    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = loss_fn(setup.model, batch)
            loss.backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    report = check_accumulation_equivalent(norm_setup(norm), torch.randn(16, 4), make_step)
    assert [finding.rule for finding in report.findings] == ["loss-not-divided"]


def test_frozen_modules_are_put_back_when_the_forward_raises() -> None:
    """A module that runs in eval mode is in training mode again after an exception in its forward."""

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(f"training={self.training}")

    module = Raises()
    with (
        pytest.raises(RuntimeError, match=r"^training=False$"),
        switched(Met(), no_dropout=True, frozen=(module,)) as switch,
        switch,
    ):
        module(torch.ones(1))
    assert module.training
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def entries() -> tuple[Any, Any, int]:
    stance = torch._dynamo.eval_frame._stance.stance
    return torch.autograd._engine_run_backward, stance, len(torch.overrides._get_current_function_mode_stack())


def test_what_is_replaced_is_put_back() -> None:
    """The autograd engine's entry, the compiler's stance and the function modes: after success and after an error."""
    before = entries()
    with switched(Met(), no_dropout=True) as switch, switch:
        assert all(a != b for a, b in zip(entries(), before, strict=True))  # so that this test can fail
    assert entries() == before
    with pytest.raises(ZeroDivisionError), switched(Met(), no_dropout=True) as switch, switch:
        raise ZeroDivisionError
    assert entries() == before


def test_an_error_of_the_loop_leaves_nothing_behind() -> None:
    """An exception in the middle of a run puts everything back too."""
    before = entries()

    def broken(model: nn.Module, batch: Tensor) -> Tensor:
        raise RuntimeError("no loss today")

    with pytest.raises(RuntimeError, match=r"^no loss today\n"):  # the notes follow
        check_accumulation_equivalent(make_setup, torch.randn(8, 4), loss_fn=broken)
    assert entries() == before


def test_an_observer_around_the_check_goes_on() -> None:
    """Within another observe the check puts back that one's entry, and the observer still sees backward passes."""
    model = nn.Linear(4, 1)
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = entries()
    with observe(setup) as run:
        inside = entries()
        assert check_accumulation_equivalent(make_setup, torch.randn(8, 4), loss_fn=loss_fn).ok
        assert entries() == inside
        with run.step():
            model(torch.ones(2, 4)).mean().backward()
            setup.optimizer.step()
    assert entries() == before
    assert [event.kind for event in run.records[-1].events][:2] == ["backward", "optimizer_step"]


def test_threads_leave_in_any_order() -> None:
    """The one that came first may leave first: what was there before is there again in the end."""
    before = entries()
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with switched(Met(), no_dropout=True):
            first_in.set()
            second_in.wait(30)
        first_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_in.wait(30)
    with switched(Met(), no_dropout=True) as switch:
        second_in.set()
        assert first_out.wait(30)
        drew = []
        x = torch.randn(4, 8, requires_grad=True)
        state = torch.get_rng_state()
        with switch:
            checkpoint(dropped, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
        drew.append(not torch.equal(torch.get_rng_state(), state))
    thread.join(30)
    assert drew == [False]
    assert entries() == before


def test_another_threads_dropout_stays() -> None:
    """A thread that runs no check keeps its dropout, in what checkpointing computes again too."""
    results = []

    def other() -> None:
        x = torch.ones(64, requires_grad=True)
        checkpoint(lambda y: F.dropout(y, HALF) * y, x, use_reentrant=False).sum().backward()
        results.append(x.grad)

    with switched(Met(), no_dropout=True) as switch, switch:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
    (gradient,) = results
    assert 0 < int((gradient == 0).sum()) < 64
