"""Which of the two packages a module comes from: ``lightning`` and ``pytorch_lightning`` share no class."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_FLAVORS = ("lightning.pytorch", "pytorch_lightning")


def uncompiled(module: Any) -> Any:
    """Return the module inside of ``torch.compile(module)``, which ``fit`` takes too; any other object as it is."""
    return getattr(module, "_orig_mod", module)


def flavor_of(value: object, what: str, kind: str) -> Any:
    """Return the package that a module or a Trainer comes from.

    Args:
        value: the object.
        what: its name, for messages.
        kind: the class that it must derive from: ``LightningModule`` or ``Trainer``.

    Raises:
        TypeError: it derives from neither package's class.
    """
    for name in _FLAVORS:
        package = sys.modules.get(name)  # whoever has an object of its classes has imported it
        if package is not None and isinstance(uncompiled(value), getattr(package, kind)):
            return package
    got = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    raise TypeError(f"{what} must be a {kind} of lightning or pytorch_lightning, got {got}")


def any_flavor() -> Any:
    """Return the package to use where no object tells: the one that is imported already, else the one installed.

    Raises:
        ImportError: neither is installed.
    """
    for name in _FLAVORS:
        if name in sys.modules:
            return sys.modules[name]
    for name in _FLAVORS:
        if find_spec(name.partition(".")[0]) is not None:
            return import_module(name)
    raise ImportError('neither lightning nor pytorch_lightning is installed: pip install "tl-lightning[lightning]"')
