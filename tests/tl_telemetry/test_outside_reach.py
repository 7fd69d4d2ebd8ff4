import dataclasses
import functools
import itertools

import pytest
import torch

from tl_telemetry._outside._reach import Place, places

COUNTER = 0
LIMIT = 4
NOISE = torch.Generator()
NAMES = itertools.count()
VISITED: list[int] = []
KEEP = VISITED.append


def names(*functions):
    return [place.name for place in places(functions)]


def place(name, *functions) -> Place:
    (found,) = (one for one in places(functions) if one.name == name)
    return found


def uses_globals(setup, batch):
    global COUNTER, FIRST_BATCH
    COUNTER += 1
    FIRST_BATCH = batch

    def draw():
        return torch.randn(LIMIT, generator=NOISE)

    return [draw() for _ in range(len(batch))], lambda: next(NAMES)


def test_globals_of_nested_code_are_places_and_builtins_and_modules_are_not():
    """Names read or written anywhere inside of the function count; torch, len and range do not."""
    assert names(uses_globals) == ["COUNTER", "FIRST_BATCH", "LIMIT", "NOISE", "NAMES"]


def test_a_global_is_got_set_and_deleted():
    """A place shows the live value; a global that is not there yet raises and can be taken away again."""
    counter, first = place("COUNTER", uses_globals), place("FIRST_BATCH", uses_globals)
    with pytest.raises(LookupError):
        first.get()
    try:
        uses_globals(None, [1])
        assert (counter.get(), first.get()) == (1, [1])
    finally:
        counter.set(0)
        first.delete()
        first.delete()
    assert (COUNTER, "FIRST_BATCH" in globals()) == (0, False)


def test_own_code_without_a_file_is_followed():
    """Executed code and notebooks are the person's."""
    namespace = {}
    exec("total = 0\ndef step(setup, batch):\n    global total\n    total += batch", namespace)
    assert names(namespace["step"]) == ["total"]


def make_closure():
    seen, rate = [], 0.1

    def helper():
        return unset, rate

    def train_step(setup, batch, history=[], names=("a",), *, cache={}):  # noqa: B006
        seen.append(batch)
        train_step.calls = getattr(train_step, "calls", 0) + 1
        return helper()

    if not seen:
        return train_step
    unset = 1
    return unset


def test_cells_mutable_defaults_and_attributes_of_functions_are_places():
    """A cell without a value, an attribute that the first call makes, and what a helper closes over count too."""
    step = make_closure()
    assert names(step) == [
        "train_step.calls",
        "seen (closure of train_step)",
        "train_step.history (default)",
        "train_step.cache (default)",
        "rate (closure of helper)",
        "unset (closure of helper)",
    ]


def test_cells_defaults_and_attributes_are_set_back():
    """Setting, and deleting where there was nothing, undoes what a call left."""
    step = make_closure()
    found = {one.name: one for one in places([step])}
    with pytest.raises(NameError):
        step(None, 5)
    assert found["seen (closure of train_step)"].get() == [5]
    assert found["train_step.calls"].get() == 1
    found["seen (closure of train_step)"].set([])
    found["train_step.calls"].delete()
    found["train_step.history (default)"].set([3])
    found["train_step.cache (default)"].set({"a": 1})
    assert (step.__defaults__, step.__kwdefaults__, vars(step)) == (([3], ("a",)), {"cache": {"a": 1}}, {})
    unset = found["unset (closure of helper)"]
    with pytest.raises(LookupError, match="unset is unset"):
        unset.get()
    unset.set(2)
    assert unset.get() == 2
    unset.delete()
    unset.delete()
    with pytest.raises(LookupError):
        unset.get()


def test_a_default_cannot_be_deleted():
    """A place that cannot be without a value says so."""
    with pytest.raises(TypeError) as error:
        place("train_step.history (default)", make_closure()).delete()
    assert str(error.value) == "train_step.history (default) always has a value: it can be replaced, not deleted"


class Base:
    seen = 0


class Meter:
    made = []  # noqa: RUF012

    def __init__(self):
        type(self).made.append(1)


class Trainer(Base):
    """A trainer; its docstring and its methods are no places."""

    kinds = {"a": 1}  # noqa: RUF012
    device = torch.device("cpu")

    def __init__(self):
        self.total = 0
        self.meter = Meter()

    @property
    def size(self):
        return LIMIT

    @staticmethod
    def draw():
        return next(NAMES)

    @classmethod
    def count(cls):
        cls.seen += 1

    def train_step(self, setup, batch):
        self.total += batch
        self.count()

    __call__ = train_step


TRAINER = [
    "train_step's own object (Trainer)",
    "Trainer.kinds",
    "Trainer.device",
    "Base.seen",
    "Meter.made",
    "LIMIT",
    "NAMES",
    "Trainer.seen",
]


def test_a_bound_method_brings_its_object_and_class_attributes():
    """Class attributes of the object's class, its bases and the classes of what it holds are places."""
    assert names(Trainer().train_step) == TRAINER
    assert names(functools.partial(Trainer().train_step, {})) == ["train_step's argument 0 (partial)", *TRAINER]
    assert names(Trainer())[-1:] == ["Trainer.seen"]
    assert "Trainer.__call__'s own object (Trainer)" in names(Trainer())


