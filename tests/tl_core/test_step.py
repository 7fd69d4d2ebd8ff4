from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tl_core import TrainingSetup, choose_step, standard_step


def loss_fn(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def data(count, size=4):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator)) for _ in range(count)
    ]


def make(lr=0.1, **kwargs):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=lr), **kwargs)


def train(setup, step, batches):
    returned = []
    for index, batch in enumerate(batches):
        setup.step_index = index
        returned.append(step(setup, batch))
    return returned


def weights(setup):
    return torch.cat([p.detach().flatten() for p in setup.model.parameters()])


def test_a_step_is_a_plain_training_step():
    """Forward, backward, update, zeroed gradients: the same as by hand, and the loss is returned detached."""
    setup, by_hand = make(), make()
    (returned,) = train(setup, standard_step(loss_fn), data(1))
    loss = loss_fn(by_hand.model, data(1)[0])
    loss.backward()
    by_hand.optimizer.step()
    assert torch.equal(weights(setup), weights(by_hand))
    assert torch.equal(returned, loss.detach())
    assert not returned.requires_grad
    assert all(p.grad is None for p in setup.model.parameters())


def test_micro_batches_make_one_update():
    """Four micro-batches update once, by the mean of their gradients, and return their own undivided losses."""
    setup, full = make(), make()
    micro = data(4)
    returned = train(setup, standard_step(loss_fn, accumulation_steps=4), micro)
    train(full, standard_step(loss_fn), [tuple(torch.cat(parts) for parts in zip(*micro, strict=True))])
    assert torch.allclose(weights(setup), weights(full), atol=1e-6)
    assert torch.equal(returned[0], loss_fn(make().model, micro[0]).detach())


def test_the_cycle_follows_the_step_index():
    """A run that goes on in the middle of a cycle ends it where the uninterrupted one does."""
    setup = make()
    before = weights(setup)
    step = standard_step(loss_fn, accumulation_steps=4)
    setup.step_index = 2
    step(setup, data(1)[0])
    assert torch.equal(weights(setup), before)
    setup.step_index = 3
    step(setup, data(1)[0])
    assert not torch.equal(weights(setup), before)


def test_gradients_are_clipped_over_all_optimizers():
    """One norm is taken over the parameters of all optimizers together."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    setup = TrainingSetup(model, [torch.optim.SGD([model.weight], lr=1.0), torch.optim.SGD([model.bias], lr=1.0)])
    before = weights(setup)
    train(setup, standard_step(loss_fn, max_grad_norm=0.01), data(1))
    assert float((weights(setup) - before).norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_scaler_is_driven():
    """Scaled backward, unscaled before clipping, stepped and updated: the update is that without a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    setup, plain = make(scaler=scaler), make()
    train(setup, standard_step(loss_fn, max_grad_norm=0.01, accumulation_steps=2), data(4))
    train(plain, standard_step(loss_fn, max_grad_norm=0.01, accumulation_steps=2), data(4))
    assert torch.allclose(weights(setup), weights(plain), atol=1e-7)
    assert scaler.get_scale() == 128.0


