"""One-line bugs of the loop in ``digits_loop.py``, and a loop with one of its own in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

LOOP = Path(__file__).with_name("digits_loop.py")


@dataclass(frozen=True)
class Bug:
    """One line of the loop changed, moved or left out (``new`` is empty), and the id of the rule that this breaks."""

    title: str
    rule: str
    old: str
    new: str


BUGS = (
    Bug(
        "forget zero_grad()",
        "missing-zero-grad",
        "    setup.optimizer.zero_grad()",
        "",
    ),
    Bug(
        "call zero_grad() between backward() and step()",
        "zeroed-before-step",
        "    (loss / accumulation_steps).backward()",
        "    (loss / accumulation_steps).backward(); setup.optimizer.zero_grad()",
    ),
    Bug(
        "detach the features",
        "no-gradient",
        "        features = self.body(self.stem(images))",
        "        features = self.body(self.stem(images)).detach()",
    ),
    Bug(
        "make the loss anew from its number",
        "loss-not-connected",
        "    loss = digit_loss + ink_loss",
        "    loss = torch.tensor(digit_loss.item() + ink_loss.item(), requires_grad=True)",
    ),
    Bug(
        "call backward() twice",
        "backward-twice",
        "    (loss / accumulation_steps).backward()",
        "    (loss / accumulation_steps).backward(retain_graph=True); (loss / accumulation_steps).backward()",
    ),
    Bug(
        "call step() twice",
        "repeated-step",
        "    setup.optimizer.step()",
        "    setup.optimizer.step(); setup.optimizer.step()",
    ),
    Bug(
        "compare predictions (N, 1) with targets (N,)",
        "loss-broadcast",
        "    ink_loss = functional.mse_loss(ink_seen.squeeze(1), ink)",
        "    ink_loss = functional.mse_loss(ink_seen, ink)",
    ),
    Bug(
        "give the optimizer the body only",
        "uncovered-parameter",
        "    trainable = [p for p in model.parameters() if p.requires_grad]",
        "    trainable = [p for p in model.body.parameters() if p.requires_grad]",
    ),
    Bug(
        "build the optimizer for another copy of the model",
        "other-copy",
        "    optimizer = torch.optim.AdamW(parameter_groups(model), lr=LEARNING_RATE)",
        "    optimizer = torch.optim.AdamW(parameter_groups(Classifier()), lr=LEARNING_RATE)",
    ),
    Bug(
        "leave the weight decay of the biases at AdamW's default",
        "decayed-parameter",
        '        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},',
        '        {"params": [p for p in trainable if p.ndim < 2]},',
    ),
    Bug(
        "clip after the step",
        "clip-after-step",
        "    nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)\n    setup.optimizer.step()",
        "    setup.optimizer.step()\n    nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)",
    ),
    Bug(
        "clip the average's parameters",
        "clip-misses",
        "    nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)",
        '    nn.utils.clip_grad_norm_(setup.state["ema"].parameters(), MAX_NORM)',
    ),
    Bug(
        "step the scheduler before the optimizer",
        "scheduler-before-optimizer",
        "    setup.optimizer.step()\n    setup.scheduler.step()",
        "    setup.scheduler.step()\n    setup.optimizer.step()",
    ),
    Bug(
        "step the scheduler twice",
        "lr-unexpected",
        "    setup.scheduler.step()",
        "    setup.scheduler.step(); setup.scheduler.step()",
    ),
    Bug(
        "count the warmup in epochs",
        "lr-unexpected",
        "    setup.scheduler.step()",
        "    if (setup.step_index + 1) % EVALUATE_EVERY == 0: setup.scheduler.step()",
    ),
    Bug(
        "divide the learning rate by the batch size",
        "lr-unexpected",
        "    optimizer = torch.optim.AdamW(parameter_groups(model), lr=LEARNING_RATE)",
        "    optimizer = torch.optim.AdamW(parameter_groups(model), lr=LEARNING_RATE / BATCH_SIZE)",
    ),
    Bug(
        "train the frozen stem's BatchNorm",
        "frozen-buffer-moved",
        "        self.stem.eval()",
        "",
    ),
    Bug(
        "forget to update the average",
        "ema-never-updated",
        '    setup.state["ema"].update_parameters(setup.model)',
        "",
    ),
    Bug(
        "keep the losses with their history",
        "graph-kept-alive",
        "    setup.losses.append(loss.detach())",
        "    setup.losses.append(loss)",
    ),
    Bug(
        "forget to divide the loss by the accumulation steps",
        "loss-not-divided",
        "    (loss / accumulation_steps).backward()",
        "    loss.backward()",
    ),
    Bug(
        "clear the gradients in every micro-batch",
        "zeroed-per-micro-batch",
        "    (loss / accumulation_steps).backward()",
        "    setup.optimizer.zero_grad(); (loss / accumulation_steps).backward()",
    ),
    Bug(
        "clip in every micro-batch",
        "clip-per-micro-batch",
        "    (loss / accumulation_steps).backward()",
        "    (loss / accumulation_steps).backward(); nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)",
    ),
    Bug(
        "update in every micro-batch",
        "premature-update",
        "    if (setup.step_index + 1) % accumulation_steps == 0:",
        "    if True:",
    ),
    Bug(
        "forget the optimizer when loading",
        "optimizer-state-not-restored",
        '    setup.optimizer.load_state_dict(checkpoint["optimizer"])',
        "",
    ),
    Bug(
        "forget the scheduler when loading",
        "scheduler-not-restored",
        '    setup.scheduler.load_state_dict(checkpoint["scheduler"])',
        "",
    ),
    Bug(
        "forget the average when loading",
        "state-not-restored",
        '    setup.state["ema"].load_state_dict(checkpoint["ema"])',
        "",
    ),
    Bug(
        "forget the random generator when loading",
        "rng-not-restored",
        '    torch.set_rng_state(checkpoint["generator"])',
        "",
    ),
    Bug(
        "start counting anew after loading",
        "step-not-restored",
        '    return checkpoint["step"]',
        "    return 0",
    ),
    Bug(
        "forget to scale the images",
        "grad-norm-exceeded",
        "    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0",
        "    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)",
    ),
)


def with_bug(bug: Bug, path: Path = LOOP) -> ModuleType:
    """Load a loop with the bug in it; all other lines keep their numbers where the bug has as many."""
    source = path.read_text(encoding="utf-8")
    if source.count(f"\n{bug.old}\n") != 1:
        raise ValueError(f"{path.name} must hold the line of the bug {bug.title!r} exactly once: {bug.old!r}")
    loop = ModuleType(path.stem)
    loop.__file__ = str(path)
    exec(compile(source.replace(f"\n{bug.old}\n", f"\n{bug.new}\n"), str(path), "exec"), loop.__dict__)
    return loop
