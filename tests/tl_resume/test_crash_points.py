"""Which points a save dies at, chosen from what it was seen to do."""

import pytest

from tl_resume._crash._points import Point, Written, choose_points, written_files
from tl_resume._crash._tree import Entry, read_tree, restore


def entry(inode, size_bytes, changed_ns=1):
    return Entry(inode, size_bytes, changed_ns)


OLD = {"ckpt": entry(1, 50)}
WRITE, RENAME = ("write", "tmp", ""), ("rename", "tmp", "ckpt")


@pytest.mark.parametrize(
    ("acts", "trees", "after", "expected"),
    [
        # aside and renamed: written between the two acts
        ([WRITE, RENAME], [OLD, {**OLD, "tmp": entry(2, 60)}], {"ckpt": entry(2, 60)}, [Written("tmp", 60, 0, False)]),
        # in place, by a writer that was not heard
        ([], [], {"ckpt": entry(1, 60, 2)}, [Written("ckpt", 60, -1, True)]),
        # in place, of the same size
        ([], [], {"ckpt": entry(1, 50, 2)}, [Written("ckpt", 50, -1, True)]),
        # a file that is closed after another was opened: its last size, at the act that opened it
        (
            [WRITE, ("write", "b", "")],
            [OLD, {**OLD, "tmp": entry(2, 10)}],
            {**OLD, "tmp": entry(2, 60, 2), "b": entry(3, 5)},
            [Written("tmp", 60, 0, False), Written("b", 5, 1, False)],
        ),
        # removed and written anew, where the file system gives the same inode again
        (
            [("remove", "ckpt", ""), ("write", "ckpt", "")],
            [OLD, {}],
            {"ckpt": entry(1, 60, 2)},
            [Written("ckpt", 60, 1, False)],
        ),
        # appended to
        ([("append", "ckpt", "")], [OLD], {"ckpt": entry(1, 60, 2)}, [Written("ckpt", 60, 0, True, begin=50)]),
        # a rename alone, and a link, write nothing
        ([("rename", "ckpt", "bak")], [OLD], {"bak": entry(1, 50)}, []),
        ([("symlink", "latest", "")], [OLD], {**OLD, "latest": Entry(4, 4, 2, "ckpt")}, []),
    ],
)
def test_written_files(acts, trees, after, expected):
    """The files that a save wrote are told from the trees between its acts."""
    assert written_files(acts, OLD, trees, after) == expected


def test_few_points():
    """One file gets four points, its first and last byte among them; each rename one; a full disk is met halfway."""
    file = Written("tmp", 100, 0, False)
    points, left_out = choose_points([file], [WRITE, RENAME], None)
    assert points == [
        *(Point("byte", 0, file, number) for number in (0, 33, 66, 99)),
        Point("act", 1, act=RENAME),
        Point("full-disk", 0, file, 50),
    ]
    assert left_out == []


@pytest.mark.parametrize(
    ("number", "size_bytes", "expected"), [(1, 100, [0]), (2, 100, [0, 99]), (5, 3, [0, 1, 2]), (9, 1, [0])]
)
def test_given_number(number, size_bytes, expected):
    """crash_points is the number of points in each file, as far as it has bytes."""
    points, _ = choose_points([Written("f", size_bytes, 0, False)], [], number)
    assert [point.num_bytes for point in points if point.kind == "byte"] == expected


def test_appended():
    """The points in a file that is appended to lie in what is appended."""
    file = Written("log", 60, 0, True, begin=50)
    points, _ = choose_points([file], [("append", "log", "")], 3)
    assert [(point.kind, point.num_bytes) for point in points] == [
        ("byte", 50),
        ("byte", 54),
        ("byte", 59),
        ("full-disk", 55),
    ]


def test_many_files():
    """Of many files and renames a few are taken, first and last among them, and the rest is said."""
    files = [Written(f"f{index}", 10, index, False) for index in range(20)]
    acts = [("rename", f"f{index}", f"g{index}") for index in range(30)]
    points, left_out = choose_points(files, acts, None)
    inside = [point for point in points if point.kind == "byte"]
    before = [point.index for point in points if point.kind == "act"]
    assert [point.written.name for point in inside[::2]] == ["f0", "f3", "f7", "f11", "f15", "f19"]
    assert [point.num_bytes for point in inside[:2]] == [0, 9]
    assert (len(before), before[0], before[-1]) == (10, 0, 29)
    assert left_out == ["14 of the 20 files of save()", "20 of the 30 renames, removals and links of save()"]
    points, left_out = choose_points(files, acts, 1)
    assert (len(points), left_out) == (20 + 30 + 3, [])


def test_empty_files():
    """A file without bytes has no points inside of it."""
    assert choose_points([Written("lock", 0, 0, False)], [], None) == ([], [])


def test_restore(tmp_path):
    """A folder is put back file by file: what is as it was is not copied."""
    good, work = tmp_path / "good", tmp_path / "work"
    for folder in (good, work):
        (folder / "a").mkdir(parents=True)
        (folder / "a" / "kept").write_text("kept")
        (folder / "a" / "changed").write_text("old")
        (folder / "removed").write_text("removed")
        (folder / "link").symlink_to("a")
    untouched = read_tree(str(work))
    (work / "a" / "changed").write_text("new and longer")
    (work / "removed").unlink()
    (work / "link").unlink()
    (work / "link").mkdir()
    (work / "more" / "deep").mkdir(parents=True)
    (work / "more" / "deep" / "left").write_text("left")
    tree = restore(str(work), str(good), untouched)
    assert sorted(tree) == ["a/changed", "a/kept", "link", "removed"]
    assert tree["a/kept"] == untouched["a/kept"]
    assert (work / "a" / "changed").read_text() == "old"
    assert (work / "link").readlink().name == "a"
    assert not (work / "more").exists()
