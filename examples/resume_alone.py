"""The checks of tl-resume alone: does the script of ``resume_loop.py`` resume exactly, and does no crash cost it?

It saves and restores by its own ``save`` and ``load``, as a script without tl-resume does.

    python resume_alone.py
"""

from __future__ import annotations

import sys

import resume_loop as loop

from tl_resume import check_checkpoint_crash_safe, check_resume_equivalent


def main() -> int:
    reports = [
        check_resume_equivalent(
            loop.make_setup, loop.batch_at, loop.train_step, save=loop.save, load=loop.load, restores_step=True
        ),
        check_checkpoint_crash_safe(loop.make_setup, loop.batch_at, loop.train_step, save=loop.save, load=loop.load),
    ]
    print(*reports, sep="\n")
    return 0 if all(report.ok for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
