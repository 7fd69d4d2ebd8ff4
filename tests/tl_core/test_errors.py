from __future__ import annotations

import sys

import pytest

from tl_core import noted

has_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes on exceptions")


@has_notes
@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt()])
def test_a_passing_exception_gets_the_note(error):
    """The same exception passes through, with the note behind those that it has."""
    with pytest.raises(type(error)) as caught, noted("raised in step 3"), noted("raised in load()"):
        raise error
    assert caught.value is error
    assert error.__notes__ == ["raised in load()", "raised in step 3"]


@has_notes
def test_a_note_can_be_made_when_an_exception_passes():
    """A function is called at the exception, not before, and not where all is well."""
    asked = []

    def where():
        asked.append(True)
        return f"raised after {len(done)} steps"

    done = [0]
    with noted(where):
        done.append(1)
    assert asked == []
    with pytest.raises(KeyError) as caught, noted(where):
        {}["missing"]
    assert caught.value.__notes__ == ["raised after 2 steps"]
