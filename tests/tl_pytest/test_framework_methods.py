"""The runner's methods for Lightning and transformers hand on what they are given, bound to the test."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

import tl_core
from tl_pytest._common import Common
from tl_pytest._runner import TrainingRunner
from tl_pytest._tolerances import ToleranceOverride

META = torch.device("meta")
RULES = ("lr-zero", "rng-not-restored", "mean-of-means")
TOLERANCES = (ToleranceOverride("training_resume", 0.1), ToleranceOverride("grad_accumulation", atol=0.2))


class _Recorder:
    """Stands for an adapter: keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *arguments, **keywords: self.calls.append((name, arguments, keywords)) or f"made by {name}"


@pytest.fixture
def recorder(monkeypatch):
    """Stand in for tl_lightning and tl_hf, which need not be installed."""
    recorder = _Recorder()
    for package in ("tl_lightning", "tl_hf"):
        monkeypatch.setitem(sys.modules, package, recorder)
    return recorder


@pytest.fixture
def runner():
    return TrainingRunner(META, 3, Common(TOLERANCES, RULES))


RESUME = {"steps": 6, "resume_at": 2}
ACCUMULATION = {
    "accumulation_steps": 2,
    "cycles": 3,
    "epoch_length": 20,
    "split": "split",
    "disable_dropout": False,
}
TRAINER = {"trainer_kwargs": {"precision": "bf16-mixed"}}
OF_RESUME = {"rtol": 0.1, "atol": None, "allow": ["a", "rng-not-restored"]}
OF_ACCUMULATION = {"rtol": None, "atol": 0.2, "allow": ["a", "mean-of-means"]}


@pytest.mark.parametrize(
    ("method", "arguments", "keywords", "bound"),
    [
        ("from_lightning", ("make",), {"epoch_length": 4, **TRAINER}, {}),
        ("make_lightning_trainer", (), {"max_epochs": 2}, {"device": META}),
        ("watch_lightning", ("trainer",), {"track_updates": False}, {"allow": ["a", "lr-zero"]}),
        ("assert_lightning_resume_equivalent", ("make_fit",), RESUME, {"seed": 3, **OF_RESUME}),
        (
            "assert_lightning_accumulation_equivalent",
            ("make", "data"),
            {**ACCUMULATION, **TRAINER},
            {"device": META, "seed": 3, **OF_ACCUMULATION},
        ),
        (
            "make_hf_trainer",
            ("model", "train", "eval"),
            {"trainer_class": "class", "output_dir": "folder", "max_steps": 3},
            {"device": META, "seed": 3},
        ),
        ("watch_hf", ("trainer",), {"track_updates": False}, {"allow": ["a", "lr-zero"]}),
        ("assert_hf_resume_equivalent", ("make",), RESUME, {"seed": 3, **OF_RESUME}),
        ("assert_hf_accumulation_equivalent", ("make", "data"), ACCUMULATION, {"seed": 3, **OF_ACCUMULATION}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_method_hands_everything_on(recorder, runner, method, arguments, keywords, bound):
    """Arguments reach the function; device, seed, tolerances and allowed rules are the test's beside those given."""
    own = {"allow": ["a"]} if "allow" in bound else {}
    assert getattr(runner, method)(*arguments, **keywords, **own) == f"made by {method}"
    assert recorder.calls == [(method, arguments, {**keywords, **bound})]
    given = {
        key: value for key, value in {"device": "cpu", "seed": 0, "rtol": 0.5, "atol": 0.5}.items() if key in bound
    }
    getattr(runner, method)(*arguments, **keywords, **own, **given)
    assert recorder.calls[1] == (method, arguments, {**keywords, **bound, **given})


def test_a_trainers_class_is_left_to_tl_hf(recorder, runner):
    """Without a class, none is named: the default is a class of transformers."""
    runner.make_hf_trainer("model", "train")
    ((_, arguments, keywords),) = recorder.calls
    assert arguments == ("model", "train", None)
    assert keywords == {"output_dir": None, "device": META, "seed": 3}


def test_the_coverage_of_a_trainer(recorder, runner, monkeypatch):
    """Without allowed rules the assertion is asked; with them, what they allow is taken out of the check's report."""
    options = {"no_decay": ["*.bias"], "ignore": ["a*"]}
    runner.assert_hf_optimizer_coverage("trainer", **options)
    allowed, other = tl_core.Finding("listed-twice", "x", "", ""), tl_core.Finding("other-copy", "y", "", "")
    report = tl_core.Report("Optimizer coverage", (allowed, other))
    recorder.check_hf_optimizer_coverage = lambda *arguments, **keywords: report
    strict = TrainingRunner("cpu", 0, Common(allow=("listed-twice",)))
    with pytest.raises(tl_core.CheckFailed) as caught:
        strict.assert_hf_optimizer_coverage("trainer", **options)
    assert caught.value.findings == (other,)
    assert recorder.calls == [("assert_hf_optimizer_coverage", ("trainer",), options)]


@pytest.mark.parametrize("method", ["watch_lightning", "watch_hf"])
def test_watched_runs_are_kept(recorder, method):
    """Where somebody collects the runs of a test, a watched one is handed on when it begins, as the adapter's own."""
    kept: list[object] = []

    class Watch:
        def __enter__(self) -> str:
            return "run"

        def __exit__(self, *error: object) -> None:
            pass

    setattr(recorder, method, lambda *arguments, **keywords: Watch())
    with getattr(TrainingRunner("cpu", 0, Common(keep=kept.append)), method)("trainer") as run:
        assert kept == [run] == ["run"]
