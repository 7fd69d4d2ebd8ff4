"""Writing a state to a file, tensor by tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tl_resume._format._chunks import HostCopies
from tl_resume._format._direct import BLOCK_BYTES, direct_writer
from tl_resume._format._encode import encode_state
from tl_resume._format._header import build_header, new_digest, seal_header
from tl_resume._format._replace import replacing
from tl_resume._format._storage import Stored

# Larger states go to the disk past the page cache: it is faster, and does not push out what others need there.
DIRECT_BYTES = 32 << 20
_OWN_THREAD_BYTES = 1 << 18


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
    total = sum(math.prod(stored.shape) * stored.dtype.itemsize for stored in plan.stored)
    header, ordered, digests_at = build_header(plan, tree, align=BLOCK_BYTES if total >= DIRECT_BYTES else 8)
    title = f"saving {Path(path).name}"
    with progress_bar(progress, title, total) as advance, replacing(path, durable=durable) as descriptor:
        start = len(header).to_bytes(8, "little")
        # The header comes first in the file but is known last: until then there is nothing that a reader accepts.
        begin = len(start) + len(header)
        direct = direct_writer(descriptor, begin) if durable and total >= DIRECT_BYTES else None
        if direct is None:
            os.lseek(descriptor, begin, os.SEEK_SET)
            digests = _write_tensors(ordered, lambda chunk: _write_all(descriptor, chunk), advance)
        else:
            with direct:
                digests = _write_tensors(ordered, direct.write, advance)
        seal_header(header, digests_at, digests)
        os.lseek(descriptor, 0, os.SEEK_SET)
        _write_all(descriptor, memoryview(start + header))


def _write_tensors(
    ordered: list[Stored], write: Callable[[memoryview], None], advance: Callable[[int], None]
) -> list[str]:
    digests = []
    copies = HostCopies()
    with ThreadPoolExecutor(1, "tl-resume-digest") as pool:
        for stored in ordered:
            digest = new_digest()
            for chunk, _owner in copies.chunks(stored.tensor):
                # threads cost more than they gain where there is little to do
                hashed = pool.submit(digest.update, chunk) if chunk.nbytes >= _OWN_THREAD_BYTES else None
                write(chunk)
                if hashed is None:
                    digest.update(chunk)
                else:
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
