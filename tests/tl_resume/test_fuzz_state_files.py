"""A short run of the fuzz, and that it can fail."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_resume import StateFileError, _restore, diff_states, load_training_state, save_training_state
from tl_resume._format import StateFile, _decode, _header, _read, write_state

FUZZ = Path(__file__).parents[1] / "fuzz"


@pytest.fixture(scope="module")
def state_files():
    """Import the fuzz as the program that it is: its modules import each other by name."""
    sys.path.insert(0, str(FUZZ))
    try:
        spec = importlib.util.spec_from_file_location("state_files", FUZZ / "state_files.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["state_files"] = module  # where its dataclasses look
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FUZZ))
        for name in ("state_files", "fuzz_mutations", "fuzz_seeds", "fuzz_targets", "fuzz_values"):
            sys.modules.pop(name, None)


def test_damaged_files_end_in_an_error_that_names_them_or_in_equal_content(state_files):
    """A few inputs of each kind; ``hatch run fuzz`` runs as many as are wanted."""
    tally = state_files.fuzz(range(500))
    assert [str(failure) for failure in tally.failures] == []
    assert tally.inputs == 500
    # every way to end was met, so that the run is one of the whole path
    met = {outcome for outcome, count in tally.outcomes.items() if count}
    assert met >= {
        ("state", "StateFileError"),
        ("state", "OSError"),
        ("state", "equal content"),
        ("state", "other content, digests mended"),
        ("load", "StateFileError"),
        ("load", "ValueError"),
        ("load", "other content, digests mended"),
        ("diff", "StateFileError"),
        ("diff", "compared"),
        ("diff", "listed as unreadable"),
        ("diff", "verify ended with 1"),
    }


def test_an_input_depends_on_nothing_but_the_seed_and_its_number(state_files, tmp_path):
    """The same number gives the same bytes, whatever ran before it; another seed gives others."""
    made = []
    for index, (seed, numbers) in enumerate(((4, (0, 2)), (4, (2,)), (5, (2,)))):
        folder = tmp_path / str(index)
        folder.mkdir()
        fuzzer = state_files.Fuzzer(seed, folder)
        for number in numbers[:-1]:
            fuzzer.run(number)
        target, file, change = fuzzer.damage(numbers[-1])
        made.append((target, change, file.path.read_bytes()))
    assert made[0] == made[1]
    assert made[1] != made[2]


# What is broken, and what the fuzz says.


def _believe_the_header(monkeypatch):
    prefix = len(_header.PREFIX)
    stated = lambda header: bytes(header[prefix : prefix + 32]).decode("latin1")  # noqa: E731
    monkeypatch.setattr(_header, "header_digest", stated)


def _let_errors_escape(monkeypatch):
    monkeypatch.setattr(_decode.Decoder, "state", lambda self, *keys: self._decode(self._parsed.tree, 0))


def _touch_before_checking(monkeypatch):
    check = _restore._check

    def touching(setup, file, saved):
        setup.optimizer.param_groups[0]["lr"] += 1
        return check(setup, file, saved)

    monkeypatch.setattr(_restore, "_check", touching)


def _hang(monkeypatch):
    def skeleton(self):
        while True:
            pass

    monkeypatch.setattr(StateFile, "skeleton", skeleton)


def _take_memory(monkeypatch):
    def damaged(self, *_, **__):
        try:
            bytearray(1 << 40)
        except MemoryError:
            raise StateFileError(f"{self.path} is damaged") from None

    monkeypatch.setattr(StateFile, "damaged", damaged)


def _leave_files_open(monkeypatch):
    monkeypatch.setattr(StateFile, "close", lambda self: None)


def _name_no_file(monkeypatch):
    def unnamed(*_):
        raise StateFileError("it is damaged")

    monkeypatch.setattr(_read, "parse_header", unnamed)


def _skip_the_digests(monkeypatch):
    monkeypatch.setattr(StateFile, "damaged", lambda self, *_, **__: [])


@pytest.mark.parametrize(
    ("break_it", "inputs", "says"),
    [
        (_believe_the_header, 500, "a damaged file was read, and its content is another"),
        (_let_errors_escape, 500, "Error escaped: "),
        (_touch_before_checking, 500, "the setup was changed by a file that was refused "),
        (_hang, 500, "took more than 0.2 s"),
        (_take_memory, 500, "much memory was asked for: MemoryError"),
        (_leave_files_open, 10, "files were left open"),
        (_name_no_file, 500, "the error does not name the file: StateFileError: it is damaged"),
        (_skip_the_digests, 500, "a damaged file was loaded, and its content is another"),
    ],
)
def test_a_broken_reader_is_seen(break_it, inputs, says, state_files, monkeypatch, tmp_path):
    """Each promise that is broken on purpose is reported, and the input that shows it is kept."""
    break_it(monkeypatch)
    seconds_each = 0.2 if break_it is _hang else 5.0
    tally = state_files.fuzz(range(inputs), seconds_each=seconds_each, max_failures=1, keep=tmp_path)
    (failure,) = tally.failures
    assert says in str(failure)
    if failure.number >= 0:
        kept = tmp_path / f"seed-0-input-{failure.number}"
        assert kept.exists()
        text = kept.with_name(f"{kept.name}.txt").read_text()
        assert text.startswith(f"{failure.target}: {failure.change}\n{failure.what}\n\nTraceback ")


# What the fuzz has found.


def _forged(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the metadata of a file, whose digest is right again."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    meta = json.loads(header["__metadata__"][_header.KEY])
    change(meta)
    header["__metadata__"][_header.KEY] = json.dumps({**meta, "header": "0" * 32}, separators=(",", ":"))
    text = json.dumps(header, separators=(",", ":")).encode()
    begin = len(_header.PREFIX)
    text = text[:begin] + _header.header_digest(text).encode() + text[begin + 32 :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


class Ema:
    """An object with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _setup(**state: Any) -> TrainingSetup:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingSetup(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3), state=state)


