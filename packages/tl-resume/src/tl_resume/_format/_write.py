"""Writing a state to a file, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tl_resume._format._chunks import HostCopies
from tl_resume._format._encode import encode_state
from tl_resume._format._header import build_header, count, new_digest, seal_header
from tl_resume._format._replace import replacing
from tl_resume._format._storage import Stored, real_bytes


def write_state(path: str | os.PathLike[str], state: Any, *, progress: bool = False, durable: bool = True) -> None:
    """Write a nested state to one file, at once and for good.

    Args:
        path: The file; an existing one is replaced when all is written. A link is kept, what it points at is replaced.
        state: Nested dicts, lists, tuples, ... of tensors and plain values. A ``Parameter`` comes back as a tensor.
        progress: Show a bar (needs ``rich``).
        durable: Wait until the data are on the disk; without it the file is only whole, not safe from a power cut.

    Raises:
        TypeError: Something cannot be saved; the message names its path. Nothing has been written.
        ValueError: The state is nested too deeply, its header would be too long, or ``path`` is no regular file.
        OSError: The disk is full, or the folder cannot be written. An old file is as it was.
    """
    tree, plan = encode_state(state)
    header, ordered, digests_at = build_header(plan, tree)
    total = sum(count(stored.shape) * real_bytes(stored.dtype) for stored in ordered)
    title = f"saving {Path(path).name}"
    with progress_bar(progress, title, total) as advance, replacing(path, durable=durable) as descriptor:
        start = len(header).to_bytes(8, "little")
        # The header comes first in the file but is known last: until then there is nothing that a reader accepts.
        os.lseek(descriptor, len(start) + len(header), os.SEEK_SET)
        digests = _write_tensors(descriptor, ordered, advance)
        seal_header(header, digests_at, digests)
        os.lseek(descriptor, 0, os.SEEK_SET)
        _write_all(descriptor, memoryview(start + header))


def _write_tensors(descriptor: int, ordered: list[Stored], advance: Callable[[int], None]) -> list[str]:
    digests = []
    copies = HostCopies()
    with ThreadPoolExecutor(1, "tl-resume-digest") as pool:
        for stored in ordered:
            digest = new_digest()
            for chunk, _owner in copies.chunks(stored.tensor):
                hashed = pool.submit(digest.update, chunk)
                _write_all(descriptor, chunk)
                hashed.result()
                advance(chunk.nbytes)
            digests.append(str(digest.hexdigest()))
    return digests


def _write_all(descriptor: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(descriptor, data) :]


@contextmanager
def progress_bar(shown: bool, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many bytes are done, or nothing.

    Raises:
        ModuleNotFoundError: A bar is wanted, and ``rich`` is not installed.
    """
    if not shown:
        yield lambda nbytes: None
        return
    try:
        from rich import progress
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('progress=True needs rich: pip install "tl-resume[cli]"', name="rich") from error
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
