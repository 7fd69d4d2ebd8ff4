"""Replacing a file at once: the old one or the new one is there, whole, whatever happens in between."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

_SUFFIX = ".tl-resume.tmp"
_FOREIGN_AGE_S = 24 * 3600  # nobody can see whether a process of another machine lives: its litter must be old
_own: set[str] = set()
_lock = threading.Lock()


def _target_of(path: Any) -> Path:
    """Find the file that is to be replaced: what a symbolic link points at, not the link.

    Raises:
        ValueError: The path is a folder, or something else that is no regular file.
        OSError: A link that points at itself, or a folder that is not there.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder to save in does not exist", str(target.parent)) from None
        return target
    if stat.S_ISDIR(mode):
        raise ValueError(f"path must name a file, but {os.fspath(path)} is a folder: name a file in it")
    if not stat.S_ISREG(mode):
        raise ValueError(f"path must name a regular file, but {os.fspath(path)} is a device, pipe or socket")
    return target


@contextmanager
def replacing(path: Any, *, durable: bool) -> Iterator[int]:
    """Give a descriptor to write to; what was written takes the place of the file when the block ends.

    When the block raises, the old file stays and the temporary one goes. The temporary file lies beside the target;
    those that killed saves of the same target left behind are removed first.

    Args:
        path: The file to replace, or to make.
        durable: Make sure that the data, then the name, are on the disk before the block is left.
    """
    target = _target_of(path)
    prefix = _prefix(target)
    with _lock:
        _remove_litter(target.parent, prefix)
        temporary = _free_name(target.parent, prefix)
        _own.add(str(temporary))
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            try:
                yield descriptor
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, target)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        # a full disk says where; nobody knows the temporary name
        if error.errno is not None and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        _own.discard(str(temporary))
    if durable:
        _sync_folder(target.parent)


def _prefix(target: Path) -> str:
    name = target.name
    if len(os.fsencode(name)) > 150:  # with what is added, the name must stay below 255 bytes
        name = xxhash.xxh3_128_hexdigest(os.fsencode(name))
    return f".{name}."


def _machine() -> str:
    node = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
    return xxhash.xxh32_hexdigest(node.encode("utf-8", "replace"))


def _free_name(folder: Path, prefix: str) -> Path:
    count = 0
    while True:
        name = folder / f"{prefix}{_machine()}-{os.getpid()}-{count}{_SUFFIX}"
        if str(name) not in _own and not os.path.lexists(name):
            return name
        count += 1


def _remove_litter(folder: Path, prefix: str) -> None:
    try:
        entries = list(os.scandir(folder))
    except PermissionError:  # a folder that may be written to but not listed
        return
    for entry in entries:
        if not (entry.name.startswith(prefix) and entry.name.endswith(_SUFFIX)):
            continue
        middle = entry.name[len(prefix) : -len(_SUFFIX)].split("-")
        if len(middle) != 3 or not middle[1].isdigit():  # the litter of another target, whose name is longer
            continue
        with suppress(FileNotFoundError, PermissionError):
            if _is_abandoned(entry, middle[0], int(middle[1])):
                os.unlink(entry.path)


def _is_abandoned(entry: Any, machine: str, process: int) -> bool:
    if machine != _machine():
        return bool(time.time() - entry.stat(follow_symlinks=False).st_mtime > _FOREIGN_AGE_S)
    if process == os.getpid():
        return entry.path not in _own
    if os.name == "nt":  # there os.kill would end the process
        return bool(time.time() - entry.stat(follow_symlinks=False).st_mtime > _FOREIGN_AGE_S)
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync a folder has nothing to sync
            raise
    finally:
        os.close(descriptor)
