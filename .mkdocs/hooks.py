"""What the site adds to docs/*.md: pages made of other files, links between them, outputs that are easy to read.

The pages read well on a code host too, where links go to files of the repository. Here links to a file that has a page
lead to the page, and what a check prints becomes a block of its own, with its rule ids linked and long lines wrapped.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

TOP = Path(__file__).parents[1]
_OUTPUT = re.compile(r"^<!-- output -->\n+```(?:text)?$", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
_LINE = re.compile(r'(<span id="__line-\d+-\d+">)(.*?\n)</span>', re.DOTALL)
_RULE = re.compile(r"^\[([a-z0-9-]+)\]")
_LABEL = re.compile(r"^  (cause|fix):")
# Of a rule that several checks have: which entry a page means. Elsewhere it is the rule of a training run.
_CHECK_OF_PAGE = {"accumulation.md": "accumulation", "mixed-precision.md": "mixed-precision", "resume.md": "resume"}


def sources() -> dict[str, str]:
    """Return the file of the repository that each page of the site is made of."""
    found = {path.name: f"docs/{path.name}" for path in sorted(TOP.glob("docs/*.md"))}
    for readme in sorted(TOP.glob("packages/*/README.md")):
        found[f"packages/{readme.parent.name}.md"] = f"packages/{readme.parent.name}/README.md"
    more = {"examples.md": "examples/README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
    return found | more


def addresses() -> dict[str, str]:
    """Return the page, with its anchor, that stands for each file or folder of the repository that links may name."""
    found = {source: page for page, source in sources().items()}
    found |= {posixpath.dirname(source): page for source, page in found.items() if source.endswith("/README.md")}
    found |= {f"examples/{path.name}": f"examples.md#{_anchor(path.name)}" for path in TOP.glob("examples/*.py")}
    return found | {"README.md": "index.md"}


def examples() -> str:
    """Return a page that holds the examples, each whole, with the list of them linked."""
    text = (TOP / "examples" / "README.md").read_text().rstrip()
    text = re.sub(r"^- (`(\S+\.py)`)", lambda match: f"- [{match[1]}](#{_anchor(match[2])})", text, flags=re.MULTILINE)
    for path in sorted(TOP.glob("examples/*.py")):
        text += f"\n\n## {path.name}\n\n```python\n{path.read_text().rstrip()}\n```"
    return text + "\n"


def relink(markdown: str, page: str) -> str:
    """Point links to files of the repository at their pages.

    Args:
        markdown: the text of a page.
        page: the page, below the site's top folder.
    """
    known = addresses()
    folder = posixpath.dirname(sources()[page])

    def other(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if target not in known:
            return match[0]
        address, _, anchor = known[target].partition("#")
        anchor = match[2] or (f"#{anchor}" if anchor else "")
        return f"]({posixpath.relpath(address, posixpath.dirname(page) or '.')}{anchor})"

    return _LINK.sub(other, markdown)


def dress_output(content: str, rules: str, anchors: set[str], check: str) -> str:
    """Dress the lines of text blocks: rows of tables keep their width, rule ids lead to their entries.

    Args:
        content: the HTML of a page.
        rules: the address of the page of rules, from this page.
        anchors: the anchors of that page.
        check: the check whose rules the page means, where several have one of that name.
    """

    def line(match: re.Match[str]) -> str:
        text = html.unescape(match[2])
        kind = "row" if re.search(r"\S {2,}\S", text.rstrip()) else "said"
        inner = match[2]
        if rule := _RULE.match(text):
            anchor = next((one for one in (f"{rule[1]}-{check}", rule[1]) if one in anchors), "")
            kind, shown = "rule", f"[{rule[1]}]"
            linked = f'<a href="{rules}#{anchor}">{shown}</a>' if anchor else shown
            inner = inner.replace(shown, linked, 1)
        elif _LABEL.match(text):
            kind, inner = "label", _LABEL.sub(r"  <b>\1:</b>", inner)
        return f'{match[1][:-1]} class="{kind}">{inner}</span>'

    def block(match: re.Match[str]) -> str:
        return _LINE.sub(line, match[0])

    return re.sub(r'<div class="language-text[^"]* highlight">.*?</div>', block, content, flags=re.DOTALL)


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


def on_config(config: Any) -> Any:
    """List the packages in the navigation."""
    section = next(item for item in config.nav if "Packages" in item)
    packages = [page for page in sources() if page.startswith("packages/")]
    section["Packages"] = [{Path(page).stem: page} for page in packages]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are made of files outside of docs/."""
    for page, source in sources().items():
        if page == "examples.md":
            files.append(File.generated(config, page, content=examples()))
        elif not source.startswith("docs/"):
            files.append(File.generated(config, page, content=(TOP / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Mark what blocks print, and point links at pages."""
    return relink(_OUTPUT.sub("\n``` { .text .output }", markdown), page.file.src_uri)


def on_page_content(content: str, *, page: Page, config: Any, files: Files) -> str:
    """Dress the outputs."""
    headings = re.findall(r"^##+ (.+)$", (TOP / "docs" / "rules.md").read_text(), re.MULTILINE)
    rules = posixpath.relpath("rules.html", posixpath.dirname(page.file.dest_uri) or ".")
    check = _CHECK_OF_PAGE.get(page.file.src_uri, "")
    return dress_output(content, rules, {_anchor(heading) for heading in headings}, check)
