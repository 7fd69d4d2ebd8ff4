"""The pytest plugin: options, fixtures, and what is reported of verdicts.

pytest loads this module in every run of an environment that has tl-pytest, so it imports neither torch nor a package
that imports torch: the fixtures do, when a test asks for them.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tl_pytest import _markers, _options, _parametrize, _reporter, _settings

if TYPE_CHECKING:
    import torch

    from tl_pytest._runner import TrainingRunner

_SETTINGS = pytest.StashKey[_settings.Settings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the group "tl" with its options, and their twins in the configuration file."""
    _options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Validate the settings before anything is collected, and register the markers and what reports verdicts."""
    config.addinivalue_line("markers", _markers.TOLERANCE)
    settings = config.stash[_SETTINGS] = _settings.resolve(config)
    config.pluginmanager.register(_reporter.Reporter(settings), "tl-reporter")
    for name in ("report", "sarif"):  # pytest-xdist hands options to workers, which may run in another folder
        path = getattr(settings, name)
        setattr(config.option, f"tl_{name}", None if path is None else str(path))


def pytest_report_header(config: pytest.Config) -> str:
    """Show what the fixtures are bound to."""
    torch = sys.modules.get("torch")
    version: str | None = getattr(torch, "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            version = None
    return config.stash[_SETTINGS].header(None if version is None else str(version))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let tests that use a device run once on each, where there are several; only ``auto`` has to ask torch."""
    settings = metafunc.config.stash[_SETTINGS]
    if settings.several_devices and _parametrize.takes_devices(metafunc, _torch_device):
        metafunc.parametrize(_parametrize.FIXTURE, _device_names(settings), indirect=True)


def _device_names(settings: _settings.Settings) -> tuple[str, ...]:
    if _settings.AUTO not in settings.devices:
        return settings.devices
    from tl_pytest._device import available_devices

    return available_devices()


@pytest.fixture
def _tl_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch as --tl-deterministic and --tl-num-threads want it, for tests that use a fixture of tl-pytest."""
    from tl_pytest._torch_state import torch_settings

    settings = request.config.stash[_SETTINGS]
    with torch_settings(deterministic=settings.deterministic, num_threads=settings.num_threads):
        yield


def _torch_device(request: pytest.FixtureRequest, _tl_torch: None) -> torch.device:
    """The device that tests train on, a torch.device: --tl-device, else tl_device of the configuration file, else cpu.

    Where --tl-device names several, a test runs once on each; ``auto`` stands for the CPU, and the accelerator where
    there is one. A device that was asked for by name and is not there is an error, not a skip, so that a run meant for
    an accelerator cannot pass without one.

    Example::

        def test_forward(torch_device):
            model = make_model().to(torch_device)
            assert model(torch.ones(2, 4, device=torch_device)).shape == (2, 1)

    A test may name devices of its own: ``@pytest.mark.parametrize("torch_device", ["cpu", "cuda"], indirect=True)``.
    """
    from tl_pytest._device import find_device

    settings = request.config.stash[_SETTINGS]
    name = getattr(request, "param", None)
    if name is None:  # one device, or asked for by request.getfixturevalue, which cannot run a test twice
        return find_device(_device_names(settings)[0], settings.device_source)
    given = settings.several_devices and name in _device_names(settings)
    return find_device(name, settings.device_source if given else f"torch_device of {request.node.nodeid}")


torch_device = pytest.fixture(name="torch_device")(_torch_device)


@pytest.fixture
def torch_seed(request: pytest.FixtureRequest, _tl_torch: None) -> Iterator[int]:
    """The seed, an int, with which all random number generators are seeded before the test and put back after it.

    That is Python's, numpy's, torch's and each accelerator's. The seed is --tl-seed, else tl_seed of the configuration
    file, else 0. Fixtures that a test lists before this one run unseeded.

    Example::

        def test_noise(torch_seed):
            noise = torch.randn(3)  # the same in each run
            assert torch.equal(noise, torch.randn(3, generator=torch.Generator().manual_seed(torch_seed)))
    """
    from tl_core import preserve_rng, seed_everything

    seed = request.config.stash[_SETTINGS].seed
    with preserve_rng():
        seed_everything(seed)
        yield seed


@pytest.fixture
def training_runner(request: pytest.FixtureRequest, torch_device: torch.device, torch_seed: int) -> TrainingRunner:
    """Runs training loops on the test's device with the test's seed: a tl_pytest.TrainingRunner.

    Example::

        def test_training(training_runner):
            run = training_runner.run(make_setup, make_loader(), train_step, steps=20)
            run.assert_healthy(max_grad_norm=10.0)

        def test_resume(training_runner):
            training_runner.assert_resume_equivalent(make_setup, make_loader(), train_step, save=save, load=load)
    """
    from tl_pytest._common import Common
    from tl_pytest._runner import TrainingRunner

    settings = request.config.stash[_SETTINGS]
    common = Common(
        (*_markers.tolerances_of(request.node), *settings.tolerances),
        settings.allow,
        _reporter.log_of(request.node).keep,
    )
    return TrainingRunner(torch_device, torch_seed, common)


@pytest.fixture
def lightning_trainer(training_runner: TrainingRunner) -> Any:
    """A Lightning Trainer set up for tests: on the test's device, quiet, for 8 updates, without writing files.

    Calling it makes another one with arguments of ``Trainer``: ``lightning_trainer(max_epochs=2)``. Needs tl-lightning:
    ``pip install "tl-pytest[lightning]"``.

    Example::

        def test_fit(lightning_trainer, training_runner):
            with training_runner.watch_lightning(lightning_trainer) as run:
                lightning_trainer.fit(LitClassifier(), make_loader())
            run.assert_healthy()

        def test_resume(lightning_trainer, training_runner):
            def make_fit():
                return lightning_trainer(max_epochs=2), LitClassifier(), make_loader()

            training_runner.assert_lightning_resume_equivalent(make_fit, resume_at=4)  # where an epoch has 4 batches
    """
    from tl_pytest._extras import needed_by_fixture

    with needed_by_fixture("lightning", "lightning_trainer"):
        import tl_lightning
    return tl_lightning.make_lightning_trainer(device=training_runner.device)


@pytest.fixture
def hf_trainer(training_runner: TrainingRunner, tmp_path: Path) -> Callable[..., Any]:
    """Makes Trainers of transformers set up for tests: on the test's device, with its seed, for few steps, quiet.

    ``hf_trainer(model, train_dataset, eval_dataset=None, *, trainer_class=Trainer, **overrides)`` takes datasets, or
    dicts of tensors, and fields of ``TrainingArguments``; ``output_dir`` is in the test's ``tmp_path``. Needs tl-hf:
    ``pip install "tl-pytest[hf]"``.

    Example::

        def test_train(hf_trainer, training_runner):
            trainer = hf_trainer(make_model(), {"input_ids": ids, "labels": labels}, max_steps=10)
            with training_runner.watch_hf(trainer) as run:
                trainer.train()
            run.assert_healthy()

        def test_resume(hf_trainer, training_runner):
            training_runner.assert_hf_resume_equivalent(lambda: hf_trainer(make_model(), dataset))
    """
    from functools import partial

    from tl_pytest._extras import needed_by_fixture

    with needed_by_fixture("hf", "hf_trainer"):
        import tl_hf  # noqa: F401  asked for now: a test that cannot make a Trainer ends here
    return partial(training_runner.make_hf_trainer, output_dir=tmp_path / "trainer")
