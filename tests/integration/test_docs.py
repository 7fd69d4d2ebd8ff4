"""The documentation is true: its Python blocks run, in order, and print what the page says they print.

A page's blocks share one namespace. A function `test_*` in a block is called as pytest would, with its fixtures. A text
block after `<!-- output -->` is compared with what the Python block before it printed, and the exception that it
raised at the end; `...` in it stands for anything. `<!-- not run: reason -->` before a block leaves the block out.

As a program (`hatch run outputs docs/resume.md ...`) it writes into pages what their blocks print now.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import inspect
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tl_core

TOP = Path(__file__).parents[2]
PAGES = [*TOP.glob("README.md"), *sorted(TOP.glob("packages/*/README.md")), *sorted(TOP.glob("docs/**/*.md"))]
_FENCE = re.compile(r"^( *)```(\w*)$")
_NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")
_OUTPUT = "<!-- output -->"


@dataclass
class Block:
    code: str
    line: int  # of the first line of code, counted from 1
    output: str | None = None
    output_line: int = 0  # of the first line of the output, counted from 1


def blocks(text: str) -> list[Block]:
    """Find the Python blocks that are to run, each with the output that the page promises."""
    found: list[Block] = []
    comment = ""  # the last line above the block that is not empty
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            comment = line.strip() or comment
            continue
        indent, language = len(fence[1]), fence[2]
        body = []
        for _, inner in lines:
            if inner.strip() == "```":
                break
            body.append(inner[indent:])
        else:
            raise ValueError(f"line {number}: the block is never closed")
        content = "\n".join(body) + "\n"
        if language == "python":
            if _NOT_RUN.fullmatch(comment) is None:
                found.append(Block(content, number + 1))
        elif comment == _OUTPUT:
            if not found or found[-1].output is not None:
                raise ValueError(f"line {number}: output without a Python block before it")
            found[-1].output, found[-1].output_line = content, number + 1
        comment = ""
    return found


def printed(page: Path, fixture: Callable[[str], object] | None) -> Iterator[tuple[Block, str]]:
    """Run the blocks of a page and give what each prints.

    Args:
        page: the page.
        fixture: gives the fixtures of the tests in it, by name. None: the tests are not called.
    """
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for block in blocks(page.read_text()):
        before = set(namespace)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                # empty lines before the code, so that tracebacks show the lines of the page
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True), namespace)
                for name in [name for name in namespace if name.startswith("test_") and name not in before]:
                    test = namespace[name]
                    assert callable(test)
                    if fixture is not None:
                        test(**{argument: fixture(argument) for argument in inspect.signature(test).parameters})
            except Exception as error:
                if block.output is None:
                    raise
                kind = type(error)
                place = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
                print(f"{place}{kind.__qualname__}: {error}")
        yield block, "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def promised(block: Block, got: str) -> bool:
    """Tell whether a block printed what the page says, if that says something."""
    return block.output is None or doctest.OutputChecker().check_output(block.output, got, doctest.ELLIPSIS)


def run_page(page: Path, fixture: Callable[[str], object]) -> None:
    """Run the blocks of a page; fixture(name) gives the fixtures of the tests in it."""
    for block, got in printed(page, fixture):
        if not promised(block, got):
            lines = difflib.ndiff((block.output or "").splitlines(), got.splitlines())
            difference = "\n".join(line for line in lines if not line.startswith("?"))
            where = f"{page.name}:{block.line}"
            said = f"{where}: the block printed something else (- the page, + what it printed)\n{difference}"
            pytest.fail(said, pytrace=False)


def refill(page: Path) -> int:
    """Write into a page what its blocks print, where that is not what it says; return how many outputs changed."""
    lines = page.read_text().splitlines(keepends=True)
    wrong = [(block, got) for block, got in printed(page, None) if not promised(block, got)]
    for block, got in reversed(wrong):
        start = block.output_line - 1
        lines[start : start + len((block.output or "").splitlines())] = [got]
    page.write_text("".join(lines))
    return len(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(TOP).as_posix())
def test_pages_run_and_print_what_they_promise(page, request, tmp_path, monkeypatch):
    """The Python blocks of the page run and print what stands under them."""
    monkeypatch.chdir(tmp_path)
    with tl_core.preserve_rng():
        run_page(page, request.getfixturevalue)


def test_the_readme_and_the_ci_have_the_same_test_command():
    """The line of the README that runs the tests is the one that the continuous integration runs."""
    commands = [line.strip() for line in (TOP / "README.md").read_text().splitlines() if "hatch run test" in line]
    assert commands
    assert commands[0] in (TOP / ".ci" / "run").read_text()


def _page(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_a_failing_block_is_seen_with_its_line_in_the_page(tmp_path):
    """An exception without a promised output passes on, and its traceback names the page's line."""
    page = _page(tmp_path, "# Title\n\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(page, lambda name: None)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == (page, 5)


def test_wrong_output_is_seen(tmp_path):
    """Output that differs from the page's fails and shows both."""
    page = _page(tmp_path, "```python\nprint('one')\n```\n\n<!-- output -->\n```text\ntwo\n```\n")
    with pytest.raises(pytest.fail.Exception) as caught:
        run_page(page, lambda name: None)
    assert str(caught.value) == (
        "page.md:2: the block printed something else (- the page, + what it printed)\n- two\n+ one"
    )


def test_a_test_in_a_block_is_called_with_its_fixtures(tmp_path):
    """A failing test function of a page fails the page."""
    page = _page(tmp_path, "```python\ndef test_it(number):\n    assert number == 2\n```\n")
    run_page(page, {"number": 2}.get)
    with pytest.raises(AssertionError):
        run_page(page, {"number": 3}.get)


def test_output_may_hold_an_exception_and_dots(tmp_path):
    """A promised exception is the last line; dots stand for figures that vary; names live on in later blocks."""
    code = "```python\nx = 0.123\n```\n```python\nprint(x)\nraise ValueError('no')\n```\n"
    text = code + "<!-- output -->\n```\n0.1...\nValueError: no\n```\n"
    run_page(_page(tmp_path, text), lambda name: None)


def test_blocks_are_left_out_for_a_reason_only(tmp_path):
    """`not run` needs a reason, and holds for the next block only."""
    left_out = "<!-- not run: needs two machines -->\n\n```python\n1 / 0\n```\n"
    assert blocks(left_out) == []
    assert blocks(left_out + "```python\nx\n```\n") == [Block("x\n", 7)]
    assert blocks("<!-- not run: -->\n```python\nx\n```\n") == [Block("x\n", 3)]


def test_outputs_are_refilled(tmp_path):
    """What a page says wrongly is written anew; what is right, with its dots, stays as it is; tests are not called."""
    said = "<!-- output -->\n```text\n{}\n```\n"
    code = "```python\nprint('one\\ntwo')\n```\n", "```python\nprint(0.123)\ndef test_it(number): 1 / 0\n```\n"
    right, dots = said.format("one\ntwo"), said.format("0.1...")
    page = _page(tmp_path, "# Title\n" + code[0] + said.format("old\n\nlines") + code[1] + dots + code[0] + right)
    assert refill(page) == 1
    assert page.read_text() == "# Title\n" + code[0] + right + code[1] + dots + code[0] + right
    assert refill(page) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nx\n", "line 1: the block is never closed"),
        ("<!-- output -->\n```\nx\n```\n", "line 2: output without a Python block before it"),
    ],
    ids=["never closed", "no code before"],
)
def test_broken_pages_are_seen(text, message):
    """A page whose blocks cannot be told apart is an error, not a page with fewer blocks."""
    with pytest.raises(ValueError) as caught:
        blocks(text)
    assert str(caught.value) == message


if __name__ == "__main__":
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:  # blocks write files
            os.chdir(folder)
            print(f"{page.name}: {refill(page)} outputs written")
            os.chdir(TOP)
    print("Run it again where outputs name lines of the page: they may have moved.")
