"""What is known of a run beside its records: how things stood at its start and at its end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from tl_core import TrainingSetup
from tl_telemetry._fingerprints import Fingerprint, StateEntry, named_parameters_and_buffers, state_entries
from tl_telemetry._marks import GraphMarks
from tl_telemetry._recorder import Recorder
from tl_telemetry._replay import Origin
from tl_telemetry._tensors import Tensors, other_modules, shown_name

# A longer run is not repeated only to look into compiled code.
MAX_UNCOMPILED = 50


@dataclass
class Facts:
    """The start and the end of a run.

    Attributes:
        setup: the observed setup, in its final state once the run is over.
        tensors: the followed parameters.
        data_form: what ``data`` was taken for; empty where the loop drew its own batches.
        over: whether the run has ended.
        find_nonfinite: runs the loop again and names the operations that first made non-finite values in a step; None
            where the run cannot be repeated.
        run_uncompiled: runs the loop again for some steps without compiling anything, and returns the flags of the
            module of each parameter, by its name; None where the run cannot be repeated.
    """

    setup: TrainingSetup
    recorder: Recorder
    data_form: str = ""
    over: bool = False
    find_nonfinite: Callable[[int], Origin] | None = None
    run_uncompiled: Callable[[int], dict[str, int]] | None = None
    start: Fingerprint = field(init=False)
    end: Fingerprint = field(init=False)
    state_start: dict[str, StateEntry] = field(init=False)
    state_end: dict[str, StateEntry] = field(init=False)
    trainable_start: frozenset[str] = field(init=False)
    num_start: int = field(init=False)  # how many tensors were followed when the run began: the first ones
    resumed: bool = field(init=False)
    graphs_alive: int = 0  # earlier steps' graphs still alive when the run ended, with their losses
    graph_parts_alive: int = 0  # of the first steps' graphs, those of which at least the beginning is alive
    _origins: dict[int, Origin | None] = field(init=False, default_factory=dict, repr=False)
    made_alive: int = 0  # of the first steps, those in which a forward pass made a graph that is alive

    def __post_init__(self) -> None:
        self.start = self._fingerprint()
        self.state_start = state_entries(self.setup, compare=True)
        self.num_start = len(self.tensors)
        self.trainable_start = frozenset(e.name for e in self.tensors.entries if e.tensor.requires_grad)
        # a loop that is observed from its middle on has optimizers that have stepped already
        self.resumed = any(bool(getattr(optimizer, "state", None)) for optimizer in self.setup.optimizers.values())

    @property
    def tensors(self) -> Tensors:
        return self.recorder.tensors

    @cached_property
    def uncompiled(self) -> dict[str, int]:
        """The flags of each parameter's module in a run without compiled code; empty where there cannot be one."""
        num_steps = len(self.recorder.records)
        if self.run_uncompiled is None or num_steps > MAX_UNCOMPILED:
            return {}
        try:
            return self.run_uncompiled(num_steps)
        except Exception:  # noqa: BLE001  a loop that cannot be run a second time only goes without this detail
            return {}

    def origin(self, step: int) -> Origin | None:
        """Return where the non-finite values of a step came from; None where the run cannot be repeated.

        The run is repeated once for each step that is asked for, however many rules ask.
        """
        if step not in self._origins:
            try:
                found = None if self.find_nonfinite is None else self.find_nonfinite(step)
            except Exception:  # noqa: BLE001  a loop that cannot be run a second time only goes without this detail
                found = None
            self._origins[step] = found
        return self._origins[step]

    def close(self) -> None:
        """Read how things stand at the end, without waiting for the device."""
        self.read_end()
        self.over = True

    def read_end(self) -> None:
        """Read how things stand now: the end, for somebody who asks before the run is over."""
        self.end = self._fingerprint()
        self.state_end = state_entries(self.setup, compare=False)
        marks = self.recorder.marks
        self._count_alive(marks)
        if max(self.graphs_alive, self.graph_parts_alive, self.made_alive) > 2:
            gc.collect()  # graphs in reference cycles are not held by anybody: let them go before counting
            self._count_alive(marks)

    def _count_alive(self, marks: GraphMarks) -> None:
        self.graphs_alive, self.graph_parts_alive = marks.count_alive(), marks.count_deep_alive()
        self.made_alive = marks.count_made_alive()

    def _fingerprint(self) -> Fingerprint:
        followed: dict[str, Tensor] = {entry.name: entry.tensor for entry in self.tensors.entries}
        tensors = {shown_name(name): t for name, t in named_parameters_and_buffers(self.setup.model).items()}
        for label, module in other_modules(self.setup):
            tensors |= {f"{label}.{shown_name(name)}": buffer for name, buffer in module.named_buffers()}
        return Fingerprint({**tensors, **followed})
