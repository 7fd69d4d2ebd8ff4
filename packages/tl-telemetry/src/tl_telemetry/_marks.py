"""Marks left in the graphs of losses: to know a loss again, and to see graphs that stay alive.

Graph nodes cannot be referenced weakly and their ids are reused; an object kept in a node's ``metadata`` can be, and
lives exactly as long as the node.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

_keys = itertools.count()
# Through how many scalings of a loss (`scaler.scale(loss) / 4`) it is known again.
MAX_SCALINGS = 6
# Graphs followed at a time; the first ones of a run tell as much as all of them.
MAX_ALIVE = 64

_SCALINGS = frozenset({"MulBackward0", "DivBackward0", "ToCopyBackward0"})


class _Mark:
    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class GraphMarks:
    """Knows which losses were passed to ``backward`` before, and how many steps' graphs are still alive."""

    def __init__(self) -> None:
        self._key = f"tl_telemetry.{next(_keys)}"  # observers may nest: each knows only its own marks
        self.num_steps = 0
        self.num_followed = 0  # steps with a followed graph
        self._marks: list[tuple[int, weakref.ref[_Mark]]] = []

    def meet(self, roots: Sequence[Any], number: int) -> tuple[int, bool]:
        """Mark the graph of a backward pass.

        Returns the number of the earlier pass from the very same loss (0: none), and whether any root has a graph.
        """
        earlier, connected = 0, False
        for root in roots:
            node = getattr(root, "grad_fn", None) or getattr(root, "node", None)
            if node is None:
                continue
            connected = True
            # one node may have several outputs (unbind, split): each is a loss of its own
            nodes = list(_scalings(node, root.output_nr))
            for met, output in nodes:
                mark = met.metadata.get((self._key, output))
                if mark is not None:
                    earlier = max(earlier, mark.number)
            mark = _Mark(number)
            for met, output in nodes:
                met.metadata[self._key, output] = mark
            if len(self._marks) == MAX_ALIVE:
                self._drop_dead()
            if len(self._marks) < MAX_ALIVE:
                self.num_followed = max(self.num_followed, self.num_steps + 1)
                self._marks.append((self.num_steps, weakref.ref(mark)))
        return earlier, connected

    def close_step(self) -> None:
        self.num_steps += 1

    def count_alive(self) -> int:
        """Return how many steps have a graph that is alive, of the ``MAX_ALIVE`` graphs followed at a time."""
        self._drop_dead()
        return len({step for step, _ in self._marks})

    def _drop_dead(self) -> None:
        self._marks = [(step, ref) for step, ref in self._marks if ref() is not None]


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
