"""The check of tl-amp alone: is the GradScaler of ``mixed_precision_loop.py`` used right, on this device?

Some of the first updates are skipped, so that what may go on without an update is seen.

    python amp_alone.py --device cuda
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import mixed_precision_loop as loop

from tl_amp import check_mixed_precision_training


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check how the GradScaler is used.")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    device = parser.parse_args(arguments).device
    report = check_mixed_precision_training(loop.make_setup, loop.batch_at, loop.train_step, device=device)
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
