"""split_batch cuts every container along its examples, and says what it cannot cut."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tl_accum import split_batch

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Example:
    ids: Any
    scale: Any = 0.5


@dataclasses.dataclass(frozen=True)
class Frozen:
    ids: Tensor


class Encoding(UserDict):
    """A mapping with something beside its items, as Hugging Face's tokenizers return it."""

    encodings = "none"


def rebuilt(parts: list[Any]) -> Any:
    """Put the parts of a batch together again, knowing nothing of how they were cut."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, np.ndarray):
        return np.concatenate(parts) if first.ndim else first
    if isinstance(first, dict):
        return {key: rebuilt([part[key] for part in parts]) for key in first}
    if isinstance(first, Example):
        return Example(rebuilt([part.ids for part in parts]), rebuilt([part.scale for part in parts]))
    if isinstance(first, tuple):
        return type(first)(*(rebuilt([part[i] for part in parts]) for i in range(len(first))))
    if isinstance(first, list):
        return [item for part in parts for item in part]
    return first


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Example):
        return type(b) is Example and same(a.ids, b.ids) and same(a.scale, b.scale)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def leaves(examples: int) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(1, 3), max_size=2).map(lambda rest: (examples, *rest))
    tensors = shapes.map(lambda shape: torch.arange(int(np.prod(shape))).reshape(shape))
    texts = st.lists(st.text(max_size=2), min_size=examples, max_size=examples)
    return st.one_of(
        tensors,
        tensors.map(lambda tensor: tensor.to(torch.float64)),
        tensors.map(lambda tensor: tensor.numpy()),
        texts,
        st.just(torch.tensor(2.5)),
        st.floats(allow_nan=False),
        st.text(max_size=3),
        st.none(),
    )


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # lists and tuples of leaves can mean two things; named containers mean one
    return st.one_of(
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Example, inner, inner),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, int]:
    examples = draw(st.sampled_from([2, 4, 6, 12]))
    parts = draw(st.sampled_from([parts for parts in (1, 2, 3, 4, 6) if not examples % parts]))
    held = draw(st.recursive(leaves(examples), containers, max_leaves=6))
    return {"first": torch.arange(examples), "held": held}, parts


@given(batches())
def test_the_parts_make_up_the_batch(drawn: tuple[Any, int]) -> None:
    """Whatever the nesting, the parts' examples in order are the batch, and each part has its share."""
    batch, parts = drawn
    made = split_batch(batch, parts)
    assert [len(part["first"]) for part in made] == [len(batch["first"]) // parts] * parts
    assert same(rebuilt(made), batch)


def test_tensors_are_views_and_the_batch_is_as_it_was() -> None:
    """No tensor is copied."""
    batch = {"x": torch.arange(6)}
    parts = split_batch(batch, 3)
    assert [part["x"].data_ptr() for part in parts] == [batch["x"][i:].data_ptr() for i in (0, 2, 4)]
    assert list(batch) == ["x"]
    assert batch["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_batch_that_needs_gradients_has_parts_that_do() -> None:
    """Parts are leaves of their own: their gradients do not reach the batch."""
    batch = torch.ones(4, 2, requires_grad=True)
    first, _ = split_batch(batch, 2)
    first.sum().backward()
    assert (first.is_leaf, first.grad is not None, batch.grad) == (True, True, None)


X = torch.arange(4)


@pytest.mark.parametrize(
    "make",
    [
        Encoding,
        OrderedDict,
        lambda items: defaultdict(list, items),
        lambda items: Pair(**items),
    ],
    ids=["UserDict", "OrderedDict", "defaultdict", "namedtuple"],
)
def test_containers_keep_their_type(make: Any) -> None:
    """A library's own mapping, a named tuple: each part is one again."""
    batch = make({"x": X, "y": X * 2})
    for part, start in zip(split_batch(batch, 2), (0, 2), strict=True):
        assert type(part) is type(batch)
        x, y = (part.x, part.y) if isinstance(part, Pair) else (part["x"], part["y"])
        assert (x.tolist(), y.tolist()) == ([start, start + 1], [2 * start, 2 * start + 2])


def test_what_a_mapping_holds_beside_its_items_is_kept() -> None:
    """A tokenizer's encoding keeps its attributes in each part."""
    batch = Encoding({"ids": X})
    batch.encodings = "fast"
    assert [part.encodings for part in split_batch(batch, 2)] == ["fast", "fast"]


def test_dataclasses_are_cut_frozen_ones_too() -> None:
    """A dataclass is rebuilt without its __init__."""
    assert [part.ids.tolist() for part in split_batch(Frozen(X), 2)] == [[0, 1], [2, 3]]
    assert [(part.ids.tolist(), part.scale) for part in split_batch(Example(X), 2)] == [([0, 1], 0.5), ([2, 3], 0.5)]


class Columns(Dataset):
    """A dataset that returns every kind of thing that a DataLoader collates."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        views = (torch.full((3,), float(index)), torch.tensor(index))
        return torch.full((2,), index), index, f"text {index}", {"name": str(index), "views": views}


def test_what_a_loader_collates_is_cut() -> None:
    """Columns in lists, texts in tuples, nested dicts: as torch's default_collate builds them."""
    (batch,) = DataLoader(Columns(), batch_size=4)
    first, second = split_batch(batch, 2)
    x, label, text, more = second
    assert (x[:, 0].tolist(), label.tolist(), text) == ([2, 3], [2, 3], ("text 2", "text 3"))
    assert (more["name"], more["views"][0][:, 0].tolist(), more["views"][1].tolist()) == (["2", "3"], [2, 3], [2, 3])
    assert first[1].tolist() == [0, 1]


def images(count: int) -> list[Tensor]:
    return [torch.full((3, 5 + index, 5), float(index)) for index in range(count)]


def targets(count: int) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.zeros(index, 4), "labels": torch.zeros(index)} for index in range(count)]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_detectors_images_and_targets_are_cut_by_example(kind: type) -> None:
    """One image and one dict of boxes an example, whatever their sizes: lists, or tuples as zip makes them."""
    first, second = split_batch((kind(images(4)), kind(targets(4))), 2)
    assert [image.shape[1] for image in first[0] + second[0]] == [5, 6, 7, 8]
    assert [len(target["boxes"]) for target in first[1] + second[1]] == [0, 1, 2, 3]
    assert {type(part) for part in (*first, *second)} == {kind}


