"""What saving, loading, comparing and checking a resume cost, beside what else would do the same.

Run it with ``hatch run bench-resume``. The state is that of a model with Adam. Each row is the median of rounds in
which its ways take turns, so that whatever else the machine and the disk do falls on all of them. Saving includes the
digests and the fsync of file and folder; loading includes checking every digest and copying into the live setup.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from tl_core import TrainingSetup, build_setup, move_to_device, preserve_rng, seed_everything
from tl_resume import (
    check_resume_equivalent,
    diff_states,
    load_training_state,
    save_training_state,
)

WIDTH = 2048
NUM_ROUNDS = 5


def model_of(gigabytes: float) -> nn.Module:
    """Build a model of square layers whose weights and two Adam moments take so many GB."""
    layers = max(1, round(gigabytes * 1e9 / (3 * 4 * WIDTH * WIDTH)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def stepped(gigabytes: float, device: torch.device) -> TrainingSetup:
    """Build a setup whose optimizer has its moments."""
    model = model_of(gigabytes).to(device)
    setup = TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=1e-4))
    model(torch.randn(4, WIDTH, device=device)).pow(2).mean().backward()
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    return setup


@dataclass
class Row:
    """The seconds of several ways to do one thing.

    Attributes:
        name: what is done.
        times: seconds of each round, by way; the first way is ours.
        bars: for the other ways, what must hold of ``ours / theirs``, in words.
    """

    name: str
    times: dict[str, list[float]]
    bars: dict[str, str]

    def lines(self) -> list[str]:
        """Write the row, one line a way."""
        medians = {way: statistics.median(times) for way, times in self.times.items()}
        ours, *_ = medians
        written = []
        for way, seconds in medians.items():
            spread = f"{min(self.times[way]):.2f}-{max(self.times[way]):.2f}"
            ratio = "" if way == ours else f"{medians[ours] / seconds:.2f}"
            written.append(
                f"{self.name:<12}  {way:<30}  {seconds:>8.2f}  {spread:>12}  {ratio:>6}  {self.bars.get(way, '')}"
            )
        return [line.rstrip() for line in written]


def take_turns(
    name: str,
    ways: dict[str, Callable[..., Any]],
    bars: dict[str, str],
    device: torch.device,
    rounds: int,
    prepare: Callable[[], tuple[Any, ...]] = tuple,
) -> Row:
    """Time each way once a round; what ``prepare`` returns is made before, untimed, and handed to it."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            given = prepare()
            gc.collect()
            os.sync()  # what an earlier way left to be written is not this one's
            _wait(device)
            start = perf_counter()
            run(*given)
            _wait(device)
            times[way].append(perf_counter() - start)
    return Row(name, times, bars)


def saving(setup: TrainingSetup, folder: Path, device: torch.device, rounds: int) -> Row:
    """Save the state durably: ours, torch.save with an fsync, dd of as many bytes."""
    ours, theirs, raw = folder / "ours", folder / "theirs", folder / "raw"
    size = sum(p.numel() * p.element_size() for p in setup.model.parameters()) * 3

    def torch_save() -> None:
        torch.save({"model": setup.model.state_dict(), "adam": setup.optimizer.state_dict()}, theirs)
        _sync(theirs)

    def dd() -> None:
        command = ["dd", "if=/dev/zero", f"of={raw}", "bs=1M", f"count={size >> 20}", "conv=fsync"]
        subprocess.run(command, check=True, capture_output=True)

    ways = {"save_training_state": lambda: save_training_state(setup, ours), "torch.save + fsync": torch_save, "dd": dd}
    bars = {"torch.save + fsync": "<= 1", "dd": "<= 1.5"}
    if shutil.which("dd") is None:
        del ways["dd"], bars["dd"]
    row = take_turns("save", ways, bars, device, rounds)
    raw.unlink(missing_ok=True)
    return row


