import random
from collections import deque

from tl_telemetry._outside._refill import refill


class Slots:
    __slots__ = ("__hidden", "value")

    def __init__(self, hidden):
        self.__hidden = hidden

    def hidden(self):
        return self.__hidden


def test_refill_takes_over_containers_slots_and_generators():
    """Each kind of object takes over what the other one holds, and only that."""
    for target, source in (([1], [2, 3]), ({"a": 1}, {"b": 2}), ({1}, {2}), (deque([1]), deque([2]))):
        refill(target, source)
        refill(target, target)
        assert target == source
    slots, other = Slots(1), Slots(2)
    slots.value = 1
    refill(slots, other)
    assert (slots.hidden(), hasattr(slots, "value")) == (2, False)
    one, two = random.Random(1), random.Random(2)
    refill(one, two)
    assert one.random() == two.random()
