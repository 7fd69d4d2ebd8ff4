"""A fit that is fed, or watched, is the fit: the same hooks in the same order, the same weights bit for bit."""

from __future__ import annotations

from functools import wraps

import pytest
import torch

from tl_core import seed_everything
from tl_lightning import from_lightning, watch_lightning

EPOCHS, LENGTH = 2, 4


class Loader:
    """A loader that draws no random numbers, as the check's data do not: torch's draws a seed for each epoch."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=1e-2)


def logging_step(self, batch, batch_idx):
    loss = self.loss(batch)
    self.log("loss", loss)
    return loss


def scheduled(make, **config):
    """Return a ``configure_optimizers`` with a scheduler."""

    def configure_optimizers(self):
        optimizer = adam(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

    return {"configure_optimizers": configure_optimizers, "training_step": logging_step}


def two_schedulers(self):
    optimizer = adam(self)
    step = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return [optimizer], [{"scheduler": step, "interval": "step"}, {"scheduler": epoch, "interval": "epoch"}]


def two_optimizers(self):
    body = torch.optim.Adam(self.net[0].parameters(), lr=1e-2)
    head = torch.optim.SGD(self.net[3].parameters(), lr=1e-2)
    return [body, head], [torch.optim.lr_scheduler.StepLR(body, 2)]


def manual_init(self):
    self.automatic_optimization = False


def manual_step(self, batch, batch_idx):
    body, head = self.optimizers()
    for optimizer in (body, head):
        self.toggle_optimizer(optimizer)
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
    self.lr_schedulers().step()
    return loss


def lbfgs(self):
    return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


MANUAL = {"configure_optimizers": two_optimizers, "training_step": manual_step, "configure_model": manual_init}
step_lr, plateau = torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.ReduceLROnPlateau
# name: (methods of the module, arguments of the Trainer)
LOOPS = {
    "usual": ({}, {}),
    "accumulation with an incomplete last group": ({}, {"accumulate_grad_batches": 3}),
    "clipped norm": ({}, {"gradient_clip_val": 0.1}),
    "clipped values": ({}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    "scheduler once a step": (scheduled(lambda o: step_lr(o, 2), interval="step"), {}),
    "scheduler once a step, accumulation": (
        scheduled(lambda o: step_lr(o, 1), interval="step"),
        {"accumulate_grad_batches": 2},
    ),
    "scheduler every second step": (scheduled(lambda o: step_lr(o, 1), interval="step", frequency=2), {}),
    "scheduler once an epoch": (scheduled(lambda o: step_lr(o, 1)), {}),
    "plateau once an epoch": (scheduled(lambda o: plateau(o, patience=0), monitor="loss"), {}),
    "plateau once a step": (scheduled(lambda o: plateau(o, patience=0), monitor="loss", interval="step"), {}),
    "two schedulers": ({"configure_optimizers": two_schedulers}, {}),
    "manual optimization": (MANUAL, {}),
    "LBFGS": ({"configure_optimizers": lbfgs}, {}),
    "bfloat16": ({}, {"precision": "bf16-mixed"}),
}

MODULE_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "configure_optimizers",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "training_step",
    "transfer_batch_to_device",
)


def hooks_of(cls):
    return [name for name in dir(cls) if name.startswith("on_") and callable(getattr(cls, name))]


def recorded(cls, names, log, prefix):
    """Derive a class whose hooks write their names down."""
    derived = type(cls.__name__, (cls,), {})

    def hook(name, method):
        @wraps(method)
        def write(self, *args, **kwargs):
            log.append(f"{prefix}.{name}")
            return method(self, *args, **kwargs)

        return write

    for name in names:
        setattr(derived, name, hook(name, getattr(cls, name)))
    return derived


@pytest.fixture
def recording(pl, make_class):
    """Make a module and a callback that write down each hook, and the weights after each batch."""

    def make(methods):
        log, weights = [], []
        cls = make_class(pl, dropout=0.2, **methods)
        names = [*hooks_of(pl.LightningModule), *MODULE_HOOKS, "setup", "teardown"]
        module = recorded(cls, names, log, "module")

        class Weights(pl.Callback):
            def on_train_batch_end(self, trainer, module, *rest):
                weights.append({name: value.clone() for name, value in module.state_dict().items()})

        callback = recorded(Weights, [*hooks_of(pl.Callback), "setup", "teardown"], log, "callback")
        return module, callback, log, weights

    return make


def fit(pl, recording, make_trainer, batches, name, watch=None):
    methods, arguments = LOOPS[name]
    module, callback, log, weights = recording(methods)
    seed_everything(0)
    built = module()
    trainer = make_trainer(pl, callbacks=[callback()], max_epochs=EPOCHS + 1, **arguments)
    if watch is None:
        trainer.fit(built, Loader(batches))
    else:
        with watch(trainer) as run:
            trainer.fit(built, Loader(batches))
        assert len(run.records) == len(weights)
    return log, weights, torch.get_rng_state()


def assert_same_weights(some, others):
    for one, other in zip(some, others, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in other)


@pytest.mark.parametrize("name", LOOPS)
def test_a_fed_fit_is_the_fit(pl, recording, make_trainer, batches, name):
    """Batches that are handed in get the hooks that a plain fit calls, in its order, and the same weights."""
    expected, expected_weights, _ = fit(pl, recording, make_trainer, batches, name)
    methods, arguments = LOOPS[name]
    module, callback, log, weights = recording(methods)
    seed_everything(0)
    make_setup, step = from_lightning(
        module,
        epoch_length=LENGTH,
        trainer_kwargs={"callbacks": [callback()], "max_epochs": EPOCHS + 1, **arguments},
    )
    setup = make_setup()
    for index in range(EPOCHS * LENGTH):
        step(setup, batches[index % LENGTH])
    assert log.count("module.training_step") >= EPOCHS * LENGTH
    assert log == expected[: len(log)]
    assert expected[len(log)] == "module.on_before_batch_transfer"  # of the batch that it waits for
    assert_same_weights(weights, expected_weights[: EPOCHS * LENGTH])


@pytest.mark.parametrize("name", LOOPS)
def test_a_watched_fit_is_the_fit(pl, recording, make_trainer, batches, name):
    """Watching changes nothing: hooks, weights after each batch, and the random state at the end are the same."""
    log, weights, state = fit(pl, recording, make_trainer, batches, name, watch=watch_lightning)
    expected, expected_weights, expected_state = fit(pl, recording, make_trainer, batches, name)
    assert log == expected
    assert log[-1] == "module.teardown"
    assert_same_weights(weights, expected_weights)
    assert torch.equal(state, expected_state)


def test_the_comparison_sees_another_order(pl, recording, make_trainer, batches):
    """The tests above can fail: with another accumulation, hooks and weights differ."""
    plain = fit(pl, recording, make_trainer, batches, "usual")
    accumulated = fit(pl, recording, make_trainer, batches, "accumulation with an incomplete last group")
    assert plain[0] != accumulated[0]
    with pytest.raises(AssertionError):
        assert_same_weights(plain[1], accumulated[1])
