"""Damage files at random and read them: every input must end in an error that names the file, or in equal content.

Run it with ``hatch run fuzz --inputs 100000 --seed 0``. Every input is made from the seed and its own number alone, so
that a failing one is run again by ``--only NUMBER`` and the same seed. The inputs run in a child with limited memory;
the parent sees when it crashes or hangs. Failing inputs are kept in the folder of ``--keep``.

Read are state files (``StateFile``), training states (``load_training_state``, which must leave the setup as it was)
and all that ``diff_states`` and the command line read. Anything but an error of the ``ValueError`` family or an
``OSError`` that names the file is a failure: another exception, more than ``--seconds-each``, an allocation beyond
``--memory``, a changed setup, other content than was saved (where no digest was mended), files left open.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import random
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz_mutations import blind, changed_json, changed_zip, structured
from fuzz_seeds import write_seeds
from fuzz_targets import BrokenPromiseError, Damaged, Targets, put_rng_back, take_rng

TARGETS = ("state", "load", "diff")
_WEIGHTS = (6, 3, 2)
_LINKS = (
    "to itself",
    "to nothing",
    "to the whole file",
    "to a folder",
    "to a device",
    "pipe",
    "folder",
    "socket",
    "missing",
)
_LINK_SHARE = 0.02
# nothing of the seeds is larger than 50 kB
MEMORY_BYTES = 1 << 30
SECONDS_EACH = 5.0


class _HangError(BaseException):
    """An input took too long; no handler of the code under test may swallow it."""


@dataclass
class Failure:
    """An input that did not end as it must."""

    number: int
    target: str
    change: str
    what: str
    trace: str

    def __str__(self) -> str:
        return f"input {self.number} ({self.target}; {self.change}): {self.what}"


@dataclass
class Tally:
    """How the inputs ended."""

    inputs: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


class Fuzzer:
    """Make inputs from numbers, and run them.

    Args:
        seed: What the inputs are made from, with their numbers.
        folder: An empty folder to work in.
        keep: Where failing inputs are kept.
        seconds_each: How long one may take.
    """

    def __init__(
        self, seed: int, folder: Path, *, keep: Path | None = None, seconds_each: float = SECONDS_EACH
    ) -> None:
        self._seed, self._folder, self._keep, self._seconds_each = seed, folder, keep, seconds_each
        (folder / "whole").mkdir()
        (folder / "damaged").mkdir()
        self._seeds = write_seeds(folder / "whole")
        self._bytes = {
            path: path.read_bytes() for named in self._seeds.values() for paths in named.values() for path in paths
        }
        self._targets = Targets(folder / "scratch")
        self.tally = Tally()

    def run(self, number: int) -> None:
        """Make one input, run it, and count how it ends."""
        target, file, change = self.damage(number)
        run = {"state": self._targets.read, "load": self._targets.load, "diff": self._targets.diff}[target]
        self.tally.inputs += 1
        try:
            with _alarm(self._seconds_each):
                ended = run(file)
        except BrokenPromiseError as broken:
            self._fail(file, target, change, str(broken), broken)
        except _HangError as hang:
            self._fail(file, target, change, f"took more than {self._seconds_each} s", hang)
        except Exception as error:  # noqa: BLE001  which exception escapes is what is looked for
            self._fail(file, target, change, f"{type(error).__name__} escaped: {error!s:.300}", error)
        else:
            self.tally.outcomes[target, ended.partition(":")[0]] += 1
        finally:
            _remove(file.path)

    def damage(self, number: int) -> tuple[str, Damaged, str]:
        """Make one input: what is to read it, the file, and what was done to it."""
        rng = random.Random(f"{self._seed}:{number}")
        target = rng.choices(TARGETS, _WEIGHTS)[0]
        name = rng.choice(list(self._seeds[target]))
        file, change = self._damage(rng, number, name, self._seeds[target][name])
        return target, file, f"{name}: {change}"

    def _damage(self, rng: random.Random, number: int, name: str, paths: list[Path]) -> tuple[Damaged, str]:
        whole = paths[0] if len(paths) == 1 else paths[0].parent
        path = self._folder / "damaged" / whole.name
        if rng.random() < _LINK_SHARE:
            kind = rng.choice(_LINKS)
            _place_link(path, kind, whole)
            return Damaged(number, path, whole, name, kind != "to the whole file", False), kind
        chosen = rng.choice(paths)
        original = self._bytes[chosen]
        data, change, seal = _changed(rng, chosen, original)
        if len(paths) == 1:
            path.write_bytes(data)
        else:
            path.mkdir()
            for other in paths:
                (path / other.name).write_bytes(data if other is chosen else self._bytes[other])
            change = f"{chosen.name}: {change}"
        return Damaged(
            number, path, whole, name, data != original, seal != "none"
        ), f"{change} (digests mended: {seal})"

    def _fail(self, file: Damaged, target: str, change: str, what: str, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        self.tally.failures.append(Failure(file.number, target, change, what, trace))
        self.tally.outcomes[target, "FAILED"] += 1
        if self._keep is not None:
            kept = self._keep / f"seed-{self._seed}-input-{file.number}"
            _remove(kept)
            if file.path.is_file() or (file.path.is_dir() and not file.path.is_symlink()):
                (shutil.copytree if file.path.is_dir() else shutil.copy)(file.path, kept)
            kept.with_name(f"{kept.name}.txt").write_text(
                f"{target}: {change}\n{what}\n\n{trace}", errors="backslashreplace"
            )


def _changed(rng: random.Random, path: Path, data: bytes) -> tuple[bytes, str, str]:
    """Damage the bytes of one file; the last that is returned says which digests were mended."""
    by_structure = rng.random() < 0.65
    if by_structure and path.suffix == ".safetensors":
        return structured(rng, data)
    if by_structure and path.suffix == ".json":
        return *changed_json(rng, data), "none"
    if by_structure and data.startswith(b"PK"):
        return *changed_zip(rng, data), "none"
    return *blind(rng, data), "none"


def _place_link(path: Path, kind: str, whole: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)  # bind() takes no path as long as a temporary folder's may be
    elif kind != "missing":
        to = {"to itself": path, "to nothing": path.parent / "nothing", "to the whole file": whole}
        path.symlink_to({**to, "to a folder": whole.parent, "to a device": Path("/dev/zero")}[kind])


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """Let the process take so many bytes more than it has, or an allocation fails."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fuzz(
    numbers: Any,
    *,
    seed: int = 0,
    seconds: float = float("inf"),
    seconds_each: float = SECONDS_EACH,
    memory_bytes: int = MEMORY_BYTES,
    max_failures: float = float("inf"),
    keep: Path | None = None,
    progress: Any = None,
) -> Tally:
    """Run inputs in this process.

    Args:
        numbers: The numbers of the inputs.
        seed: What they are made from.
        seconds: How long to go on.
        seconds_each: How long one may take.
        memory_bytes: How much more memory than before the process may take.
        max_failures: After how many failures to stop.
        keep: A folder for the inputs that fail.
        progress: Called with the number of each input before it is run.

    Returns:
        How they ended.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of odd states
        rng = take_rng()
        fuzzer = Fuzzer(seed, Path(folder).resolve(), keep=keep, seconds_each=seconds_each)
        opened = len(os.listdir("/proc/self/fd"))
        try:
            with limited_memory(memory_bytes):
                for number in numbers:
                    if time.monotonic() > end or len(fuzzer.tally.failures) >= max_failures:
                        break
                    if progress is not None:
                        progress(number)
                    fuzzer.run(number)
        finally:
            put_rng_back(rng)
        gc.collect()
        left = len(os.listdir("/proc/self/fd")) - opened
        if left > 0 and not fuzzer.tally.failures:  # the traceback of a failure may hold a file
            fuzzer.tally.failures.append(Failure(-1, "all", "", f"{left} files were left open", ""))
    return fuzzer.tally


def _child(options: argparse.Namespace, numbers: Any, current: Any, results: Any) -> None:
    def progress(number: int) -> None:
        current.value = number

    tally = fuzz(
        numbers,
        seed=options.seed,
        seconds=options.seconds,
        seconds_each=options.seconds_each,
        memory_bytes=int(options.memory * 1e6),
        max_failures=options.max_failures,
        keep=options.keep,
        progress=progress,
    )
    results.send(tally)


def _watched(options: argparse.Namespace, numbers: Any) -> tuple[Tally, str]:
    """Run the inputs in a child; say how it died, if it did."""
    context = multiprocessing.get_context("spawn")
    current = context.Value("q", -1, lock=False)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(options, numbers, current, sender))
    child.start()
    sender.close()
    last, since = -1, time.monotonic()
    while not receiver.poll(1.0):
        if current.value != last:
            last, since = current.value, time.monotonic()
        # the alarm ends what runs in Python; what does not come back from C is ended here
        elif last >= 0 and time.monotonic() - since > 10 * options.seconds_each:
            child.kill()
            child.join()
            return Tally(), f"input {last} hangs in code that no signal ends"
    try:
        tally = receiver.recv()
    except EOFError:
        child.join()
        return Tally(), f"input {current.value} ended the process with status {child.exitcode}"
    child.join()
    return tally, ""


def main(arguments: list[str] | None = None) -> int:
    """Run the inputs that the command line asks for; 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="how many, default 100,000")
    parser.add_argument("--seed", type=int, default=0, help="what they are made from, default 0")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one, default 0")
    parser.add_argument("--only", type=int, help="run the input of this number alone")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--seconds-each", type=float, default=SECONDS_EACH, help="what one may take, default 5")
    parser.add_argument("--memory", type=float, default=MEMORY_BYTES / 1e6, help="MB beyond those at the start, 1074")
    parser.add_argument("--max-failures", type=float, default=100, help="stop after so many failures, default 100")
    parser.add_argument("--keep", type=Path, help="the folder for inputs that fail")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    numbers = range(options.first, options.first + options.inputs) if options.only is None else [options.only]
    start = time.monotonic()
    tally, death = _watched(options, numbers)
    took = time.monotonic() - start
    print(f"{tally.inputs:,} inputs of seed {options.seed} in {took:.0f} s ({tally.inputs / took:,.0f} a second)")
    for (target, ended), count in sorted(tally.outcomes.items(), key=lambda item: (item[0][0], -item[1])):
        print(f"  {target:6} {count:8,}  {ended}")
    kinds: dict[str, list[Failure]] = {}
    for failure in tally.failures:
        kinds.setdefault(f"{failure.target}: {failure.what:.90}", []).append(failure)
    for alike in sorted(kinds.values(), key=len, reverse=True):
        print(f"{len(alike):,} x {alike[0]}")
        print("".join(f"  {line}\n" for line in alike[0].trace.splitlines()[-9:]))
    if death:
        print(f"{death}: run it again with --seed {options.seed} --only {death.split()[1]}")
    print("all ended as they must" if not (tally.failures or death) else f"{len(tally.failures):,} failures {death}")
    return 1 if tally.failures or death else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(main())