def test_a_refused_scheduler_keeps_no_attribute_of_the_file(tmp_path):
    """A scheduler's load_state_dict updates its __dict__ item by item, and may stop halfway."""
    path = tmp_path / "state"
    setup = _setup()
    save_training_state(setup, path)

    def change(meta: dict[str, Any]) -> None:
        meta["state"]["schedulers"]["scheduler"] = [["gamma", 9], ["stray", 1], ["optimizer", 2], 3]

    _forged(path, change)
    before = dict(vars(setup.scheduler))
    with pytest.raises(ValueError) as caught:
        load_training_state(setup, path)
    assert str(caught.value) == (
        f"{path}: schedulers['scheduler'] could not be restored (TypeError: cannot convert dictionary update sequence "
        "element #3 to a sequence); the setup is as it was"
    )
    assert vars(setup.scheduler) == before


@pytest.mark.parametrize("tag", ["$default_dict", "$counter", "$ordered_dict"])
def test_a_training_state_in_another_mapping_is_loaded(tag, tmp_path):
    """Parts of a state are found whatever kind of dict they lie in."""
    path = tmp_path / "state"
    save_training_state(_setup(), path)

    def change(meta: dict[str, Any]) -> None:
        pairs = [[name, section] for name, section in meta["state"].items()]
        meta["state"] = {tag: {"factory": "list", "items": pairs} if tag == "$default_dict" else pairs}

    _forged(path, change)
    assert load_training_state(_setup(), path) == 0


@pytest.mark.parametrize(
    ("node", "fault"),
    [
        ({"$float": "00"}, "its state cannot be rebuilt (a float of 1 bytes)"),
        ({"$numpy_scalar": {"dtype": "<U1", "bytes": "ffffffff"}}, "a numpy scalar of its state is no text"),
        ({"$int": hex(10**5000)}, "its state cannot be rebuilt (an int of 16,610 bits)"),
        ({"$set": [{"$tensor": "w"}]}, "the tensor 'w' is a key or the member of a set"),
        ({"$counter": [[{"$tuple": [{"$tensor": "w"}]}, 1]]}, "the tensor 'w' is a key or the member of a set"),
    ],
)
def test_values_that_no_state_has_are_faults_of_the_file(node, fault, tmp_path):
    """A float of another length, a character beyond Unicode, a number that no message can hold, a tensor as a key."""
    path = tmp_path / "state"
    write_state(path, {"a": 1, "w": torch.ones(1)}, durable=False)
    _forged(path, lambda meta: meta["state"].update(a=node))
    with pytest.raises(StateFileError) as caught:
        StateFile(path)
    assert str(caught.value) == f"{path} is damaged: {fault}"


