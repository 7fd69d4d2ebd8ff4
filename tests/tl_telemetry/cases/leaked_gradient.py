"""A generator's loss that leaves gradients in its discriminator, and adversarial loops in every right order."""

from __future__ import annotations

import torch
from torch import nn

from tl_core import TrainingSetup

MESSAGE = """\
[leaked-gradient] the gradients of D.* (4 tensors) that 'D' stepped with held more than those of its own loss \
(leaked_gradient.py:64): the loss that 'G' steps with (leaked_gradient.py:59) had left its gradients in them (8 of 8 \
updates, steps 0-7)
  cause: the backward pass for 'G' reaches these parameters too, and nothing clears their gradients before the \
backward pass for 'D' adds to them
  fix: call zero_grad() on 'D' right before the backward() of its own loss, or keep the other loss out of these \
parameters (requires_grad_(False) meanwhile, or backward(inputs=...))"""

bce = nn.functional.binary_cross_entropy_with_logits


def data(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def make_setup():
    model = nn.ModuleDict({"G": nn.Linear(4, 4), "D": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))})
    return TrainingSetup(
        model,
        {
            "G": torch.optim.Adam(model["G"].parameters(), lr=0.01),
            "D": torch.optim.Adam(model["D"].parameters(), lr=0.01),
        },
    )


def parts(setup):
    return setup.model["G"], setup.model["D"], setup.optimizers["G"], setup.optimizers["D"]


def loop(step, make_setup=make_setup, steps=8):
    return {"make_setup": make_setup, "data": data, "step": step, "steps": steps}


def real_loss(output):
    return bce(output, torch.ones_like(output))


def fake_loss(output):
    return bce(output, torch.zeros_like(output))


def twins(clear):
    def step(setup, real):
        g, d, opt_g, opt_d = parts(setup)
        fake = g(torch.randn_like(real))
        opt_g.zero_grad()
        g_loss = real_loss(d(fake))
        g_loss.backward()
        opt_g.step()
        if clear:
            opt_d.zero_grad()
        d_loss = real_loss(d(real)) + fake_loss(d(fake.detach()))
        d_loss.backward()
        opt_d.step()
        opt_d.zero_grad()
        return {"g": g_loss, "d": d_loss}

    return loop(step)


def buggy():
    return twins(clear=False)


def healthy():
    return twins(clear=True)


def discriminator_first(setup, real):
    """Train D, then G; what G's loss leaves in D is cleared before D's next pass."""
    g, d, opt_g, opt_d = parts(setup)
    fake = g(torch.randn_like(real))
    opt_d.zero_grad()
    d_loss = real_loss(d(real)) + fake_loss(d(fake.detach()))
    d_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    g_loss = real_loss(d(fake))
    g_loss.backward()
    opt_g.step()
    return {"g": g_loss, "d": d_loss}


def two_passes(setup, real):
    """Send D's two losses backward one after the other, with zeros kept."""
    g, d, opt_g, opt_d = parts(setup)
    opt_d.zero_grad(set_to_none=False)
    real_part = real_loss(d(real))
    real_part.backward()
    fake = g(torch.randn_like(real))
    fake_part = fake_loss(d(fake.detach()))
    fake_part.backward()
    opt_d.step()
    opt_g.zero_grad(set_to_none=False)
    g_loss = real_loss(d(fake))
    g_loss.backward()
    opt_g.step()
    return {"g": g_loss, "d": real_part + fake_part}


def cleared_after_steps(setup, real):
    """Clear everything after each of the two steps."""
    g, d, opt_g, opt_d = parts(setup)
    fake = g(torch.randn_like(real))
    g_loss = real_loss(d(fake))
    g_loss.backward()
    opt_g.step()
    setup.model.zero_grad()
    d_loss = real_loss(d(real)) + fake_loss(d(fake.detach()))
    d_loss.backward()
    opt_d.step()
    setup.model.zero_grad()
    return {"g": g_loss, "d": d_loss}


def not_detached(setup, real):
    """Let D's loss run through G as well, whose gradients are cleared before its own pass."""
    g, d, opt_g, opt_d = parts(setup)
    fake = g(torch.randn_like(real))
    opt_d.zero_grad()
    d_loss = real_loss(d(real)) + fake_loss(d(fake))
    d_loss.backward(retain_graph=True)
    opt_d.step()
    opt_g.zero_grad()
    g_loss = real_loss(d(g(torch.randn_like(real))))
    g_loss.backward()
    opt_g.step()
    return {"g": g_loss, "d": d_loss}


