"""What is done with a damaged file, and how that may end."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from fuzz_seeds import build_setup

from tl_resume import StateFileError, diff_states, load_training_state, training_state
from tl_resume._cli import main as command_line
from tl_resume._format import StateFile, write_state
from tl_resume._format._chunks import HostCopies
from tl_resume._format._encode import encode_state
from tl_telemetry import capture_state, compare_captures

# All changes to a setup are looked for where it was touched, and now and then where it should not have been.
CAPTURES = 20


class BrokenPromiseError(Exception):
    """A file was not treated as promised; the message says how."""


@dataclass
class Damaged:
    """A damaged file, as it lies on the disk.

    Attributes:
        number: Which input it is.
        path: The file or folder.
        whole: The undamaged one.
        seed: The name of the undamaged one.
        changed: Whether it holds other bytes than that.
        sealed: Whether digests were mended, so that other content is no fault.
    """

    number: int
    path: Path
    whole: Path
    seed: str
    changed: bool
    sealed: bool


def rejection(path: Path, call: Callable[[], Any]) -> tuple[str, Any]:
    """Call, and check the error where there is one.

    Returns:
        How it ended, ``""`` where nothing was raised, and what was returned.
    """
    try:
        return "", call()
    except (ValueError, OSError) as error:
        if str(path) not in str(error):
            raise BrokenPromiseError(
                f"the error does not name the file: {type(error).__name__}: {error!s:.300}"
            ) from error
        _check_causes(error)
        kind = "OSError" if isinstance(error, OSError) else type(error).__name__
        return f"{kind}: {str(error).replace(str(path), 'FILE')}", None


def _check_causes(error: BaseException | None) -> None:
    """Find an allocation that failed, behind an error that says something else."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate" in str(error):
            raise BrokenPromiseError(f"much memory was asked for: {type(error).__name__}: {error!s:.300}") from error
        error = error.__cause__ or error.__context__


def fingerprint(state: Any) -> str:
    """Digest a nested state: types, values, bits, layout and what is shared."""
    tree, plan = encode_state(state)
    digest = xxhash.xxh3_128()
    stored = [(each.name, str(each.dtype), each.shape, each.strides) for each in plan.stored]
    digest.update(json.dumps([tree, plan.views, stored]).encode())
    copies = HostCopies()
    for each in plan.stored:
        for chunk, _owner in copies.chunks(each.tensor):
            digest.update(chunk)
    return str(digest.hexdigest())


@dataclass
class Targets:
    """Read damaged files, with what is known about the whole ones.

    Attributes:
        scratch: A file that may be written.
    """

    scratch: Path
    _known: dict[Any, Any] = field(default_factory=dict)
    _setups: dict[str, Any] = field(default_factory=dict)
    _rng: tuple[Any, ...] = field(default_factory=lambda: take_rng())

    def read(self, file: Damaged) -> str:
        """Open a state file and read all of it: an error, or equal content."""
        ended, state = rejection(file.path, lambda: self._read_all(file))
        if ended:
            return ended
        found = fingerprint(state)
        if not file.sealed:
            if found != self._once(("read", file.seed), lambda: fingerprint(self._read_all(file, whole=True))):
                raise BrokenPromiseError("a damaged file was read, and its content is another")
            return "equal content"
        write_state(self.scratch, state, durable=False)
        with StateFile(self.scratch) as again:
            if fingerprint(again.state()) != found:
                raise BrokenPromiseError("what was read cannot be written and read again")
        return "other content, digests mended"

    def _read_all(self, file: Damaged, *, whole: bool = False) -> Any:
        with StateFile(file.whole if whole else file.path) as opened:
            opened.skeleton()
            if file.number % 2:
                return opened.state()
            damaged = opened.damaged()
            if not damaged:
                return opened.state(verify=False)
            try:
                opened.state()
            except StateFileError:
                raise
            raise BrokenPromiseError(f"the bytes of {damaged} differ from their digests and were read")

    def load(self, file: Damaged) -> str:
        """Load a training state: an error and the setup as it was, or the content of the file."""
        put_rng_back(self._rng)
        kept = self._setups.pop(file.seed, None) or _kept(build_setup(file.seed))  # back only if it is as it was
        setup, before = kept["setup"], kept["marks"]
        ended, _ = rejection(file.path, lambda: load_training_state(setup, file.path))
        after = marks(setup)
        if ended:
            changed = [name for name, mark in before.items() if after.get(name) != mark]
            if not changed and ("could not be restored" in ended or not file.number % CAPTURES):
                changed = [str(each) for each in compare_captures(kept["capture"], capture_state(setup))]
            if changed:
                raise BrokenPromiseError(f"the setup was changed by a file that was refused ({ended:.300}): {changed}")
            self._setups[file.seed] = kept
            return ended
        del after["objects"]
        if not file.sealed and after != self._once(("load", file.seed), lambda: self._marks_of_whole(file)):
            raise BrokenPromiseError("a damaged file was loaded, and its content is another")
        if file.sealed:
            self._check_loaded(setup, file.path)
        put_rng_back(self._rng)
        return "other content, digests mended" if file.sealed else "equal content"

    def _marks_of_whole(self, file: Damaged) -> dict[str, Any]:
        setup = build_setup(file.seed)
        load_training_state(setup, file.whole)
        found = marks(setup)
        del found["objects"]
        put_rng_back(self._rng)
        return found

    def _check_loaded(self, setup: Any, path: Path) -> None:
        """Check that the setup holds what the file says, where that cannot be changed on the way."""
        with StateFile(path) as file:
            for section in ("model", "modes", "gradients", "step_index"):
                held, wanted = training_state(setup)[section], file.part(section)
                held, wanted = (
                    dict(sorted(each.items())) if isinstance(each, dict) else each for each in (held, wanted)
                )
                if fingerprint(held) != fingerprint(wanted):
                    raise BrokenPromiseError(f"{section} was loaded, and the setup holds something else")
        draw(setup)

    def diff(self, file: Damaged) -> str:
        """Compare, show and verify a damaged file, and write what was found."""
        rng = random.Random(file.number)
        if rng.random() < 0.5:
            pair = [file.path, file.whole] if rng.random() < 0.5 else [file.whole, file.path]
            ended, found = rejection(file.path, lambda: diff_states(*pair, rtol=rng.choice((0.0, 1e-3))))
            if ended:
                return ended
            json.dumps(found.as_dict(), allow_nan=False)
            str(found)
            if found.same and not file.changed:
                return "the same"
            return "listed as unreadable" if found.unreadable else "compared"
        command = rng.choice((["show"], ["verify"], ["diff"]))
        command += rng.choice(([], ["--json"], ["--json"]))
        if command[0] == "show" and rng.random() < 0.5:
            command.append("--all")
        files = [str(file.path)] + ([str(file.whole)] if command[0] == "diff" else [])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command_line([*command, *files])
        if status == 2 and str(file.path) not in out.getvalue() + err.getvalue():
            raise BrokenPromiseError(f"the trouble does not name the file: {err.getvalue():.300}")
        if status == 0 and command[0] == "verify" and file.changed and not file.sealed:
            raise BrokenPromiseError("a damaged file was verified as intact")
        return f"{command[0]} ended with {status}"

    def _once(self, key: Any, compute: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]


