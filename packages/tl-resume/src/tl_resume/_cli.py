"""The command line: ``tl-resume show``, ``diff`` and ``verify``."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tl_resume._diff._lines import Line

# As diff's: nothing to report, something to report, could not do it. A damaged file counts as a difference for verify.
SAME = 0
DIFFERENT = 1
TROUBLE = 2
# what a shell reports of a program that Ctrl-C ended
INTERRUPTED = 130

_FILES = """\
A FILE is a state file of tl-resume, any other .safetensors file, a file of
torch.save (read with weights_only=True: nothing is ever unpickled), the index
file of a sharded model, or a folder such as a checkpoint of the Hugging Face
Trainer. Files may be larger than memory."""
_CODES = "Exit status: 0 same (or intact), 1 different (or damaged), 2 trouble."
_STYLES = {
    "": "",
    "good": "bold green",
    "bad": "bold red",
    "title": "bold",
    "head": "dim",
    "name": "cyan",
    "figure": "",
    "faint": "dim",
}


class _TroubleError(Exception):
    """What the program says before it ends with status 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments; those of the process by default.

    Returns:
        The exit status: 0 same or intact, 1 different or damaged, 2 trouble.
    """
    options = _parser().parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        # a name that the terminal's encoding does not have must not end the program
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # who reads has seen enough; Python must not try to flush what is left when it exits
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return TROUBLE
    except KeyboardInterrupt:
        return INTERRUPTED
    except _TroubleError as trouble:
        print(f"tl-resume: {trouble}", file=sys.stderr)
        return TROUBLE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tl-resume",
        description="Show, compare and verify saved training state, without unpickling anything.",
        epilog=f"{_FILES}\n\n{_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help_text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=help_text,
            description=f"{help_text[0].upper()}{help_text[1:]}.",
            epilog=f"{_FILES}\n\n{_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--json", action="store_true", help="write JSON, which needs no rich")
        return added

    show = command("show", "show what is in a file or folder")
    show.add_argument("file", metavar="FILE", type=Path, help="the file or folder")
    show.add_argument("--all", action="store_true", help="every tensor and value, none grouped or left out")
    diff = command("diff", "compare two files or folders")
    diff.add_argument("a", metavar="A", type=Path, help="the first file or folder")
    diff.add_argument("b", metavar="B", type=Path, help="the second one, of the same kind or another")
    diff.add_argument("--rtol", metavar="R", type=_tolerance, default=0.0, help="relative tolerance, default 0")
    diff.add_argument(
        "--atol",
        metavar="A",
        type=_tolerance,
        default=0.0,
        help="absolute tolerance, default 0: elements differ beyond atol + rtol * |b|",
    )
    diff.add_argument("--all", action="store_true", help="every tensor and value, none grouped or left out")
    verify = command("verify", "check a state file against the digests that it carries")
    verify.add_argument("file", metavar="FILE", type=Path, help="the state file")
    return parser


def _version() -> str:
    try:
        return version("tl-resume")
    except PackageNotFoundError:  # run from its sources
        return "(not installed)"


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text!r}")
    return value


def _run(options: argparse.Namespace) -> int:
    if not options.json and find_spec("rich") is None:
        raise _TroubleError('tables need rich: pip install "tl-resume[cli]", or use --json')
    from tl_resume._format import StateFileError

    files = [options.a, options.b] if options.command == "diff" else [options.file]
    try:
        for file in files:
            file.stat()
        return {"show": _show, "diff": _diff, "verify": _verify}[options.command](options)
    except BrokenPipeError:
        raise
    except StateFileError as error:
        # a message about a file names it first
        raise _TroubleError(_told(str(error), files)) from None
    except OSError as error:
        place = error.filename or ", ".join(map(str, files))
        raise _TroubleError(f"{place}: {error.strerror or error}") from None


def _told(message: str, files: Sequence[Path]) -> str:
    for file in files:
        if message.startswith(str(file)):
            rest = message[len(str(file)) :]
            return message if rest.startswith(("/", ":")) else f"{file}: {rest.lstrip(' :')}"
    return message


def _show(options: argparse.Namespace) -> int:
    from tl_resume._diff import _summary

    summary = _summary.summarise(options.file)
    if summary.refused and not summary.parts:
        file, reason = next(iter(summary.refused.items()))
        raise _TroubleError(f"{options.file / file}: {reason}")
    if options.json:
        _write_json(summary.as_dict())
    else:
        _paint(_summary.lines(summary, everything=options.all))
    return SAME


def _diff(options: argparse.Namespace) -> int:
    from tl_resume._diff import _text, diff_states

    diff = diff_states(options.a, options.b, rtol=options.rtol, atol=options.atol)
    if options.json:
        _write_json(diff.as_dict())
    else:
        _paint(_text.lines(diff, everything=options.all))
    if diff.same:
        return SAME
    return DIFFERENT if diff.differences or diff.only_in_a or diff.only_in_b else TROUBLE


def _verify(options: argparse.Namespace) -> int:
    from tl_resume._diff._verify import verify

    verification = verify(options.file)
    if options.json:
        _write_json(verification.as_dict())
    else:
        _paint(verification.lines())
    return SAME if verification.intact else DIFFERENT


def _paint(lines: list[Line]) -> None:
    """Print lines, coloured where they go to a terminal; whatever its width, no name is broken."""
    from rich.console import Console
    from rich.text import Text

    from tl_resume._diff._lines import clean

    console = Console(highlight=False)
    for line in lines:
        text = Text.assemble(*((clean(stretch), _STYLES[role]) for stretch, role in line))
        text.rstrip()
        console.print(text, soft_wrap=True)


def _write_json(content: dict[str, Any]) -> None:
    json.dump(content, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
