"""Marks left in the graphs of losses: to know a loss again, and to see graphs that stay alive.

Graph nodes cannot be referenced weakly and their ids are reused; an object kept in a node's ``metadata`` can be, and
lives exactly as long as the node.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_keys = itertools.count()
# How many terms of a sum of losses are looked at.
MAX_TERMS = 32
# How far a graph is walked for the nodes next to its parameters, and in how many steps and passes of a step.
MAX_WALKED = 2000
WALKED_STEPS = 8
WALKED_PASSES = 4
# Through how many scalings of a loss (`scaler.scale(loss) / 4`) it is known again.
MAX_SCALINGS = 6
# Graphs followed at a time; the first ones of a run tell as much as all of them.
MAX_ALIVE = 64

_SCALINGS = frozenset({"MulBackward0", "DivBackward0", "ToCopyBackward0"})
_SUM = "AddBackward0"
_LEAF = "torch::autograd::AccumulateGrad"


class _Mark:
    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class Met(NamedTuple):
    """What was known of a loss when ``backward`` was called on it.

    Attributes:
        earlier: the number of the earlier pass from the very same loss, or from a term of it; 0: none.
        is_term: whether that was a term of the sum that this loss is.
        connected: whether any root has a graph.
    """

    earlier: int
    is_term: bool
    connected: bool


class GraphMarks:
    """Knows which losses were passed to ``backward`` before, and how many steps' graphs are still alive."""

    def __init__(self) -> None:
        self._key = f"tl_telemetry.{next(_keys)}"  # observers may nest: each knows only its own marks
        self.num_steps = 0
        self.num_followed = 0  # steps with a followed graph
        self.num_walked = 0  # of those, the ones whose graphs are followed down to the parameters
        self.num_made = 0  # steps in which what forward passes made is followed
        self._walked_passes = 0  # in this step
        self._marks: list[tuple[int, weakref.ref[_Mark]]] = []
        self._deep_marks: list[tuple[int, weakref.ref[_Mark]]] = []
        self._made_marks: list[weakref.ref[_Mark]] = []
        self._made: _Mark | None = None  # of this step

    def meet(self, roots: Sequence[Any], number: int) -> Met:
        """Mark the graph of a backward pass, and look for the marks of earlier ones."""
        earlier, of_term, connected = 0, 0, False
        for root in roots:
            node = getattr(root, "grad_fn", None) or getattr(root, "node", None)
            if node is None:
                continue
            connected = True
            # one node may have several outputs (unbind, split): each is a loss of its own
            nodes = list(_scalings(node, root.output_nr))
            earlier = max(earlier, self._latest(nodes))
            of_term = max(of_term, self._latest(_terms(*nodes[-1])))
            mark = _Mark(number)
            for met, output in nodes:
                met.metadata[self._key, output] = mark
            if len(self._marks) == MAX_ALIVE:
                self._drop_dead()
            if len(self._marks) < MAX_ALIVE:
                self.num_followed = max(self.num_followed, self.num_steps + 1)
                self._marks.append((self.num_steps, weakref.ref(mark)))
            self._mark_deep(node)
        return Met(earlier or of_term, not earlier and bool(of_term), connected)

    def _latest(self, nodes: Iterable[tuple[Any, int]]) -> int:
        """Return the latest pass that began at one of these nodes; 0: none did."""
        marks = (node.metadata.get((self._key, output)) for node, output in nodes)
        return max((mark.number for mark in marks if mark is not None), default=0)

    def _mark_deep(self, root: Any) -> None:
        """Mark the nodes next to parameters: whatever depends on those, kept, keeps them alive."""
        if self.num_steps >= WALKED_STEPS or self._walked_passes >= WALKED_PASSES:
            return
        self._walked_passes += 1
        self.num_walked = max(self.num_walked, self.num_steps + 1)
        mark = _Mark(0)
        for node in _next_to_leaves(root):
            node.metadata.setdefault(self._key, mark)  # a node that goes on from step to step stays the first one's
        self._deep_marks.append((self.num_steps, weakref.ref(mark)))

    def made(self, output: Any) -> None:
        """Mark the graphs of what a forward pass returned, in the first steps: ``backward`` may never run on them."""
        if self.num_steps >= WALKED_STEPS:
            return
        for node in _nodes_of(output):
            if self._made is None:
                self._made = _Mark(0)
                self._made_marks.append(weakref.ref(self._made))
                self.num_made += 1
            node.metadata.setdefault((self._key, "made"), self._made)

    def close_step(self) -> None:
        self.num_steps += 1
        self._walked_passes = 0
        self._made = None  # from here on, only nodes keep it

    def count_alive(self) -> int:
        """Return how many steps have a graph that is alive, of the ``MAX_ALIVE`` graphs followed at a time."""
        self._drop_dead()
        return len({step for step, _ in self._marks})

    def count_deep_alive(self) -> int:
        """Return how many of the first steps have a graph of which at least the beginning is alive."""
        return len({step for step, ref in self._deep_marks if ref() is not None})

    def count_made_alive(self) -> int:
        """Return of how many of the first steps a graph is alive that a forward pass made."""
        return sum(ref() is not None for ref in self._made_marks)

    def _drop_dead(self) -> None:
        self._marks = [(step, ref) for step, ref in self._marks if ref() is not None]


def _nodes_of(output: Any) -> Iterator[Any]:
    """Yield the graph nodes of the tensors that a module returned: one, or some in a tuple, a list or a dict."""
    if isinstance(output, torch.Tensor):
        if output.grad_fn is not None:
            yield output.grad_fn
    elif isinstance(output, (Mapping, list, tuple)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _nodes_of(value)


def _scalings(node: Any, output: int) -> Iterator[tuple[Any, int]]:
    """Yield the root's node and output and, below scalings by a constant, those of the unscaled loss."""
    for _ in range(MAX_SCALINGS):
        yield node, output
        if node.name() not in _SCALINGS:
            return
        inputs = [(child, number) for child, number in node.next_functions if child is not None]
        if len(inputs) != 1:
            return
        node, output = inputs[0]


def _terms(node: Any, output: int) -> Iterator[tuple[Any, int]]:
    """Yield, for a sum, the nodes and outputs of its terms and of what is scaled in them."""
    left = MAX_TERMS
    sums = [node] if node.name() == _SUM else []
    while sums and left:
        for child, number in sums.pop().next_functions:
            if child is None or not left:
                continue
            left -= 1
            for term in _scalings(child, number):
                yield term
                if term[0].name() == _SUM:
                    sums.append(term[0])


def _next_to_leaves(root: Any) -> Iterator[Any]:
    """Yield the nodes whose inputs are parameters (or other leaves), nearest to the root first."""
    queue, met = deque([root]), {root}
    while queue:
        node = queue.popleft()
        is_next = False
        for child, _ in node.next_functions:
            if child is None or child in met:
                continue
            if child.name() == _LEAF:
                is_next = True
            elif len(met) < MAX_WALKED:
                met.add(child)
                queue.append(child)
        if is_next:
            yield node