def _kept(setup: Any) -> dict[str, Any]:
    return {"setup": setup, "marks": marks(setup), "capture": capture_state(setup)}


def take_rng() -> tuple[Any, ...]:
    """Take the states of the global generators."""
    return random.getstate(), torch.get_rng_state(), np.random.get_state(legacy=False)


def put_rng_back(states: tuple[Any, ...]) -> None:
    """Set the global generators."""
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    np.random.set_state(states[2])


def draw(setup: Any) -> None:
    """Draw from all generators: one with an impossible state raises, or reads memory that is not its own."""
    random.gauss(0, 1)
    np.random.normal(size=700)
    torch.randn(700)
    torch.rand(700, generator=setup.state["masks"])
    setup.state["rows"].integers(5, size=9, dtype=np.int32)


def marks(setup: Any) -> dict[str, Any]:
    """Digest a setup and the global generators, part by part; also which objects it is made of."""
    found: dict[str, Any] = {}
    for name, value in _parts(setup):
        digest = xxhash.xxh3_64()
        _update(digest, value)
        found[name] = digest.hexdigest()
    named = [*setup.model.named_parameters(), *setup.model.named_buffers()]
    found["objects"] = [id(tensor) for _, tensor in named] + [id(value) for value in vars(setup).values()]
    found["python rng"] = repr(random.getstate())
    return found


def _parts(setup: Any) -> Iterator[tuple[str, Any]]:
    yield "model", setup.model.state_dict()
    for name, parameter in setup.model.named_parameters():
        yield f"gradient of {name}", parameter.grad
    yield "modes", [module.training for module in setup.model.modules()]
    for name, optimizer in setup.optimizers.items():
        yield f"optimizer {name}", optimizer.state_dict()
        yield f"defaults of {name}", optimizer.defaults
    for name, scheduler in setup.schedulers.items():
        yield f"scheduler {name}", {key: value for key, value in vars(scheduler).items() if key != "optimizer"}
    yield "scaler", None if setup.scaler is None else setup.scaler.state_dict()
    for name, value in setup.state.items():
        yield f"state {name}", value
    yield "counts", setup.counts
    yield "attributes", sorted(vars(setup))
    yield "step_index", setup.step_index
    yield "torch rng", torch.get_rng_state()
    yield "numpy rng", np.random.get_state(legacy=False)


def _update(digest: Any, value: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.layout is torch.strided and value.numel():
            digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            digest.update(repr(key).encode("utf-8", "backslashreplace"))
            _update(digest, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _update(digest, item)
    elif isinstance(value, torch.Generator):
        _update(digest, value.get_state())
    elif isinstance(value, np.random.Generator):
        _update(digest, value.bit_generator.state)
    elif hasattr(value, "state_dict"):
        _update(digest, value.state_dict())
    elif isinstance(value, int):
        digest.update(hex(value).encode())  # repr() refuses very long ones
    elif isinstance(value, (float, str, type(None))):
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
