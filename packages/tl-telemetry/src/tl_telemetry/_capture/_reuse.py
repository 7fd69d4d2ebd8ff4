"""Which of the objects that are there may be changed in place when a capture is put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tl_core import TrainingSetup, module_names
from tl_telemetry._capture._generators import fits_generator
from tl_telemetry._capture._kinds import is_array
from tl_telemetry._capture._modules import module_tensors
from tl_telemetry._capture._nodes import Array, Container, Generator, Node, Opaque, Stateful, TensorNode, Values
from tl_telemetry._capture._pieces import StateCapture
from tl_telemetry._capture._setup_state import walk_setup
from tl_telemetry._capture._walk import Walk
from tl_telemetry._tensors import is_lazy


class Reuse:
    """Tells what may be changed in place, in one act of putting back.

    One object that stands where the capture has two different ones is used for one of them only, and memory that
    tensors share is written to only by those that shared it in the capture: a copy of the best weights must not be
    written into the model where a fresh setup still has ``model.state_dict()`` in its place.

    Attributes:
        known: what the setup holds now, by the paths under which a capture would meet it.
    """

    def __init__(self, capture: StateCapture, setup: TrainingSetup) -> None:
        walk = Walk(lambda tensor: (None, None))
        walk_setup(walk, setup, {})
        self.known = walk.objects
        self._holders: dict[int, tuple[Node | None, Any]] = {}  # by id, with the object, so that it lives
        self._storages: dict[int, int] = {}  # memory that is there -> memory in the capture
        for path, value in _structure(setup).items():
            self._holders.setdefault(id(value), (capture.nodes.get(path), value))
        for name, tensor in module_tensors(setup.model).items():
            node = capture.nodes.get(f"model.{name}")
            if isinstance(node, TensorNode) and (storage := _storage(tensor)):
                self._storages.setdefault(storage, node.storage)

    def allows(self, node: Node, live: Any) -> bool:
        """Tell whether an object may be used for a node; from now on it is used for no other."""
        return self._holders.setdefault(id(live), (node, live))[0] is node

    def stays(self, node: Node, there: Any) -> bool:
        """Tell whether the object that is there would be changed in place, if a node were put back."""
        if isinstance(node, TensorNode):
            return self.allows_tensor(node, there)
        if isinstance(node, Opaque):
            return type(there).__name__ == node.type_name
        if isinstance(node, Array):
            return fits_array(node.content, there) and self.allows(node, there)
        if isinstance(node, Generator):
            return fits_generator(node, there) and self.allows(node, there)
        if not isinstance(node, (Container, Stateful, Values)) or type(there) is not node.type:
            return False
        return not isinstance(there, (tuple, frozenset)) and self.allows(node, there)

    def allows_tensor(self, node: TensorNode, live: Any) -> bool:
        """Tell whether a tensor can hold a node's content."""
        if not isinstance(live, Tensor) or is_lazy(live) or live.device.type == "meta" or live.is_inference():
            return False
        if (tuple(live.shape), live.dtype, live.layout) != (node.shape, node.dtype, node.layout):
            return False
        if live.layout is not torch.strided or _expanded(live):
            return False
        if not self.allows(node, live):
            return False
        storage = _storage(live)
        return not storage or self._storages.setdefault(storage, node.storage) == node.storage


def fits_array(content: Any, live: Any) -> bool:
    """Tell whether an array can hold the content of another one."""
    return bool(is_array(live) and live.flags.writeable and (live.shape, live.dtype) == (content.shape, content.dtype))


def _expanded(tensor: Tensor) -> bool:
    """Tell whether elements of a tensor share their memory, so that it cannot be written to."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _storage(tensor: Tensor) -> int:
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return 0
    return tensor.detach().untyped_storage().data_ptr()


def _structure(setup: TrainingSetup) -> dict[str, Any]:
    """Return what is never used for anything else: the setup, its model, optimizers and schedulers."""
    known: dict[str, Any] = {"setup": setup, "setup.state": setup.state, "model": setup.model}
    known |= {f"model.{name}": part for name, part in module_names(setup.model).items() if name}
    known |= {f"model.{name}": tensor for name, tensor in module_tensors(setup.model).items()}
    known |= {f"setup.optimizers[{name!r}]": optimizer for name, optimizer in setup.optimizers.items()}
    known |= {f"setup.schedulers[{name!r}]": scheduler for name, scheduler in setup.schedulers.items()}
    return known
