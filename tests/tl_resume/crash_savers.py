"""A loop, and ways to save it: safe and unsafe ones."""

import io
import os
import shutil
import threading

import torch
from torch import nn

from tl_core import TrainingSetup


def make_setup():
    model = nn.Linear(64, 16)
    return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=1e-2))


def make_data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 64, generator=generator) for _ in range(4)]


def step(setup, batch):
    setup.optimizer.zero_grad()
    loss = setup.model(batch).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss


def content(setup):
    return {"model": setup.model.state_dict(), "optimizer": setup.optimizer.state_dict()}


def restore(setup, state):
    setup.model.load_state_dict(state["model"])
    setup.optimizer.load_state_dict(state["optimizer"])


def load(setup, path):
    restore(setup, torch.load(path))


def sync_folder(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write(state, path):
    """Write and sync one file."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def write_text(text, path):
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# safe savers


def save_aside(setup, path):
    write(content(setup), f"{path}.tmp")
    os.replace(f"{path}.tmp", path)
    sync_folder(os.path.dirname(path))


def save_steps(setup, path, pointer="latest"):
    folder = os.path.join(path, f"step_{setup.step_index}")
    os.makedirs(folder, exist_ok=True)
    write(content(setup), f"{folder}/state.pt")
    sync_folder(folder)
    write_text(f"step_{setup.step_index}", f"{path}/{pointer}.tmp")
    os.replace(f"{path}/{pointer}.tmp", f"{path}/{pointer}")
    sync_folder(path)


def load_latest(setup, path):
    with open(f"{path}/latest") as file:
        load(setup, f"{path}/{file.read().strip()}/state.pt")


def save_alternating(setup, path):
    """Write the older of two files in place; the step in each tells which is the newer."""
    os.makedirs(path, exist_ok=True)
    name = "ab"[setup.step_index // 2 % 2]
    write({**content(setup), "step": setup.step_index}, f"{path}/{name}.pt")


def load_newest_valid(setup, path):
    states = []
    for name in "ab":
        try:
            states.append(torch.load(f"{path}/{name}.pt"))
        except (OSError, RuntimeError, EOFError):
            continue
    restore(setup, max(states, key=lambda state: state["step"]))


def save_folder(setup, path):
    """Write a new folder aside and rename it to a name of its own."""
    os.makedirs(path, exist_ok=True)
    aside = f"{path}/aside"
    shutil.rmtree(aside, ignore_errors=True)
    os.mkdir(aside)
    for name, part in content(setup).items():
        write(part, f"{aside}/{name}.pt")
    sync_folder(aside)
    os.rename(aside, f"{path}/{setup.step_index:08d}")
    sync_folder(path)


def load_newest_folder(setup, path):
    newest = max(name for name in os.listdir(path) if name.isdigit())
    restore(setup, {name: torch.load(f"{path}/{newest}/{name}.pt") for name in ("model", "optimizer")})


def save_with_backup(setup, path):
    if os.path.exists(path):
        os.replace(path, f"{path}.bak")
    write(content(setup), path)
    sync_folder(os.path.dirname(path))


def load_or_backup(setup, path):
    try:
        state = torch.load(path)
    except (OSError, RuntimeError, EOFError):
        state = torch.load(f"{path}.bak")
    restore(setup, state)


def save_safetensors(setup, path):
    from safetensors.torch import save_file

    save_file(setup.model.state_dict(), f"{path}.tmp")
    with open(f"{path}.tmp", "rb") as file:
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)
    sync_folder(os.path.dirname(path))


def load_safetensors(setup, path):
    from safetensors.torch import load_file

    setup.model.load_state_dict(load_file(path))


def save_numbered(setup, path):
    """Keep one numbered file, and a log that grows."""
    path.mkdir(exist_ok=True)
    write(content(setup), path / "part")
    os.replace(path / "part", path / f"{setup.step_index:04d}.pt")
    with open(path.parent / "log.txt", "a") as file:
        file.write(f"saved step {setup.step_index}\n")
    sync_folder(path)
    for old in sorted(path.glob("*.pt"))[:-1]:
        old.unlink()


def load_numbered(setup, path):
    load(setup, max(path.glob("*.pt")))


# unsafe savers


def save_in_place(setup, path):
    write(content(setup), path)


def save_unsynced(setup, path):
    torch.save(content(setup), f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def save_synced_late(setup, path):
    torch.save(content(setup), f"{path}.tmp")
    os.replace(f"{path}.tmp", path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    sync_folder(os.path.dirname(path))


def save_folder_unsynced(setup, path):
    write(content(setup), f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def save_after_removal(setup, path):
    write(content(setup), f"{path}.tmp")
    if os.path.exists(path):
        os.remove(path)
    os.rename(f"{path}.tmp", path)
    sync_folder(os.path.dirname(path))


def save_pointer_first(setup, path):
    folder = os.path.join(path, f"step_{setup.step_index}")
    os.makedirs(folder, exist_ok=True)
    write_text(f"step_{setup.step_index}", f"{path}/latest.tmp")
    os.replace(f"{path}/latest.tmp", f"{path}/latest")
    write(content(setup), f"{folder}/state.pt")
    sync_folder(folder)
    sync_folder(path)


def save_link_first(setup, path):
    folder = os.path.join(path, f"step_{setup.step_index}")
    os.makedirs(folder, exist_ok=True)
    os.symlink(f"step_{setup.step_index}", f"{path}/newest.tmp")
    os.replace(f"{path}/newest.tmp", f"{path}/newest")
    write(content(setup), f"{folder}/state.pt")
    sync_folder(folder)
    sync_folder(path)


def load_link(setup, path):
    load(setup, f"{path}/newest/state.pt")


def save_number_first(setup, path):
    path.mkdir(exist_ok=True)
    write_text(str(setup.step_index), path / "latest.tmp")
    os.replace(path / "latest.tmp", path / "latest")
    write(content(setup), path / f"{setup.step_index:04d}.pt")
    sync_folder(path)


def load_number(setup, path):
    load(setup, path / f"{int((path / 'latest').read_text()):04d}.pt")


def save_final_name(setup, path):
    path.mkdir(exist_ok=True)
    write(content(setup), path / f"{setup.step_index:04d}.pt")
    sync_folder(path)


def save_after_unlink(setup, path):
    path.unlink(missing_ok=True)
    write(content(setup), path)
    sync_folder(path.parent)


def save_journal(setup, path):
    """Append a line for each save, which names its file."""
    write(content(setup), path.with_name(f"{setup.step_index}.pt"))
    with open(path, "a") as file:
        file.write(f"{setup.step_index}.pt\n")
        file.flush()
        os.fsync(file.fileno())


def load_journal(setup, path):
    load(setup, path.with_name(path.read_text().split("\n")[-2]))


def load_torn_journal(setup, path):
    load(setup, path.with_name(path.read_text().split()[-1]))


def save_patched(setup, path):
    """Change a part of a file in place."""
    save_aside(setup, path)
    note = path.with_name("note")
    note.touch()
    with open(note, "r+b") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())


def save_after_rotation(setup, path):
    path.mkdir(exist_ok=True)
    for old in path.glob("*.pt"):
        old.unlink()
    save_final_name(setup, path)


def save_renaming_away(setup, path):
    write(content(setup), f"{path}.tmp")
    if path.exists():
        os.replace(path, f"{path}.old")
    os.replace(f"{path}.tmp", path)
    sync_folder(path.parent)


def save_after_rmtree(setup, path):
    aside = path.with_suffix(".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for name, part in content(setup).items():
        write(part, aside / f"{name}.pt")
    sync_folder(aside)
    if path.exists():
        shutil.rmtree(path)
    aside.rename(path)
    sync_folder(path.parent)


def save_pieces_in_place(setup, path):
    path.mkdir(exist_ok=True)
    for name, part in content(setup).items():
        write(part, path / f"{name}.pt")


def save_pieces(setup, path):
    os.makedirs(path, exist_ok=True)
    for name, part in content(setup).items():
        write(part, f"{path}/{name}.tmp")
        os.replace(f"{path}/{name}.tmp", f"{path}/{name}.pt")
    sync_folder(path)


def load_pieces(setup, path):
    restore(setup, {name: torch.load(f"{path}/{name}.pt") for name in ("model", "optimizer")})


def save_swallowing(setup, path):
    try:
        write(content(setup), f"{path}.tmp")
    except (OSError, RuntimeError):
        print("could not save")
    os.replace(f"{path}.tmp", path)
    sync_folder(os.path.dirname(path))


def load_if_there(setup, path):
    """Begin anew where nothing can be read."""
    try:
        state = torch.load(path)
    except (OSError, RuntimeError, EOFError):
        return
    restore(setup, state)


def load_waiting(setup, path):
    """Wait until the checkpoint can be read."""
    while True:
        try:
            return load(setup, path)
        except (OSError, RuntimeError, EOFError):
            threading.Event().wait(0.01)


def save_once(setup, path):
    """Write into a folder that must not be there, and leave it after a crash."""
    os.mkdir(f"{path}.tmp")
    write(content(setup), f"{path}.tmp/state.pt")
    os.replace(f"{path}.tmp/state.pt", path)
    os.rmdir(f"{path}.tmp")
    sync_folder(os.path.dirname(path))


def save_in_thread(setup, path):
    def work():
        threading.Event().wait(0.2)
        save_aside(setup, path)

    threading.Thread(target=work, name="writer").start()


def save_claiming(setup, path):
    """Claim the whole size at once, then write slowly, in place."""
    buffer = io.BytesIO()
    torch.save(content(setup), buffer)
    state = buffer.getvalue()
    data = len(state).to_bytes(8, "big") + state + b" " * (2 << 20)
    with open(path, "wb", buffering=0) as file:
        os.truncate(file.fileno(), len(data))
        for begin in range(0, len(data), 1 << 16):
            file.write(data[begin : begin + (1 << 16)])
            os.fsync(file.fileno())


def load_claimed(setup, path):
    with open(path, "rb") as file:
        data = file.read()
    if data[-1:] != b" ":
        raise ValueError("the end is missing")
    restore(setup, torch.load(io.BytesIO(data[8 : 8 + int.from_bytes(data[:8], "big")])))
