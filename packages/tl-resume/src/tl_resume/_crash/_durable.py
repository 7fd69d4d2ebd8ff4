"""The rule that what a save puts in place is on the disk first."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from tl_core import Finding
from tl_resume._crash._pages import sees_unsynced_pages, unsynced_pages
from tl_resume._crash._sync import unsynced_in_trace
from tl_resume._crash._tree import Tree, changed, read_tree
from tl_resume._crash._trial import Recorded, Trial
from tl_resume._crash._watch import Act

NOT_SYNCED = "not-synced"


@dataclass
class Unsynced:
    """Hold what a power loss could take.

    Args:
        files: Files whose data were not synced in time, and what was seen.
        folders: Folders that were not synced after a rename in them, and what was seen.
        reasons: What could not be judged, and why.
        work: The folder, where pages that are not on the disk can be seen in it and nothing better can.
    """

    files: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    work: str | None = None

    def look(self, before: Tree, act: Act) -> None:
        """Look at what is about to be renamed; to be called right after a save was killed before that.

        A file system may begin to write the data out at the rename (ext4 does), so afterwards is too late to look.
        """
        kind, source, target = act
        if self.work is None or kind != "rename":
            return
        for name in changed(before, read_tree(self.work)):
            if name == source or name.startswith(source + os.sep):
                pages = unsynced_pages(os.path.join(self.work, name))
                if pages:
                    seen = f"before {source} is renamed to {target}, {_pages(pages)} of {name} are not on the disk"
                    self.files[target + name[len(source) :]] = seen

    def finding(self, known: set[str]) -> Finding | None:
        """The finding, without files that are known to be lost anyway; None when there is nothing to say."""
        files = [seen for name, seen in self.files.items() if name not in known]
        folders = list(self.folders.values())
        if not files and not folders:
            return None
        causes = (
            ["the data of a file can reach the disk after its name, which then names nothing whole"] if files else []
        )
        causes += ["until its folder is synced, a rename can be undone by a power loss"] if folders else []
        fixes = ["flush and os.fsync each file before the rename"] if files else []
        fixes += (
            ["os.fsync the folder after the rename (os.open(folder, os.O_RDONLY) gives its descriptor)"]
            if folders
            else []
        )
        return Finding(
            NOT_SYNCED,
            "\n".join(["a power loss right after the second save can take what it has saved", *files, *folders]),
            "; ".join(causes),
            f"{', and '.join(fixes)}; or let save_training_state(setup, path) do that",
            evidence={"files": tuple(self.files), "folders": tuple(self.folders)},
        )


def find_unsynced(trial: Trial, recorded: Recorded, before: Tree) -> Unsynced:
    """Look for what an undisturbed save left to the operating system; to be called right after it."""
    # a log that grows is no part of a checkpoint that has to be there after a power loss
    appended = {act[1] for act in recorded.acts if act[0] == "append"}
    written = [
        name for name in changed(before, recorded.after) if recorded.after[name].target is None and name not in appended
    ]
    if recorded.trace is not None:
        files, folders = unsynced_in_trace(recorded.trace, trial.work)
        return Unsynced(
            {
                name: f"{act or 'save() has returned'}, and {_bytes(name, recorded.after)} were not synced before that"
                for name, act in files.items()
                if name in written and recorded.after[name].size_bytes
            },
            {name: f"{act}, and the folder was not synced after it" for name, act in folders.items()},
        )
    if not sees_unsynced_pages(trial.work):
        reason = "neither strace nor the file system shows it here"
        return Unsynced(reasons=[f"could not judge whether files and folders are synced: {reason}"])
    seen = {}
    for name in written:
        pages = unsynced_pages(os.path.join(trial.work, name))
        if pages:
            seen[name] = f"when save() has returned, {_pages(pages)} of {name} are not on the disk"
    reason = "could not judge whether the folder is synced after a rename: that needs strace"
    return Unsynced(seen, reasons=[reason] if any(act[0] == "rename" for act in recorded.acts) else [], work=trial.work)


def _pages(number: int) -> str:
    return f"{number:,} page{'' if number == 1 else 's'}"


def _bytes(name: str, tree: Tree) -> str:
    return f"the {tree[name].size_bytes:,} bytes of {name}"
