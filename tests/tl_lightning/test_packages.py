"""What is imported when, which of the two packages is used, and what is said where one is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

import tl_lightning._extras
import tl_lightning._flavor
from tl_lightning import (
    assert_lightning_accumulation_equivalent,
    assert_lightning_resume_equivalent,
    check_lightning_accumulation_equivalent,
    check_lightning_resume_equivalent,
    from_lightning,
    make_lightning_trainer,
)


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_it_imports_neither_package():
    """Whoever has one of the two is not made to import the other, nor the packages of the extras."""
    loaded = run("import sys, tl_lightning; print(*sys.modules)")
    assert "tl_lightning" in loaded
    others = {"lightning", "pytorch_lightning", "lightning_fabric", "tl_resume", "tl_accum", "torchmetrics"}
    assert others.isdisjoint(loaded)


def test_only_the_package_in_use_is_used():
    """The Trainer for tests comes from the package that is imported, and the other one is left alone."""
    code = (
        "import sys, pytorch_lightning as pl; from tl_lightning import make_lightning_trainer; "
        "print(isinstance(make_lightning_trainer(), pl.Trainer), 'lightning' in sys.modules)"
    )
    assert run(code)[-2:] == ["True", "False"]


def missing(monkeypatch, module, *names):
    """Let a module of ours find no such packages."""
    monkeypatch.setattr(module, "find_spec", lambda name: None if name in names else find_spec(name))


@pytest.mark.parametrize(
    ("check", "package", "extra"),
    [
        (check_lightning_resume_equivalent, "tl-resume", "resume"),
        (assert_lightning_resume_equivalent, "tl-resume", "resume"),
        (check_lightning_accumulation_equivalent, "tl-accum", "accum"),
        (assert_lightning_accumulation_equivalent, "tl-accum", "accum"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, check, package, extra):
    """A check whose package is not there says how to install it."""
    missing(monkeypatch, tl_lightning._extras, package.replace("-", "_"))
    arguments = (lambda: None,) if extra == "resume" else (lambda: None, [])
    with pytest.raises(ImportError) as error:
        check(*arguments)
    assert str(error.value) == f'this check needs {package}: pip install "tl-lightning[{extra}]"'


def test_a_missing_lightning_is_named(monkeypatch):
    """Where neither package is installed, the error says what to install."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    missing(monkeypatch, tl_lightning._flavor, "lightning", "pytorch_lightning")
    with pytest.raises(ImportError) as error:
        make_lightning_trainer()
    assert str(error.value) == (
        'neither lightning nor pytorch_lightning is installed: pip install "tl-lightning[lightning]"'
    )


def test_a_module_of_either_package_is_known(pl, make_class, batches):
    """Each module is trained by its own package's Trainer, with both imported."""
    setup = from_lightning(make_class(pl))[0]()
    assert isinstance(setup.model.trainer, pl.Trainer)