def loading(gigabytes: float, folder: Path, device: torch.device, rounds: int) -> Row:
    """Load into a fresh setup: ours with all digests checked, torch.load(mmap=True) with copies of what it maps."""
    for name in ("ours", "theirs"):  # both from the page cache, whichever way they were written
        (folder / name).read_bytes()

    def fresh() -> tuple[TrainingSetup]:
        model = model_of(gigabytes).to(device)
        return (TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=1e-4)),)

    def ours(setup: TrainingSetup) -> None:
        load_training_state(setup, folder / "ours")

    def theirs(setup: TrainingSetup) -> None:
        state = torch.load(folder / "theirs", mmap=True, weights_only=False, map_location="cpu")
        setup.model.load_state_dict(state["model"])
        # load_state_dict keeps what is on the right device as it is: mapped from the file
        moments = {
            index: {key: _own(value) for key, value in entry.items()} for index, entry in state["adam"]["state"].items()
        }
        setup.optimizer.load_state_dict({**state["adam"], "state": moments})

    ways = {"load_training_state": ours, "torch.load(mmap) + copies": theirs}
    return take_turns("load", ways, {"torch.load(mmap) + copies": "<= 1.11"}, device, rounds, fresh)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def comparing(folder: Path, device: torch.device, rounds: int) -> Row:
    """Compare two equal files: ours, cmp."""
    one, other = folder / "ours", folder / "copy"
    shutil.copy(one, other)

    def ours() -> None:
        if not diff_states(one, other).same:
            raise RuntimeError("equal files differ")

    ways = {"diff_states": ours, "cmp": lambda: subprocess.run(["cmp", one, other], check=True)}
    row = take_turns("diff", ways, {"cmp": "<= 1"}, device, rounds)
    other.unlink()
    return row


@dataclass
class CheckCost:
    """What the check itself costs.

    Attributes:
        runs: how many runs of the loop it took, by its own count.
        seconds: what it took, in times of a plain run.
        memory: its peak device memory over that of the loop run twice; None on the CPU.
    """

    runs: float
    seconds: float
    memory: float | None


def checking(gigabytes: float, device: torch.device, *, lose: bool) -> CheckCost:
    """Compare the check with the loop that it runs, of 8 steps."""
    batch = torch.randn(256, WIDTH)

    def make_setup() -> TrainingSetup:
        model = model_of(gigabytes)
        return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=1e-2))

    def step(setup: TrainingSetup, given: Tensor) -> Tensor:
        setup.optimizer.zero_grad()
        loss = setup.model(given).pow(2).mean()
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    def save(setup: TrainingSetup, path: Path) -> None:
        torch.save(setup.model.state_dict(), path)

    def load(setup: TrainingSetup, path: Path) -> None:
        setup.model.load_state_dict(torch.load(path, map_location=device))

    def plain() -> None:
        with preserve_rng():
            seed_everything(0)
            setup = build_setup(make_setup, device)
            for index in range(8):
                setup.step_index = index
                step(setup, move_to_device(batch, device))

    def check() -> float:
        own = {"save": save, "load": load} if lose else {}
        return check_resume_equivalent(make_setup, batch, step, device=device, **own).cost  # type: ignore[arg-type]

    plain()
    _reset_peak(device)
    start = perf_counter()
    plain()
    gc.collect()
    plain()
    _wait(device)
    plain_s, plain_peak = (perf_counter() - start) / 2, _peak(device)
    gc.collect()
    _reset_peak(device)
    start = perf_counter()
    runs = check()
    _wait(device)
    seconds = (perf_counter() - start) / plain_s
    return CheckCost(runs, seconds, _peak(device) / plain_peak if plain_peak else None)


def _sync(path: Path) -> None:
    for place in (path, path.parent):
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def main() -> None:
    """Run the rows that were asked for, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--gigabytes", type=float, help="size of the state (default: 0.75 on the CPU, 5 elsewhere)")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    size = arguments.gigabytes or (0.75 if device.type == "cpu" else 5.0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} thread(s)"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {name}; state of {size:g} GB")
    print(f"{'':<12}  {'way':<30}  {'median s':>8}  {'range':>12}  {'ratio':>6}  bar")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        setup = stepped(size, device)
        folder, rounds = Path(made), arguments.rounds
        print("\n".join(saving(setup, folder, device, rounds).lines()), flush=True)
        del setup
        print("\n".join(loading(size, folder, device, rounds).lines()), flush=True)
        print("\n".join(comparing(folder, device, rounds).lines()), flush=True)
    gc.collect()
    for title, lose in (("all restored", False), ("optimizer lost", True)):
        cost = checking(size, device, lose=lose)
        memory = "" if cost.memory is None else f", peak memory {cost.memory:.2f} of the loop run twice (bar 1.15)"
        bar = "8" if lose else "4"
        print(
            f"check, {title}: {cost.runs:g} runs of the loop (bar {bar}), {cost.seconds:.2f} times a plain run{memory}"
        )


if __name__ == "__main__":
    main()