def test_stacked_images_with_targets_by_example_are_cut() -> None:
    """A tensor of images beside a list of targets, with equally many boxes in each."""
    boxes = [{"boxes": torch.full((2, 4), float(index))} for index in range(4)]
    _, second = split_batch([torch.zeros(4, 3, 2, 2), boxes], 2)
    assert second[0].shape == (2, 3, 2, 2)
    assert [float(target["boxes"][0, 0]) for target in second[1]] == [2.0, 3.0]


def test_a_number_in_each_target_tells_that_it_is_an_example() -> None:
    """Even with as many boxes as images, a target with an id is one example."""
    boxes = [{"boxes": torch.zeros(4, 4), "image_id": index} for index in range(4)]
    _, second = split_batch([torch.zeros(4, 3), boxes], 2)
    assert [target["image_id"] for target in second[1]] == [2, 3]


@pytest.mark.parametrize(
    "batch",
    [
        [(torch.zeros(5), index) for index in range(4)],
        [{"ids": torch.zeros(5), "label": torch.tensor(index)} for index in range(4)],
        [(f"text {index}", index) for index in range(4)],
        [torch.zeros(index + 1) for index in range(4)],
        ["a", "b", "c", "d"],
        [["a"], ["b", "c"], [], ["d"]],
    ],
    ids=["tuples", "dicts", "texts with labels", "sequences", "texts", "lists of texts"],
)
def test_a_list_of_examples_is_cut(batch: list[Any]) -> None:
    """A collate_fn that returns the examples as they are."""
    first, second = split_batch(batch, 2)
    assert all(a is b for a, b in zip(first + second, batch, strict=True))
    assert (len(first), len(second)) == (2, 2)


def test_batches_of_two_loaders_are_cut_side_by_side() -> None:
    """zip(labelled, unlabelled) gives two batches in one."""
    first, second = split_batch(([torch.zeros(4, 3), X], [torch.zeros(4, 2), X * 2]), 2)
    assert [part[0][1].tolist() for part in (first, second)] == [[0, 1], [2, 3]]
    assert [part[1][1].tolist() for part in (first, second)] == [[0, 2], [4, 6]]


@pytest.mark.parametrize(
    "whole",
    [torch.tensor(3.0), 0.5, "a text", None, (224, 224), np.array(3.0), {1, 2}, [], {}, torch.float16, len],
    ids=str,
)
def test_what_has_no_examples_goes_into_every_part(whole: Any) -> None:
    """Numbers, texts, 0-dim tensors, sizes, empty containers."""
    for part in split_batch({"x": X, "whole": whole}, 2):
        assert part["whole"] is whole or part["whole"] == whole


def test_one_object_an_example_is_cut_whatever_it_is() -> None:
    """Sparse matrices and objects of one's own stay whole where a list has one an example."""
    graphs = [torch.eye(3).to_sparse() for _ in range(4)]
    holders = [Holder() for _ in range(4)]
    _, second = split_batch({"x": X, "graphs": graphs, "holders": holders}, 2)
    assert all(a is b for a, b in zip(second["graphs"] + second["holders"], graphs[2:] + holders[2:], strict=True))


class Holder:
    def __init__(self) -> None:
        self.x = torch.zeros(3)


class Movable:
    def to(self, device: str) -> Movable:
        return self


