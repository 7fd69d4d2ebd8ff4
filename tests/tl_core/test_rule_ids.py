from __future__ import annotations

import pytest

from tl_core import check_rule_ids

KNOWN = ("missing-zero-grad", "lr-zero", "non-finite")


@pytest.mark.parametrize("given", [[], ("lr-zero",), {"lr-zero", "non-finite"}, iter(["lr-zero", "lr-zero"])])
def test_collections_of_known_ids_are_taken(given):
    """Lists, tuples, sets and iterators of ids become a frozenset."""
    copy = set(given) if not hasattr(given, "__next__") else {"lr-zero"}
    assert check_rule_ids(given, "allow", KNOWN) == frozenset(copy)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("lr-zero", TypeError, "allow must be a list of rule ids, got 'lr-zero': write ['lr-zero']"),
        (b"lr-zero", TypeError, "allow must be a list of rule ids, got b'lr-zero'"),
        (3, TypeError, "allow must be a list of rule ids, got 3"),
        ([3], TypeError, "allow must hold rule ids (strings), got 3"),
        (["lr-zeros"], ValueError, "allow names the rule 'lr-zeros', which does not exist; did you mean lr-zero?"),
        (
            ["lr-zero", "xyz"],
            ValueError,
            "allow names the rule 'xyz', which does not exist; there are missing-zero-grad, lr-zero, non-finite",
        ),
    ],
)
def test_what_is_no_collection_of_known_ids_is_refused(given, error, message):
    """The message says what to write, the nearest ids, or all of them in the given order."""
    with pytest.raises(error) as caught:
        check_rule_ids(given, "allow", KNOWN)
    assert str(caught.value) == message