@pytest.mark.parametrize(
    ("state", "place"), [({"a": 10**5000}, "state['a']"), ({10**5000: 1}, "the key a huge number of state")]
)
def test_ints_that_cannot_be_written_out_are_not_saved(state, place, tmp_path):
    """Python refuses to write them in decimal, wherever they would be shown."""
    with pytest.raises(TypeError) as caught:
        write_state(tmp_path / "state", state)
    assert str(caught.value) == (
        f"{place} is an int of 16,610 bits, more than the 14,000 that can be saved: "
        "keep the bytes of value.to_bytes() instead"
    )


@pytest.mark.parametrize("name", ["state", "step_index", "optimizer", "load", "__class__"])
def test_an_attribute_cannot_take_the_place_of_a_part_of_the_setup(name, tmp_path):
    """Nor that of an object which the setup has under another name."""
    path = tmp_path / "state"
    setup = _setup(ema=Ema())
    setup.load = setup.state["ema"]
    save_training_state(setup, path)
    _forged(path, lambda meta: meta["state"]["attributes"].update({name: "x"}))
    with pytest.raises(ValueError) as caught:
        load_training_state(setup, path)
    assert str(caught.value) == f"{path} does not fit the setup, which is as it was:\n  attributes: unexpected {name}"


def test_a_view_of_a_dtype_that_no_file_holds_is_refused(tmp_path):
    """Quantized numbers lack their scale, others no operation knows."""
    path = tmp_path / "state"
    whole = torch.zeros(4, dtype=torch.uint8)
    write_state(path, [whole, whole[1:]], durable=False)
    _forged(path, lambda meta: meta["views"][0].update(dtype="quint8"))
    with pytest.raises(StateFileError) as caught:
        StateFile(path)
    assert str(caught.value) == f"{path} is damaged: view 0 is one of '0' as 'quint8'"


def _python_spare(tree: dict[str, Any]) -> None:
    tree["rng"]["python"]["$tuple"][2] = "x"


def _numpy_place(tree: dict[str, Any]) -> None:
    tree["rng"]["numpy"]["state"]["pos"] = 10**6


def _numpy_key(tree: dict[str, Any]) -> None:
    key = {"dtype": "<u4", "shape": [624], "order": "C", "tensor": "attributes.zeros"}
    tree["rng"]["numpy"]["state"]["key"] = {"$numpy_array": key}
    tree["attributes"]["zeros"] = {"$numpy_array": {**key, "tensor": "rng.numpy.state.key"}}


def _philox_place(tree: dict[str, Any]) -> None:
    tree["generators"]["state['rows']"]["buffer_pos"] = -1


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_python_spare, "rng of python cannot be set (the spare normal number is a str)"),
        (_numpy_place, "rng of numpy cannot be set (pos is 1000000, outside of 0 to 624)"),
        (_numpy_key, "rng of numpy cannot be set (its key is zero, from which only zeros follow)"),
        (_philox_place, "the generator state['rows'] cannot be set (buffer_pos is -1, outside of 0 to 4)"),
    ],
)
def test_generators_that_would_draw_from_elsewhere_are_refused(change, fault, tmp_path):
    """Python and numpy take such states without a word, and fail or read foreign memory when they draw."""
    path = tmp_path / "state"
    setup = _setup(rows=np.random.Generator(np.random.Philox(0)))
    setup.zeros = np.zeros(624, dtype="<u4")
    save_training_state(setup, path)
    _forged(path, lambda meta: change(meta["state"]))
    with pytest.raises(ValueError) as caught:
        load_training_state(setup, path)
    assert str(caught.value) == f"{path} does not fit the setup, which is as it was:\n  {fault}"


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "model.safetensors.index.json", "../model.safetensors"])
def test_shards_that_are_no_files_beside_the_index_are_refused(name, tmp_path):
    """Names that no file can have, and the index itself."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(StateFileError) as caught:
        diff_states(index, index)
    assert str(caught.value) == f"{index}: names the shard {name!r}, which is not a file beside it"


def test_a_sparse_tensor_beside_an_optimizer_that_goes_by_index_is_compared(tmp_path):
    """It has no memory of its own by which tied tensors are known."""
    path = tmp_path / "state.pt"
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": {**model.state_dict(), "mask": torch.eye(2).to_sparse()}, "optimizer": optimizer.state_dict()}
    torch.save(state, path)
    assert diff_states(path, path).same
