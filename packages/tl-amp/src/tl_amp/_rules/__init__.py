"""The rules: functions from evidence to findings, causes before their consequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tl_amp._rules import (
    by_hand,
    clipping,
    finite,
    hand_clip,
    in_part,
    losses,
    notes,
    order,
    silent,
    skips,
    stepping,
    unscaling,
)
from tl_core import Finding
from tl_telemetry import Evidence, update_rounds_away, zeroed_before_step

Rule = Callable[[Evidence], Iterator[Finding]]


def rules(every: int, max_skipped_fraction: float) -> tuple[Rule, ...]:
    """Return the rules of one check."""

    def skipped_updates(run: Evidence) -> Iterator[Finding]:
        return skips.skipped_updates(run, every, max_skipped_fraction)

    return (
        in_part.unscaled_in_part,
        stepping.stepped_past_scaler,
        stepping.stepped_after_unscaling,
        stepping.stepped_besides,
        stepping.stepped_again,
        stepping.unused_scaler,
        losses.loss_not_scaled,
        by_hand.scaled_twice,
        by_hand.unscaled_by_hand_too,
        unscaling.unscaled_again,
        unscaling.missing_update,
        unscaling.update_between_steps,
        order.scale_changed_between,
        order.backward_after_unscale,
        clipping.clip_before_unscale,
        clipping.clip_before_division,
        hand_clip.clipped_by_hand,
        order.hidden_from_scaler,
        zeroed_before_step,
        stepping.never_stepped,
        finite.non_finite,
        silent.silent_overflow,
        skipped_updates,
        order.moves_only_on_skipped,
        skips.moved_on_skipped,
        losses.low_precision_loss,
        update_rounds_away,
        notes.float16_without_scaler,
        notes.static_scale,
        notes.not_judged,
    )