def test_a_skipped_update_does_not_step_the_schedule():
    """After an overflow the scaler skips the update; the scheduler waits for the next one."""
    setup = make(scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    setup.schedulers["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.5)
    before = weights(setup)
    step = standard_step(lambda model, batch: loss_fn(model, batch[:2]) * batch[2])
    train(setup, step, [(*data(1)[0], float("inf"))])
    assert torch.equal(weights(setup), before)
    assert setup.scheduler.last_epoch == 0
    train(setup, step, [(*data(1)[0], 1.0)])
    assert setup.scheduler.last_epoch == 1


def test_schedulers_step_once_an_update():
    """Every scheduler steps at a cycle's end, ReduceLROnPlateau with the loss."""
    setup = make()
    setup.schedulers = {
        "decay": torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.5),
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(setup.optimizer),
    }
    returned = train(setup, standard_step(loss_fn, accumulation_steps=2), data(4))
    assert setup.schedulers["decay"].last_epoch == 2
    assert setup.schedulers["plateau"].best == min(float(returned[1]), float(returned[3]))


def test_named_losses_stay_named():
    """Of a dict, `loss` is trained, and all of them are returned detached."""
    setup, plain = make(), make()
    step = standard_step(lambda model, batch: {"aux": loss_fn(model, batch) * 9, "loss": loss_fn(model, batch), "n": 4})
    (returned,) = train(setup, step, data(1))
    train(plain, standard_step(loss_fn), data(1))
    assert torch.equal(weights(setup), weights(plain))
    assert list(returned) == ["aux", "loss", "n"]
    assert not returned["aux"].requires_grad


def test_the_batch_is_not_modified():
    """What was handed in is as it was."""
    batches = data(1)
    before = copy.deepcopy(batches)
    train(make(), standard_step(loss_fn), batches)
    assert all(torch.equal(a, b) for a, b in zip(batches[0], before[0], strict=True))


HINT = "return the tensor that the model's output was turned into, without detach() or item()"


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (
            lambda model, batch: None,
            TypeError,
            "loss_fn() returned None at step 0; "
            "return the loss: a real tensor with one element, a number, or a dict of named ones",
        ),
        (
            lambda model, batch: loss_fn(model, batch).detach(),
            ValueError,
            f"the loss that loss_fn() returned at step 0 is detached from the model: {HINT}",
        ),
        (
            lambda model, batch: {"loss": loss_fn(model, batch).item()},
            ValueError,
            f"the loss that loss_fn() returned at step 0 is a float: {HINT}",
        ),
    ],
    ids=["nothing", "detached", "float"],
)
def test_a_loss_that_cannot_be_trained_is_an_error(bad, error, message):
    """The error names loss_fn, the step and what to return."""
    with pytest.raises(error) as caught:
        train(make(), standard_step(bad), data(1))
    assert str(caught.value) == message


def test_lbfgs_is_refused():
    """An optimizer whose step needs a closure needs a step of the person's own."""
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError) as caught:
        train(TrainingSetup(model, torch.optim.LBFGS(model.parameters())), standard_step(loss_fn), data(1))
    assert str(caught.value) == (
        "standard_step cannot drive LBFGS, whose step needs a closure: pass a step of your own"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss_fn": None}, TypeError, "loss_fn must be a function loss_fn(model, batch), got NoneType"),
        ({"accumulation_steps": 0}, ValueError, "accumulation_steps must be at least 1, got 0"),
        ({"accumulation_steps": 2.0}, TypeError, "accumulation_steps must be an int, got float"),
        ({"accumulation_steps": True}, TypeError, "accumulation_steps must be an int, got bool"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm must be greater than 0, got 0"),
        ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm must be greater than 0, got nan"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm must be a number or None, got str"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    """The error names the argument, what was got and what is allowed."""
    with pytest.raises(error) as caught:
        standard_step(**{"loss_fn": loss_fn, **arguments})
    assert str(caught.value) == message


def test_the_persons_step_or_the_standard_one_is_chosen():
    """A step is returned as it is; a loss function is put into the standard step, which trains."""

    def step(setup, batch): ...

    assert choose_step(step, None) is step
    setup = make()
    before = weights(setup)
    train(setup, choose_step(None, loss_fn), data(1))
    assert not torch.equal(weights(setup), before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (None, None),
            "pass either step or loss_fn, got neither: step(setup, batch) trains, "
            "loss_fn(model, batch) only computes the loss",
        ),
        (
            (loss_fn, loss_fn),
            "pass either step or loss_fn, got both: step(setup, batch) trains, "
            "loss_fn(model, batch) only computes the loss",
        ),
        ((3, None), "step must be a function, got int"),
        ((None, "mse"), "loss_fn must be a function, got str"),
    ],
)
def test_one_of_step_and_loss_fn_must_be_given(given, message):
    """Neither, both and what is no function are refused."""
    with pytest.raises(TypeError) as caught:
        choose_step(*given)
    assert str(caught.value) == message


def test_the_loss_of_a_models_output_is_trained():
    """`loss_fn` may return the whole output of a transformers model: its loss is trained, and returned."""

    class ModelOutput(dict):
        pass

    batches = data(3)
    plain, whole = make(), make()
    losses = train(plain, standard_step(loss_fn), batches)
    returned = train(
        whole,
        standard_step(lambda model, batch: ModelOutput(loss=loss_fn(model, batch), logits=torch.ones(2, 3))),
        batches,
    )
    assert returned == losses
    assert torch.equal(weights(whole), weights(plain))