class Refusing(UserDict):
    def __setitem__(self, key: str, item: Any) -> None:
        if len(item) == 2:
            raise KeyError("batch size is 4")
        super().__setitem__(key, item)


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype, says torch
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def csr() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # in beta state, says torch
        return torch.eye(4).to_sparse_csr()


def packed() -> Any:
    return torch.nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])


CANNOT = "which split_batch cannot split: pass split="
NOTHING = "holds no tensor, array or list with one element an example: pass split="
DIFFER = "the batch is not split along the first dimension alone; pass split="
EITHER = "may hold one element an example ({} examples), or columns of {} examples: pass split="


def refused() -> Iterator[tuple[str, Any, Any, str]]:
    equal = "micro-batches of equal size: use a batch size that"
    yield (
        "not divisible",
        X,
        3,
        f"ValueError: a batch of 4 examples cannot be split into 3 {equal} 3 divides, or pass split=",
    )
    yield (
        "too few",
        [X, X],
        8,
        f"ValueError: a batch of 4 examples cannot be split into 8 {equal} 8 divides, or pass split=",
    )
    yield "no part", X, 0, "ValueError: parts must be at least 1, got 0"
    yield "half a part", X, 2.0, "TypeError: parts must be an int, got float 2.0"
    yield "a bool", X, True, "TypeError: parts must be an int, got bool True"
    yield "no example", X[:0], 2, "ValueError: the batch (a Tensor) holds no examples: it cannot be split"
    yield "no batch", None, 2, f"TypeError: the batch (a NoneType) {NOTHING}"
    yield "a number", 3, 2, f"TypeError: the batch (an int) {NOTHING}"
    yield "a text", "abcd", 2, f"TypeError: the batch (a str) {NOTHING}"
    yield "only scalars", {"a": torch.tensor(1.0), "size": (2, 2)}, 2, f"TypeError: the batch (a dict) {NOTHING}"
    yield (
        "rows",
        {"a": X, "b": [torch.zeros(3)]},
        2,
        f"ValueError: batch['b'][0] has 3 rows and batch['a'] has 4: {DIFFER}",
    )
    yield "columns", [X, torch.zeros(3, 2)], 2, f"ValueError: batch[1] has 3 rows and batch[0] has 4: {DIFFER}"
    yield "a field", Pair(X, X[:2]), 2, f"ValueError: batch.y has 2 rows and batch.x has 4: {DIFFER}"
    yield (
        "names",
        {"x": X, "classes": ["cat", "dog"]},
        2,
        f"ValueError: batch['classes'] has 2 rows and batch['x'] has 4: {DIFFER}",
    )
    yield (
        "sparse",
        X.to_sparse(),
        2,
        f"TypeError: batch is a sparse_coo tensor, {CANNOT}",
    )
    yield (
        "csr",
        {"a": csr()},
        2,
        f"TypeError: batch['a'] is a sparse_csr tensor, {CANNOT}",
    )
    yield (
        "nested",
        Example(nested()),
        2,
        f"TypeError: batch.ids is a nested tensor, {CANNOT}",
    )
    yield "packed", packed(), 2, f"TypeError: batch is a packed sequence, {CANNOT}"
    yield "own object", (X, Holder()), 2, f"TypeError: batch[1] is a Holder, {CANNOT}"
    yield "movable", Movable(), 2, f"TypeError: batch is a Movable, {CANNOT}"
    yield "views", {"views": [torch.zeros(4, 3)] * 2}, 2, f"ValueError: batch['views'] {EITHER.format(2, 4)}"
    yield "token lists", {"ids": [[1, 2, 3]] * 4}, 2, f"ValueError: batch['ids'] {EITHER.format(4, 3)}"
    yield "examples", [{"ids": torch.zeros(6)}] * 4, 2, f"ValueError: batch {EITHER.format(4, 6)}"
    yield "boxes", (X, [{"boxes": torch.zeros(4, 4)}] * 4), 2, f"ValueError: batch[1] {EITHER.format(4, 4)}"
    yield (
        "read-only",
        MappingProxyType({"x": X}),
        2,
        "TypeError: batch is a mappingproxy, which split_batch cannot fill with a part of its items (TypeError: cannot "
        "pickle 'mappingproxy' object): pass split=",
    )
    yield (
        "refusing",
        [Refusing({"x": X}), X],
        2,
        "TypeError: batch[0] is a Refusing, which split_batch cannot fill with a part of its items (KeyError: 'batch "
        "size is 4'): pass split=",
    )


@pytest.mark.parametrize(("batch", "parts", "message"), [case[1:] for case in refused()], ids=[c[0] for c in refused()])
def test_what_cannot_be_cut_is_said(batch: Any, parts: Any, message: str) -> None:
    """Each error names what it is about, what was got, and what to do."""
    with pytest.raises((TypeError, ValueError)) as caught:
        split_batch(batch, parts)
    assert f"{caught.type.__name__}: {caught.value}" == message
