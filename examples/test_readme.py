"""The list of examples in ``README.md`` is complete."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent


def listed(text):
    return sorted(re.findall(r"^- `(\S+\.py)`: ", text, flags=re.MULTILINE))


def test_each_file_is_listed_once():
    """Every example has one line, and no line stands for a file that is gone."""
    files = sorted(path.name for path in FOLDER.glob("*.py"))
    assert listed((FOLDER / "README.md").read_text(encoding="utf-8")) == files


def test_the_counts_of_bugs_are_right():
    """The numbers of one-line bugs to try are those of the lists in the tests."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    counts = {
        name: len(re.findall(r"^- ", (FOLDER / name).read_text(encoding="utf-8").split('"""')[1], flags=re.MULTILINE))
        for name in ("test_training_loops.py", "test_lightning.py", "test_hf_trainer.py")
    }
    entries = {
        name: re.search(rf"^- `{name}`.*?(\d+) one-line bugs", text, flags=re.MULTILINE | re.DOTALL) for name in counts
    }
    assert {name: int(entry[1]) for name, entry in entries.items()} == counts


def test_a_file_that_is_not_listed_is_seen():
    """A mention elsewhere in the text is no entry."""
    assert listed("- `a.py`: one\n- see `b.py`\n`c.py`: two") == ["a.py"]
