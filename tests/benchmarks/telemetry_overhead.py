"""What watching costs: steps with and without an observer, alternating in one process.

Run it with ``hatch run bench``. Every row compares two loops that start from identical setups. One is watched, the
other is bare (in a ``control`` row both are), and single steps of the two take turns, so that whatever else the machine
does falls on both. ``ratio`` is the median of the watched steps over the median of the bare ones, ``pairs`` the median
of each pair's own ratio; the control's distance from 1 is what the machine's noise makes of no difference at all.
``blocks`` rows time whole runs instead, in turns too, from ``observe(...)`` to its end, with everything in them.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tl_core import TrainingSetup, seed_everything
from tl_telemetry import TrainingRun, _taps, observe

WARMUP_STEPS = 8
BLOCK_STEPS = 60
NUM_BLOCKS = 5
Step = Callable[[TrainingSetup, Any], Tensor]


class Block(nn.Module):
    """A pre-norm transformer block with 12 parameter tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A language model with 12 parameter tensors a layer and 5 more."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def tokens(vocabulary: int, batch: int, context: int) -> Tensor:
    return torch.randint(vocabulary, (batch, context + 1))


def small_transformer() -> tuple[nn.Module, Any]:
    return GPT(1000, 128, layers=6, heads=4, context=64), tokens(1000, 6, 64)


def thirty_tensors() -> tuple[nn.Module, Any]:
    layers = [layer for _ in range(14) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10)), (torch.randn(32, 64), torch.randint(10, (32,)))


def large_gpt() -> tuple[nn.Module, Any]:
    return GPT(50304, 768, layers=12, heads=12, context=1024), tokens(50304, 8, 1024)


def tiny_gpt() -> tuple[nn.Module, Any]:
    return GPT(256, 64, layers=2, heads=4, context=64), tokens(256, 8, 64)


