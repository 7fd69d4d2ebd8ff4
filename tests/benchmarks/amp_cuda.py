"""Mixed precision on a CUDA device: what watching a float16 step costs, and that the check sees there what it should.

Run it with ``hatch run bench-amp``; without a CUDA device it says so and does nothing. Three parts, some minutes:

- single steps of a watched and of a bare loop take turns, as in ``telemetry_overhead.py``: a transformer in float16,
  fused AdamW, a GradScaler, ``unscale_`` and a clip;
- the same step under ``torch.cuda.set_sync_debug_mode("error")``, bare and watched: neither may wait for the device;
- the check on this loop, which has to pass, and on a twin that clips before ``unscale_``, which has to be caught.

It exits with 1 where a step waits for the device, or the check says something else.
"""

from __future__ import annotations

import argparse
import platform
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from telemetry_overhead import GPT, Case, alternate, language_loss, table, tokens
from torch import Tensor, nn

from tl_amp import check_mixed_precision_training
from tl_core import TrainingSetup, seed_everything
from tl_telemetry import observe

WARMUP_STEPS = 8
STEPS = 20
MAX_NORM = 1.0


def transformer() -> tuple[nn.Module, Any]:
    return GPT(8192, 512, layers=8, heads=8, context=256), tokens(8192, 16, 256)


class ScaledCase(Case):
    """A loop in float16 under a GradScaler."""

    def build(self, device: torch.device) -> tuple[TrainingSetup, Any]:
        seed_everything(0)
        model, batch = self.make()
        model.to(device)
        # a fused optimizer skips overflows on the device; for others, scaler.step() waits for the device in each update
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return TrainingSetup(model, optimizer, scaler=torch.amp.GradScaler(device.type)), batch.to(device)

    def step(self, setup: TrainingSetup, batch: Any) -> Tensor:
        loss = self._backward(setup, batch)
        setup.scaler.unscale_(setup.optimizer)
        nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss

    def step_with_early_clip(self, setup: TrainingSetup, batch: Any) -> Tensor:
        """Do the same with the bug that the check has to find."""
        loss = self._backward(setup, batch)
        nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss

    def _backward(self, setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        with torch.autocast(batch.device.type, dtype=torch.float16):
            loss = self.loss(setup.model, batch)
        setup.scaler.scale(loss).backward()
        return loss.detach()


CASE = ScaledCase("transformer, 34M parameters, fp16", "cuda", transformer, language_loss)


def waits(case: ScaledCase, device: torch.device, watch: bool) -> str:
    """Return the line of the first step that waited for the device, with what torch said; empty if none did."""
    setup, batch = case.build(device)
    with observe(setup) if watch else nullcontext() as run:

        def step() -> None:
            if run is None:
                case.step(setup, batch)
            else:
                with run.step(batch) as current:
                    current.loss = case.step(setup, batch)

        for _ in range(WARMUP_STEPS):  # what is allocated and looked up once may wait
            step()
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(STEPS):
                step()
        except RuntimeError as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"{Path(last.filename).name}:{last.lineno} ({error})"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""


def verdict(case: ScaledCase, device: torch.device, step: Callable[[TrainingSetup, Any], Tensor]) -> list[str]:
    """Return the rules of what the check finds and notes about a step."""
    _, batch = case.build(device)
    report = check_mixed_precision_training(
        lambda device: case.build(torch.device(device))[0], batch, step, steps=STEPS, device=device
    )
    return [one.rule for one in (*report.findings, *report.notes)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=120, help="pairs of steps a row (default: 120)")
    arguments = parser.parse_args()
    if arguments.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {arguments.pairs}")
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device on this machine: nothing was measured or checked")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {name}")
    print(table([alternate(CASE, device, arguments.pairs, mode) for mode in ("control", "no updates", "updates")]))
    print()
    bare, watched = waits(CASE, device, watch=False), waits(CASE, device, watch=True)
    print(f"waits for the device, bare:    {bare or 'no'}")
    print(f"waits for the device, watched: {watched or 'no'}")
    right, buggy = verdict(CASE, device, CASE.step), verdict(CASE, device, CASE.step_with_early_clip)
    print(f"check, as it is:               {', '.join(right) or 'passed'}")
    print(f"check, clip before unscale_:   {', '.join(buggy) or 'passed'}")
    well = not bare and not watched and not right and buggy == ["clip-before-unscale"]
    print("all as it should be" if well else "NOT as it should be: see the lines above")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