def both_then_step(setup, real):
    """Compute both gradients before either steps."""
    g, d, opt_g, opt_d = parts(setup)
    fake = g(torch.randn_like(real))
    opt_g.zero_grad()
    g_loss = real_loss(d(fake))
    g_loss.backward()
    opt_d.zero_grad()
    d_loss = real_loss(d(real)) + fake_loss(d(fake.detach()))
    d_loss.backward()
    opt_g.step()
    opt_d.step()
    return {"g": g_loss, "d": d_loss}


def critic_often(setup, real):
    """Train the critic in each step and the generator in every third."""
    g, d, opt_g, opt_d = parts(setup)
    opt_d.zero_grad()
    d_loss = d(g(torch.randn_like(real)).detach()).mean() - d(real).mean()
    d_loss.backward()
    opt_d.step()
    for parameter in d.parameters():
        parameter.data.clamp_(-0.5, 0.5)
    if setup.step_index % 3 == 2:
        opt_g.zero_grad()
        (-d(g(torch.randn_like(real))).mean()).backward()
        opt_g.step()
    return d_loss


def critic_in_a_loop(setup, real):
    """Train the critic several times inside of one step."""
    g, d, opt_g, opt_d = parts(setup)
    for _ in range(3):
        opt_d.zero_grad()
        d_loss = d(g(torch.randn_like(real)).detach()).mean() - d(real).mean()
        d_loss.backward()
        opt_d.step()
    opt_g.zero_grad()
    g_loss = -d(g(torch.randn_like(real))).mean()
    g_loss.backward()
    opt_g.step()
    return {"g": g_loss, "d": d_loss}


def frozen_meanwhile(setup, real):
    """Freeze D while G trains, so that nothing is left in it."""
    g, d, opt_g, opt_d = parts(setup)
    fake = g(torch.randn_like(real))
    d.requires_grad_(False)
    opt_g.zero_grad()
    g_loss = real_loss(d(fake))
    g_loss.backward()
    opt_g.step()
    d.requires_grad_(True)
    d_loss = real_loss(d(real)) + fake_loss(d(fake.detach()))
    d_loss.backward()
    opt_d.step()
    opt_d.zero_grad()
    return {"g": g_loss, "d": d_loss}


def by_autograd_grad(setup, real):
    """Ask for the gradients of each player's own parameters only."""
    g, d, opt_g, opt_d = parts(setup)
    fake = g(torch.randn_like(real))
    g_loss = real_loss(d(fake))
    g_grads = torch.autograd.grad(g_loss, list(g.parameters()))
    d_loss = real_loss(d(real)) + fake_loss(d(fake.detach()))
    d_grads = torch.autograd.grad(d_loss, list(d.parameters()))
    for parameter, grad in zip([*g.parameters(), *d.parameters()], [*g_grads, *d_grads], strict=True):
        parameter.grad = grad
    opt_g.step()
    opt_d.step()
    return {"g": g_loss, "d": d_loss}


def accumulated(setup, real):
    """Accumulate both players' gradients over two micro-batches."""
    g, d, opt_g, opt_d = parts(setup)
    opt_d.zero_grad()
    for half in real.split(4):
        d_loss = (real_loss(d(half)) + fake_loss(d(g(torch.randn_like(half)).detach()))) / 2
        d_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    for half in real.split(4):
        g_loss = real_loss(d(g(torch.randn_like(half)))) / 2
        g_loss.backward()
    opt_g.step()
    return {"g": g_loss, "d": d_loss}


def make_shared():
    model = nn.ModuleDict({"enc": nn.Linear(4, 8), "a": nn.Linear(8, 1), "b": nn.Linear(8, 1)})
    return TrainingSetup(model, {name: torch.optim.SGD(part.parameters(), lr=0.01) for name, part in model.items()})


def shared_encoder(setup, x):
    """Let both tasks' losses collect in the encoder, which steps last."""
    for optimizer in setup.optimizers.values():
        optimizer.zero_grad()
    loss_a = setup.model["a"](setup.model["enc"](x)).square().mean()
    loss_a.backward()
    setup.optimizers["a"].step()
    loss_b = (setup.model["b"](setup.model["enc"](x)) - 1).square().mean()
    loss_b.backward()
    setup.optimizers["b"].step()
    setup.optimizers["enc"].step()
    return {"a": loss_a, "b": loss_b}


