"""The check of tl-accum alone: does ``accumulation_loop.py`` make the updates of its full batches?

A group's losses are sums, divided by the tokens of the whole group; the incomplete last group of an epoch is compared
too.

    python accum_alone.py
"""

from __future__ import annotations

import sys

import accumulation_loop as loop

from tl_accum import check_accumulation_equivalent, split_batch


def main() -> int:
    report = check_accumulation_equivalent(
        loop.make_setup,
        loop.full_batches(),
        loop.make_step,
        accumulation_steps=loop.ACCUMULATION_STEPS,
        epoch_length=loop.EPOCH_LENGTH,
        split=split_batch,  # the last full batch is as small as its group, and is split as it is
    )
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
