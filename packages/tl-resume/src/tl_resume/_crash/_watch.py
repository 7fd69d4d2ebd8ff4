"""What a save does to the files of a folder, seen from inside of the process that saves, and the deaths at it.

An audit hook cannot be removed and the limits reach the whole process, so all of this is for forked children only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from tl_resume._crash._tree import Tree, read_tree

_WRITES = os.O_WRONLY | os.O_RDWR
_ANNOUNCED = "tl_resume.write"
START = -1  # the index of what comes before the first act

OPENS = ("write", "append")  # the kinds of acts that begin to write a file, and change nothing else
Act = tuple[str, str, str]  # kind, path, second path (of a rename or link), both below the folder


class Recording:
    """Collect the acts on files below a folder, and the folder's tree before each.

    Args:
        folder: The folder, without symbolic links in its path.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.acts: list[Act] = []
        self.trees: list[Tree] = []

    def __call__(self, index: int, act: Act) -> None:
        self.trees.append(read_tree(self._folder))
        self.acts.append(act)


def watch(folder: str, on_act: Callable[[int, Act], None]) -> None:
    """Call ``on_act(index, act)`` before each act on the files of a folder, from now to the end of the process."""
    lock = threading.Lock()
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        describe = _ACTS.get(event)
        act = None if describe is None else describe(folder, args)
        if act is not None:
            with lock:
                index, count = count, count + 1
            on_act(index, act)

    sys.addaudithook(hook)
    _announce_writers()


def kill_before(index: int) -> Callable[[int, Act], None]:
    """Die before the act of this index."""

    def on_act(at: int, act: Act) -> None:
        if at == index:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_act


def limit_from(index: int, num_bytes: int, *, die: bool) -> Callable[[int, Act], None]:
    """From the act of this index on (``START``: at once), let no file grow beyond a number of bytes.

    Args:
        index: The act.
        num_bytes: The bytes.
        die: The process is killed at the first byte too many; otherwise its write fails, as on a full disk.
    """
    import resource  # POSIX only, as all that follows

    # Python ignores the signal, which makes the write fail with EFBIG. Set now: acts are also seen in other threads,
    # in which no signal can be set.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if die else signal.SIG_IGN)

    def on_act(at: int, act: Act | None) -> None:
        if at == index:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))

    on_act(START, None)
    return on_act


def _announce_writers() -> None:
    """Make the two writers that open files outside of Python say so (whatever was imported from them, and when)."""
    torch_part = sys.modules.get("torch.serialization")
    _announce(torch_part, "_open_zipfile_writer", 0)
    for name in ("safetensors.torch", "safetensors.numpy"):
        _announce(sys.modules.get(name), "serialize_file", 1)


def _announce(module: Any, name: str, position: int) -> None:
    writer = getattr(module, name, None)
    if writer is None:
        return

    def announced(*args: Any, **options: Any) -> Any:
        path = args[position] if len(args) > position else options.get("filename")
        if isinstance(path, (str, os.PathLike)):
            sys.audit(_ANNOUNCED, os.fspath(path))
        return writer(*args, **options)

    setattr(module, name, announced)


def below(folder: str, path: Any, dir_fd: Any = None) -> str | None:
    """The path below the folder (the folder itself: ``.``), or None for one outside of it."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    name = os.fsdecode(path)
    if isinstance(dir_fd, int) and dir_fd >= 0 and not os.path.isabs(name):
        name = os.path.join(_path_of(dir_fd), name)
    parent, last = os.path.split(os.path.abspath(name))
    relative = os.path.relpath(os.path.join(os.path.realpath(parent), last), folder)
    return None if relative.split(os.sep)[0] == os.pardir else relative


def _path_of(descriptor: int) -> str:
    for numbers in ("/proc/self/fd", "/dev/fd"):
        link = os.path.join(numbers, str(descriptor))
        if os.path.islink(link):
            return os.readlink(link)
    return ""


def _opened(folder: str, args: tuple[Any, ...]) -> Act | None:
    path, _, flags = args
    if not isinstance(flags, int) or not flags & _WRITES:
        return None
    return _one("append" if flags & os.O_APPEND else "write", folder, path)


def _one(kind: str, folder: str, path: Any, dir_fd: Any = None) -> Act | None:
    name = below(folder, path, dir_fd)
    return None if name is None else (kind, name, "")


def _two(kind: str, folder: str, args: Iterable[Any]) -> Act | None:
    source, target, *dir_fds = args
    first = below(folder, source, dir_fds[0] if dir_fds else None)
    second = below(folder, target, dir_fds[-1] if dir_fds else None)
    return None if second is None and first is None else (kind, first or "", second or "")


_ACTS: dict[str, Callable[[str, tuple[Any, ...]], Act | None]] = {
    "open": _opened,
    _ANNOUNCED: lambda folder, args: _one("write", folder, args[0]),
    "os.truncate": lambda folder, args: _one("truncate", folder, args[0]),
    "os.remove": lambda folder, args: _one("remove", folder, *args),
    "os.rmdir": lambda folder, args: _one("remove", folder, *args),
    "os.rename": lambda folder, args: _two("rename", folder, args),
    "os.link": lambda folder, args: _two("link", folder, args),
    # what a symbolic link points to is a text, and no file is touched there
    "os.symlink": lambda folder, args: _one("symlink", folder, args[1], args[2]),
}
