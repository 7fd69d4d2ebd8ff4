"""The pytest plugin: options, the header line, fixtures and short tracebacks.

pytest loads this module in every run of an environment that has tl-pytest, so it imports neither torch nor a package
that imports torch: the fixtures do, when a test asks for them.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

from tl_pytest import _settings

if TYPE_CHECKING:
    import torch

    from tl_pytest._runner import TrainingRunner

_SETTINGS = pytest.StashKey[_settings.Settings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the group "tl" with its options, and their twins in the configuration file."""
    group = parser.getgroup("tl", "training-loop checks (tl-pytest)")
    group.addoption(
        "--tl-device",
        dest="tl_device",
        metavar="DEVICE",
        default=None,
        help="Device of the training_runner and torch_device fixtures: cpu, cuda, cuda:1, mps, ..., or auto for the "
        "accelerator where there is one (default: tl_device of the configuration file, else cpu)",
    )
    group.addoption(
        "--tl-seed",
        dest="tl_seed",
        metavar="SEED",
        default=None,
        help="Seed of the training_runner and torch_seed fixtures (default: tl_seed of the configuration file, else 0)",
    )
    parser.addini("tl_device", "Default of --tl-device", type="string", default=None)
    parser.addini("tl_seed", "Default of --tl-seed", type="int", default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Validate the settings before anything is collected."""
    config.stash[_SETTINGS] = _settings.resolve(config)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Show the settings that are not the defaults."""
    return config.stash[_SETTINGS].header()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Cut the frames of the checks from the traceback of what they raise; ``--full-trace`` shows them."""
    if call.excinfo is not None and "tl_core" in sys.modules and not item.config.getoption("fulltrace"):
        from tl_pytest._frames import without_own_frames

        call.excinfo.traceback = type(call.excinfo.traceback)(without_own_frames(call.excinfo))
    return (yield)


@pytest.fixture
def torch_device(request: pytest.FixtureRequest) -> torch.device:
    """The device that tests train on, a torch.device: --tl-device, else tl_device of the configuration file, else cpu.

    With ``auto`` it is the accelerator where there is one, else the CPU. A device that was asked for by name and is not
    there is an error, not a skip, so that a run meant for an accelerator cannot pass without one.
    """
    from tl_pytest._device import find_device

    settings = request.config.stash[_SETTINGS]
    return find_device(settings.device, settings.device_source)


@pytest.fixture
def torch_seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """The seed, an int, with which all random number generators are seeded before the test and put back after it.

    That is Python's, numpy's, torch's and each accelerator's. The seed is --tl-seed, else tl_seed of the configuration
    file, else 0. Fixtures that a test lists before this one run unseeded.
    """
    from tl_core import preserve_rng, seed_everything

    seed = request.config.stash[_SETTINGS].seed
    with preserve_rng():
        seed_everything(seed)
        yield seed


@pytest.fixture
def training_runner(torch_device: torch.device, torch_seed: int) -> TrainingRunner:
    """Runs training loops on the test's device with the test's seed: a tl_pytest.TrainingRunner.

    Example::

        def test_training(training_runner):
            run = training_runner.run(make_setup, make_loader(), train_step, steps=20)
            run.assert_healthy(max_grad_norm=10.0)
    """
    from tl_pytest._runner import TrainingRunner

    return TrainingRunner(torch_device, torch_seed)
