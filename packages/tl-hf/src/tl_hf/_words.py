"""Findings in the words of a person who has written neither a setup nor a ``load()``: a Trainer has both inside."""

from __future__ import annotations

import re
from dataclasses import replace

from transformers import Trainer

from tl_core import Finding
from tl_hf._setup import own_callbacks

_WORDS = (
    (r"\bmake_setup\(\)", "make_trainer()"),
    (r"\bmake_step\((\w+)\)", r"make_trainer(\1)"),
    (r"\bmake_step\(", "make_trainer("),
    (r"\bmake_step\b", "make_trainer"),
    (r"\bunfreeze in load\(\)", "unfreeze in on_train_begin() of a callback"),
    (r"\bload\(\)", "trainer.train(resume_from_checkpoint=...)"),
    (r"\bsave\(\) before step (\d+)", r"writing the checkpoint before step \1"),
    (r"\bsave\(\)", "writing the checkpoint"),
    (r"\bsetup\.trainer\.", "trainer."),
    (r"\bsetup\.trainer\b", "the Trainer's own attributes"),
    (r"\bsetup\.model\b", "trainer.model"),
    (r"\bit lies in the setup\b", "it lies outside of the model's buffers"),
)


def in_words(finding: Finding, trainer: Trainer) -> Finding:
    """Return a finding that names callbacks and the Trainer instead of the setup's attributes."""
    callbacks = ((rf"\bsetup\.{re.escape(name)}(?!\w)", f"callback {name}") for name in own_callbacks(trainer))
    words = [*_WORDS, *callbacks]

    def told(text: str) -> str:
        for pattern, word in words:
            text = re.sub(pattern, word, text)
        return text

    return replace(finding, seen=told(finding.seen), cause=told(finding.cause), fix=told(finding.fix))