def alternating_tasks(setup, x):
    """Train one task a step; the encoder steps every second step, with both tasks' gradients."""
    task = "ab"[setup.step_index % 2]
    loss = setup.model[task](setup.model["enc"](x)).square().mean()
    loss.backward()
    setup.optimizers[task].step()
    setup.optimizers[task].zero_grad()
    if task == "b":
        setup.optimizers["enc"].step()
        setup.optimizers["enc"].zero_grad()
    return loss


def make_actor_critic():
    model = nn.ModuleDict({"actor": nn.Linear(4, 2), "critic": nn.Linear(6, 1), "target": nn.Linear(6, 1)})
    model["target"].load_state_dict(model["critic"].state_dict())
    return TrainingSetup(
        model,
        {
            "actor": torch.optim.Adam(model["actor"].parameters(), lr=0.01),
            "critic": torch.optim.Adam(model["critic"].parameters(), lr=0.01),
        },
    )


def actor_critic(setup, state):
    """Run the actor's loss through the critic; the target network follows by hand, trainable flag and all."""
    actor, critic, target = setup.model["actor"], setup.model["critic"], setup.model["target"]
    with torch.no_grad():
        wanted = 1 + 0.9 * target(torch.cat([state, actor(state)], 1))
    critic_loss = (critic(torch.cat([state, torch.randn(8, 2)], 1)) - wanted).square().mean()
    setup.optimizers["critic"].zero_grad()
    critic_loss.backward()
    setup.optimizers["critic"].step()
    actor_loss = -critic(torch.cat([state, actor(state)], 1)).mean()
    setup.optimizers["actor"].zero_grad()
    actor_loss.backward()
    setup.optimizers["actor"].step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    return {"critic": critic_loss, "actor": actor_loss}


def lazily_regularized(setup, real):
    """Switch the players' gradients on and off by turns, and regularize D by a step of its own now and then."""
    g, d, opt_g, opt_d = parts(setup)
    d.requires_grad_(False)
    opt_g.zero_grad()
    g_loss = real_loss(d(g(torch.randn_like(real))))
    g_loss.backward()
    opt_g.step()
    g.requires_grad_(False)
    d.requires_grad_(True)
    opt_d.zero_grad()
    d_loss = real_loss(d(real)) + fake_loss(d(g(torch.randn_like(real))))
    d_loss.backward()
    opt_d.step()
    if setup.step_index % 3 == 0:
        opt_d.zero_grad()
        given = real.clone().requires_grad_()
        (slope,) = torch.autograd.grad(d(given).sum(), given, create_graph=True)
        slope.square().sum(1).mean().backward()
        opt_d.step()
    g.requires_grad_(True)
    return {"g": g_loss, "d": d_loss}


def make_two_heads():
    model = nn.ModuleDict({"enc": nn.Linear(4, 8), "a": nn.Linear(8, 1), "b": nn.Linear(8, 1)})
    return TrainingSetup(
        model,
        {
            "main": torch.optim.SGD([*model["enc"].parameters(), *model["a"].parameters()], lr=0.01),
            "side": torch.optim.SGD(model["b"].parameters(), lr=0.01),
        },
    )


def side_head_first(setup, x):
    """Step a side head, whose loss trains the encoder too, before the main loss is added to it there."""
    setup.model.zero_grad()
    hidden = setup.model["enc"](x)
    side = (setup.model["b"](hidden) - 1).square().mean()
    side.backward(retain_graph=True)
    setup.optimizers["side"].step()
    main = setup.model["a"](hidden).square().mean()
    main.backward()
    setup.optimizers["main"].step()
    return {"main": main, "side": side}


def near_misses():
    return {
        "lazily regularized": loop(lazily_regularized),
        "side head first": loop(side_head_first, make_two_heads),
        "discriminator first": loop(discriminator_first),
        "two passes": loop(two_passes),
        "cleared after steps": loop(cleared_after_steps),
        "not detached": loop(not_detached),
        "both, then step": loop(both_then_step),
        "critic often": loop(critic_often),
        "critic in a loop": loop(critic_in_a_loop),
        "frozen meanwhile": loop(frozen_meanwhile),
        "by autograd.grad": loop(by_autograd_grad),
        "accumulated": loop(accumulated),
        "shared encoder": loop(shared_encoder, make_shared),
        "alternating tasks": loop(alternating_tasks, make_shared),
        "actor and critic": loop(actor_critic, make_actor_critic),
    }
