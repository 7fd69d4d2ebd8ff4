"""What strace tells of a save: what was synced, and when."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable

_ATTACH_S = 5.0
_CALLS = (
    "open,openat,creat,write,writev,pwrite64,pwritev,pwritev2,sendfile,copy_file_range,splice,truncate,ftruncate,"
    "fallocate,mmap,fsync,fdatasync,sync,syncfs,rename,renameat,renameat2,unlink,unlinkat,rmdir,symlink,symlinkat,"
    "link,linkat"
)
_LINE = re.compile(r"^(?P<pid>\d+) +(?P<call>\w+)\((?P<args>.*)\) += (?P<result>-?\w+)")
_CUT = re.compile(r"^(?P<pid>\d+) +(?P<head>.*?) *<unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(?P<pid>\d+) +<\.\.\. \w+ resumed>(?P<tail>.*)$")
_DESCRIPTOR = re.compile(r"(?:^|, )(\d+|AT_FDCWD)<((?:[^>\\]|\\.)*)>")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


class Tracer:
    """Trace the system calls of another process on files, where strace exists and may.

    Args:
        log: The file that strace writes.
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def attach(self, pid: int) -> None:
        """Start to trace a process, which waits meanwhile; without strace, or without the right to, do nothing."""
        program = shutil.which("strace")
        if program is None:
            return
        command = [program, "-f", "-y", "-qq", "-s", "0", "-o", self._log, "-e", f"trace={_CALLS}", "-p", str(pid)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + _ATTACH_S
        while not _is_traced(pid) and self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        if not _is_traced(pid):
            self._process.kill()
            self._process.wait()
            self._process = None

    def lines(self) -> list[str] | None:
        """What strace wrote, after the traced process has ended; None when it did not trace."""
        if self._process is None:
            return None
        try:
            self._process.wait(_ATTACH_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()


def let_trace() -> None:
    """Let any process of this user trace this one (where only an ancestor may by default)."""
    if sys.platform == "linux":
        set_tracer, anyone = 0x59616D61, ctypes.c_ulong(-1)
        ctypes.CDLL(None).prctl(set_tracer, anyone, 0, 0, 0)


def _is_traced(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as file:
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
    except OSError:
        return False


def unsynced_in_trace(lines: Iterable[str], folder: str) -> tuple[dict[str, str], dict[str, str]]:
    """Read from a trace what was published before it was synced.

    Args:
        lines: What strace wrote.
        folder: The folder of the checkpoint; paths are told below it.

    Returns:
        Files whose data were not synced before a rename or at the end, and folders that were not synced after a
        rename, link or symbolic link in them: by path, what was seen.
    """
    trace = _Trace(folder)
    for call, args in _whole_lines(lines):
        trace.read(call, args)
    return trace.verdict()


def _whole_lines(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Call and arguments of each system call that succeeded, those cut by another thread's put together."""
    heads: dict[str, str] = {}
    for raw in lines:
        line = raw
        cut = _CUT.match(line)
        if cut:
            heads[cut["pid"]] = cut["head"]
            continue
        resumed = _RESUMED.match(line)
        if resumed:
            line = f"{resumed['pid']} {heads.pop(resumed['pid'], '')}{resumed['tail']}"
        match = _LINE.match(line)
        if match and match["result"] != "-1":
            yield match["call"], match["args"]


class _Trace:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._dirty: set[str] = set()
        self._early: dict[str, str] = {}  # by the name that it got, what was seen at a rename
        self._folders: dict[str, str] = {}  # folders to sync, and the act that made it necessary
        self._synchronous: set[str] = set()

    def read(self, call: str, args: str) -> None:
        descriptors = [(match[1], _unescaped(match[2])) for match in _DESCRIPTOR.finditer(args)]
        path = descriptors[-1][1] if call in ("copy_file_range", "sendfile", "splice") and descriptors else None
        if call == "sendfile":
            path = descriptors[0][1]
        first = path if path is not None else descriptors[0][1] if descriptors else ""
        names = self._names(args, descriptors)
        if call in ("open", "openat", "creat"):
            if names and re.search(r"\bO_(D?)SYNC\b", args):
                self._synchronous.add(names[0])
        elif call in ("fsync", "fdatasync"):
            self._dirty.discard(first)
            self._folders.pop(first, None)
        elif call in ("sync", "syncfs"):
            self._dirty.clear()
            self._folders.clear()
        elif call in ("rename", "renameat", "renameat2", "link", "linkat"):
            if len(names) == 2:
                self._named(names[0], names[1], moved=call.startswith("rename"))
        elif call in ("symlink", "symlinkat"):
            self._made_in_folder(names[-1], f"the symbolic link {self._short(names[-1])} was made")
        elif call in ("unlink", "unlinkat", "rmdir"):
            self._forget(names[0])
        elif call == "mmap":
            if "MAP_SHARED" in args and "PROT_WRITE" in args:
                self._write(first)
        else:
            self._write(first if call != "truncate" else names[0])

    def _names(self, args: str, descriptors: list[tuple[str, str]]) -> list[str]:
        """The paths among the arguments, absolute; a relative one belongs to the descriptor before it."""
        strings = [_unescaped(match[1]) for match in _STRING.finditer(args)]
        bases = [path for _, path in descriptors] or [os.getcwd()]
        return [
            os.path.normpath(os.path.join(bases[min(index, len(bases) - 1)], name))
            for index, name in enumerate(strings)
        ]

    def _write(self, path: str) -> None:
        if self._inside(path) and path not in self._synchronous:
            self._dirty.add(path)

    def _named(self, source: str, target: str, *, moved: bool) -> None:
        if not self._inside(target):
            return
        done = f"{self._short(source)} was {'renamed' if moved else 'linked'} to {self._short(target)}"
        self._forget(target)
        for path in sorted(self._dirty):
            if _is_at(path, source):
                name = target + path[len(source) :]
                self._early[name] = done
                self._dirty.add(name)
                if moved:
                    self._dirty.discard(path)
        if moved:
            self._forget(source)
        self._made_in_folder(target, done)

    def _made_in_folder(self, path: str, what: str) -> None:
        if self._inside(path):
            self._folders[os.path.dirname(path)] = what

    def _forget(self, path: str) -> None:
        self._dirty = {name for name in self._dirty if not _is_at(name, path)}
        self._early = {name: what for name, what in self._early.items() if not _is_at(name, path)}

    def _inside(self, path: str) -> bool:
        return path.startswith(self._folder + os.sep)

    def _short(self, path: str) -> str:
        return os.path.relpath(path, self._folder) if self._inside(path) else path

    def verdict(self) -> tuple[dict[str, str], dict[str, str]]:
        files = {self._short(path): "" for path in sorted(self._dirty)}
        files.update({self._short(path): what for path, what in sorted(self._early.items())})
        folders = {os.path.relpath(path, self._folder): what for path, what in sorted(self._folders.items())}
        return files, folders


def _is_at(path: str, place: str) -> bool:
    """Whether a path is a file or folder, or below it."""
    return path == place or path.startswith(place + os.sep)


def _unescaped(text: str) -> str:
    return text.encode().decode("unicode_escape").encode("latin-1", errors="replace").decode(errors="replace")
