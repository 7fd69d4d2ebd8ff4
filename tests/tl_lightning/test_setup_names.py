"""What the parts of a setup are called that a Trainer has built."""

from __future__ import annotations

import pytest
import torch

from tl_lightning import from_lightning, watch_lightning

StepLR = torch.optim.lr_scheduler.StepLR


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def setup_with(pl, make_class, configure_optimizers, *, manual=False, **arguments):
    base = make_class(pl, configure_optimizers=configure_optimizers)

    class Module(base):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = not manual

    return from_lightning(Module, trainer_kwargs=arguments)[0]()


def test_single_ones_are_called_by_their_kind(pl, make_class):
    """One optimizer and one scheduler have the names of every setup."""

    def configure_optimizers(self):
        optimizer = adam(self.parameters())
        return [optimizer], [StepLR(optimizer, 1)]

    setup = setup_with(pl, make_class, configure_optimizers)
    assert (list(setup.optimizers), list(setup.schedulers)) == (["optimizer"], ["scheduler"])


def test_no_scheduler_is_none(one_pl, make_class):
    """A module without schedulers has none in its setup."""
    setup = setup_with(one_pl, make_class, lambda self: adam(self.parameters()))
    assert setup.schedulers == {}


def test_several_are_numbered(pl, make_class):
    """Optimizers and schedulers of a list are numbered, as in a setup of one's own."""

    def configure_optimizers(self):
        optimizers = [adam(self.net[0].parameters()), adam(self.net[3].parameters())]
        return optimizers, [StepLR(optimizer, 1) for optimizer in optimizers]

    setup = setup_with(pl, make_class, configure_optimizers, manual=True)
    assert list(setup.optimizers) == ["optimizer[0]", "optimizer[1]"]
    assert list(setup.schedulers) == ["scheduler[0]", "scheduler[1]"]


def test_schedulers_are_called_as_the_module_calls_them(pl, make_class):
    """A ``name`` in a scheduler's dict is its name; the same name twice is told apart."""

    def configure_optimizers(self):
        optimizer = adam(self.parameters())
        named = [{"scheduler": StepLR(optimizer, 1), "name": name} for name in ("warmup", "decay", "decay", None)]
        return [optimizer], named

    setup = setup_with(pl, make_class, configure_optimizers)
    assert list(setup.schedulers) == ["warmup", "decay", "decay [2]", "scheduler[3]"]
    one = setup_with(
        pl,
        make_class,
        lambda self: {
            "optimizer": (optimizer := adam(self.parameters())),
            "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "name": "decay"},
        },
    )
    assert list(one.schedulers) == ["decay"]


def test_own_callbacks_are_called_by_their_class(pl, make_class):
    """Callbacks of the person's own classes are attributes of the setup; Lightning's are not, and two are numbered."""

    class Average(pl.Callback):
        def on_train_batch_end(self, *given):
            self.seen = True

    class Other(pl.Callback):
        def on_train_start(self, *given):
            self.seen = True

    callbacks = [Average(), pl.callbacks.LambdaCallback(), Other(), Average()]
    setup = setup_with(pl, make_class, lambda self: adam(self.parameters()), callbacks=callbacks)
    names = {name for name, value in vars(setup).items() if isinstance(value, pl.Callback)}
    assert names == {"Average[0]", "Average[1]", "Other"}


def test_a_watched_setup_is_called_the_same(one_pl, make_class, make_trainer, batches):
    """Watching a Trainer of one's own gives the names that a fed fit has."""

    class Average(one_pl.Callback):
        def on_train_batch_end(self, *given):
            self.seen = True

    def configure_optimizers(self):
        optimizer = adam(self.parameters())
        return [optimizer], [{"scheduler": StepLR(optimizer, 1), "name": "decay"}]

    trainer = make_trainer(one_pl, max_steps=2, callbacks=[Average()])
    with watch_lightning(trainer) as run:
        trainer.fit(
            make_class(one_pl, configure_optimizers=configure_optimizers)(),
            torch.utils.data.DataLoader(batches, batch_size=None),
        )
    assert (list(run.setup.optimizers), list(run.setup.schedulers)) == (["optimizer"], ["decay"])
    assert run.setup.Average is trainer.callbacks[0]


@pytest.mark.parametrize("manual", [True, False])
def test_the_driver_is_lightning_where_it_steps(one_pl, make_class, manual):
    """With automatic optimization the Trainer is named as the driver, with manual optimization nobody."""
    setup = setup_with(one_pl, make_class, lambda self: adam(self.parameters()), manual=manual)
    assert setup.driver == ("" if manual else "Lightning")


def test_callbacks_with_decorated_methods_are_the_persons(pl, make_class):
    """Whose code a callback is, its class tells: a decorator of torch's around a method does not make it torch's."""

    class Average(pl.Callback):
        @torch.no_grad()
        def on_train_batch_end(self, *given):
            pass

    setup = setup_with(pl, make_class, lambda self: adam(self.parameters()), callbacks=[Average()])
    assert isinstance(setup.Average, Average)