def test_the_attribute_that_a_class_gets_of_its_own_is_taken_away():
    """``cls.seen += 1`` on a subclass leaves the base alone, and is undone by deleting."""
    trainer = Trainer()
    own = place("Trainer.seen", trainer.train_step)
    with pytest.raises(LookupError):
        own.get()
    trainer.train_step(None, 1)
    assert (own.get(), Base.seen) == (1, 0)
    own.delete()
    own.delete()
    assert "seen" not in vars(Trainer)


def test_a_class_attribute_is_set():
    """A class attribute is set on the class that defines it."""
    seen = place("Base.seen", Trainer().train_step)
    seen.set(4)
    assert Base.seen == Trainer.seen == 4
    seen.set(0)


def test_an_own_object_stays_the_same_object():
    """The object of a bound method takes over the attributes of what is set."""
    trainer, other = Trainer(), Trainer()
    own = place("train_step's own object (Trainer)", trainer.train_step)
    trainer.left = 1
    other.total = 9
    own.set(other)
    assert own.get() is trainer
    assert vars(trainer) == {"total": 9, "meter": other.meter}


def test_a_method_of_a_list_brings_the_list():
    """A global that is bound to a builtin container's method is a place by the container."""

    def step(setup, batch):
        KEEP(batch)

    own = place("append's own object (list)", step)
    step(None, 3)
    assert own.get() == [3]
    own.set([])
    assert VISITED == []


def keeps_calls(function):
    calls = []

    @functools.wraps(function)
    def wrapper(*args):
        calls.append(args)
        return function(*args)

    return wrapper


@keeps_calls
def decorated(setup, batch):
    return LIMIT


@torch.no_grad()
def without_grad(setup, batch):
    return LIMIT


@functools.lru_cache
def remembered(batch):
    return LIMIT


def test_decorated_functions_are_followed():
    """A decorator of the person's own counts itself; one of a library is looked through."""
    assert names(decorated) == ["calls (closure of decorated)", "LIMIT"]
    assert names(without_grad) == ["LIMIT"]
    assert names(remembered) == ["LIMIT"]
    assert names(torch.compile(without_grad, backend="eager")) == ["LIMIT"]


def test_a_place_appears_once():
    """Two functions that share a global and each other give it once."""

    def ping(n):
        return pong(n - LIMIT)

    def pong(n):
        return ping(n) if n else LIMIT

    assert names(ping, pong, ping) == ["LIMIT"]


def test_a_rebound_function_is_a_place():
    """A function is a place only where the code binds its name anew."""
    namespace = {"__name__": "__main__"}
    exec("def a(): pass\ndef b(): pass\ndef step(s, b_):\n    global a\n    a = b", namespace)
    assert names(namespace["step"]) == ["a"]


MISSING = object()


@dataclasses.dataclass
class Config:
    rate: float = 0.1
    tags: list = dataclasses.field(default_factory=list)

    def scaled(self, by=MISSING):
        return LIMIT if by is MISSING else self.rate


def test_sentinels_and_generated_methods_are_left_alone():
    """A copy of a sentinel would be another one; what dataclasses writes is not the person's code."""

    def step(setup, batch, config=MISSING):
        return Config().scaled()

    assert names(step) == ["Config.rate", "LIMIT"]
    assert Config().tags == []


def test_the_arguments_of_a_partial_are_set():
    """A mutable argument bound by partial is a place, an immutable one is not, a function is followed."""
    bound = functools.partial(lambda *args, **kwargs: None, [1], 2, draw, kept=[3], limit=4)
    found = {one.name: one for one in places([bound])}
    assert list(found) == ["<lambda>'s argument 0 (partial)", "<lambda>.kept (partial)", "LIMIT"]
    found["<lambda>'s argument 0 (partial)"].set([5])
    found["<lambda>.kept (partial)"].set([6])
    assert (bound.args, bound.keywords) == (([5], 2, draw), {"kept": [6], "limit": 4})
    assert found["<lambda>'s argument 0 (partial)"].get() == [5]


def draw():
    return LIMIT


class Plugin:
    def __init__(self):
        self.hooks = [lambda: LIMIT]
        self.table = {"next": lambda: next(NAMES), "many": list(range(1000))}


PLUGIN = Plugin()


def test_functions_that_objects_hold_are_followed():
    """What an own object, a list or a dict brings along is code that the step uses."""

    def step(setup, batch):
        return PLUGIN.hooks

    assert names(step) == ["PLUGIN", "LIMIT", "NAMES"]


def test_what_a_function_attribute_holds_is_followed():
    """An attribute is a place; a function kept as one is followed; pytest's marks are nobody's state."""

    @pytest.mark.filterwarnings
    def step(setup, batch):
        return step.seen, step.draw()

    step.seen, step.draw = [], draw
    (seen,) = (one for one in places([step]) if one.name == "step.seen")
    assert names(step) == ["step.seen", "LIMIT"]
    seen.set([1])
    assert step.seen == [1]