def language_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Case:
    """A loop to be watched: how it is built, and how it steps."""

    name: str
    device: str
    make: Callable[[], tuple[nn.Module, Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    max_grad_norm: float | None = None

    def build(self, device: torch.device) -> tuple[TrainingSetup, Any]:
        seed_everything(0)
        model, batch = self.make()
        model.to(device)
        moved = tuple(t.to(device) for t in batch) if isinstance(batch, tuple) else batch.to(device)
        fused = True if device.type == "cuda" else None
        return TrainingSetup(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)), moved

    def step(self, setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        on_gpu = self.device == "cuda"
        with torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext():
            loss = self.loss(setup.model, batch)
        loss.backward()
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(setup.model.parameters(), self.max_grad_norm)
        setup.optimizer.step()
        return loss.detach()


CASES = [
    Case("transformer, 1.5M parameters, 77 tensors", "cpu", small_transformer, language_loss),
    Case("transformer, clipped", "cpu", small_transformer, language_loss, max_grad_norm=1.0),
    Case("30 tensors", "cpu", thirty_tensors, class_loss),
    Case("30 tensors, clipped", "cpu", thirty_tensors, class_loss, max_grad_norm=1.0),
    Case("GPT, 163M parameters, bf16", "cuda", large_gpt, language_loss),
    Case("tiny GPT, 29 tensors, bf16", "cuda", tiny_gpt, language_loss),
]


class Loop:
    """One loop and its observer, if it has one."""

    def __init__(self, case: Case, device: torch.device, run: TrainingRun | None = None) -> None:
        self.case, self.device, self.run = case, device, run
        self.watches_forward = False
        self.setup, self.batch = case.build(device) if run is None else (run.setup, None)

    def detach(self) -> None:
        """Take the observer's global hooks out."""
        recorder = self.run.facts.recorder
        self.watches_forward = recorder in _taps._forward_watchers  # they leave by themselves after a few steps
        _taps.detach(recorder)
        _taps.detach_forward(recorder)

    def step(self) -> float:
        """Do one step and return how long it took, in seconds."""
        start = _now(self.device)
        if self.run is None:
            self.case.step(self.setup, self.batch)
        else:
            with self.run.step(self.batch) as current:
                current.loss = self.case.step(self.setup, self.batch)
        return _now(self.device) - start


@contextmanager
def attached(loop: Loop) -> Iterator[None]:
    """Put the global hooks of a loop's observer in for the length of one step.

    They are global, so a bare step must find them gone. Opening ``observe`` for each step would do that too, but then
    every step would be the first one of a run. Hence the private way in, outside of the time that is taken.
    """
    if loop.run is None:
        yield
        return
    recorder = loop.run.facts.recorder
    _taps.attach(recorder)
    if loop.watches_forward:
        _taps.attach_forward(recorder)
    try:
        yield
    finally:
        loop.detach()


@dataclass(frozen=True)
class Result:
    """One row of the table; times in seconds, memory in bytes."""

    case: str
    mode: str
    bare: float
    watched: float
    pair_ratio: float
    memory: float | None = None

    @property
    def ratio(self) -> float:
        return self.watched / self.bare


def alternate(case: Case, device: torch.device, pairs: int, mode: str) -> Result:
    """Let single steps of two loops take turns; ``mode`` is "control", "no updates" or "updates"."""
    bare = Loop(case, device)
    if mode == "control":
        times = _take_turns(bare, Loop(case, device), pairs)
        return _result(case, mode, times)
    setup, batch = case.build(device)
    with observe(setup, track_updates=mode == "updates") as run:
        watched = Loop(case, device, run)
        watched.batch = batch
        watched.detach()
        times = _take_turns(bare, watched, pairs)
    return _result(case, mode, times, memory=extra_memory(case, device, mode == "updates"))


def _take_turns(one: Loop, other: Loop, pairs: int) -> list[tuple[float, float]]:
    times = []
    for number in range(-WARMUP_STEPS, pairs):
        taken = {}
        # the second of a pair finds warmer caches: they take turns at that too
        for loop in (one, other) if number % 2 else (other, one):
            with attached(loop):
                taken[id(loop)] = loop.step()
        if number >= 0:
            times.append((taken[id(one)], taken[id(other)]))
    return times


def _result(case: Case, mode: str, times: list[tuple[float, float]], memory: float | None = None) -> Result:
    one, other = zip(*times, strict=True)
    ratios = [b / a for a, b in times]
    return Result(case.name, mode, statistics.median(one), statistics.median(other), statistics.median(ratios), memory)


def blocks(case: Case, device: torch.device, mode: str) -> Result:
    """Time whole runs, bare and watched in turns: from the first step to the end of ``observe``."""
    times = []
    for _ in range(NUM_BLOCKS):
        pair = []
        for updates in (None, mode == "updates"):
            setup, batch = case.build(device)
            case.step(setup, batch)
            gc.collect()
            start = _now(device)
            if updates is None:
                for _ in range(BLOCK_STEPS):
                    case.step(setup, batch)
            else:
                with observe(setup, track_updates=updates) as run:
                    for _ in range(BLOCK_STEPS):
                        with run.step(batch) as current:
                            current.loss = case.step(setup, batch)
            pair.append((_now(device) - start) / BLOCK_STEPS)
        times.append((pair[0], pair[1]))
    return _result(case, f"blocks, {mode}", times)


def extra_memory(case: Case, device: torch.device, updates: bool) -> float:
    """Return the bytes that watching adds: at the peak of a step on a GPU, alive between steps on the CPU.

    In multiples of the parameters' bytes.
    """
    used = []
    for watch in (False, True):
        setup, batch = case.build(device)
        size = sum(p.numel() * p.element_size() for p in setup.model.parameters())
        for _ in range(3):
            case.step(setup, batch)
        before = _memory(device)
        with observe(setup, track_updates=updates) if watch else nullcontext() as run:
            for _ in range(3):
                if run is None:
                    case.step(setup, batch)
                else:
                    with run.step(batch) as current:
                        current.loss = case.step(setup, batch)
            used.append(_memory(device) - before)
        del setup, batch, run
    return (used[1] - used[0]) / size


def _memory(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    storages = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, nn.Parameter):
            for tensor in (value, value.grad if value.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return perf_counter()
    return thread_time()  # everything runs in this one thread: what other programs take in between does not count


def table(results: list[Result]) -> str:
    """Return the results as plain text."""
    header = ("loop", "watching", "bare ms", "watched ms", "ratio", "pairs", "extra memory")
    lines = [header]
    for r in results:
        memory = "" if r.memory is None else f"{r.memory:.2f} x parameters"
        times = (f"{1e3 * r.bare:.2f}", f"{1e3 * r.watched:.2f}", f"{r.ratio:.3f}", f"{r.pair_ratio:.3f}")
        lines.append((r.case, r.mode, *times, memory))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = range(2, 6)
    padded = (
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=120, help="pairs of steps a row (default: 120)")
    parser.add_argument("--only", default="", help="only rows whose loop and mode, as in the table, contain this text")
    parser.add_argument("--device", default="", help="cpu or cuda (default: the cpu, and cuda where there is one)")
    arguments = parser.parse_args()
    if arguments.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {arguments.pairs}")
    devices = [arguments.device] if arguments.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread, devices: {', '.join(devices)}")
    results = []
    for case in CASES:
        for mode in ("control", "no updates", "updates", "blocks, no updates", "blocks, updates"):
            if case.device not in devices or arguments.only not in f"{case.name} {mode}":
                continue
            device = torch.device(case.device)
            if mode.startswith("blocks"):
                results.append(blocks(case, device, mode.removeprefix("blocks, ")))
            else:
                results.append(alternate(case, device, arguments.pairs, mode))
            print(".", end="", flush=True)
    print()
    print(table(results))


if __name__ == "__main__":
    main()
