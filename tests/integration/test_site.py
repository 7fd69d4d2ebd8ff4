"""The documentation is a site: it builds strictly, needs nothing from outside, and its search knows every rule."""

from __future__ import annotations

import html.parser
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tl_pytest._rule_ids import RULES

TOP = Path(__file__).parents[2]
PARTS = ["mkdocs.yml", ".mkdocs", "docs", "examples", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
pytest.importorskip("material")


def build(top: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout into a folder, as the strict build of the CI does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=top,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    built = build(TOP, folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def copy(tmp_path):
    """A copy of what the site is made of, to break."""
    for part in PARTS:
        source = TOP / part
        if source.is_dir():
            shutil.copytree(source, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / part)
    for readme in TOP.glob("packages/*/README.md"):
        place = tmp_path / readme.relative_to(TOP)
        place.parent.mkdir(parents=True)
        shutil.copy(readme, place)
    return tmp_path


class Addresses(html.parser.HTMLParser):
    """Collect what a page loads, and where its navigation leads."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: set[str] = set()
        self.navigation: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.add(values.get("src", ""))
        if tag == "link":
            self.loaded.add(values.get("href", ""))
        if tag == "a" and "md-nav__link" in values.get("class", ""):
            self.navigation.add(values["href"])


def addresses(page: str) -> Addresses:
    found = Addresses()
    found.feed(page)
    return found


def outside(page: str) -> list[str]:
    """Return what a page loads from other hosts."""
    return sorted(one for one in addresses(page).loaded if one.startswith(("http:", "https:", "//")))


def unknown(rules: set[str], index: str) -> list[str]:
    """Return the rules that a search index has no entry for: a heading with the rule's id."""
    titles = {entry["title"].split(" ")[0] for entry in json.loads(index)["docs"]}
    return sorted(rules - titles)


def test_every_page_is_in_the_navigation(site):
    """The start page leads to each page of docs/, each package, the examples and the notes for contributors."""
    pages = {path.with_suffix(".html").name for path in TOP.glob("docs/*.md")} - {"index.html"}
    packages = {f"packages/{path.parent.name}.html" for path in TOP.glob("packages/*/README.md")}
    found = addresses((site / "index.html").read_text()).navigation
    assert len(pages) > 10
    assert len(packages) > 5
    assert pages | packages | {"examples.html", "contributing.html", "changelog.html"} <= found


def test_the_search_knows_every_rule(site):
    """Its index has an entry with the id of each rule of each check."""
    ids = {rule for rules in RULES.values() for rule in rules}
    assert len(ids) > 100
    assert unknown(ids, (site / "search" / "search_index.json").read_text()) == []


def test_nothing_is_loaded_from_outside(site):
    """Scripts, styles, fonts and images of all pages come with the site, which is whole without a network."""
    loaded = {path.name: outside(path.read_text()) for path in site.rglob("*.html")}
    assert len(loaded) > 20
    assert {name: found for name, found in loaded.items() if found} == {}
    assert [path.name for path in site.rglob("*.css") if "url(http" in path.read_text()] == []


def test_a_page_names_no_machine(site):
    """No page holds a path of the machine that it was built on."""
    assert [path.name for path in site.rglob("*.html") if str(TOP) in path.read_text()] == []


@pytest.mark.parametrize(
    ("page", "text", "message"),
    [
        (
            "new.md",
            "# New\n",
            'The following pages exist in the docs directory, but are not included in the "nav" configuration:\n'
            "  - new.md\n",
        ),
        (
            "pytest.md",
            "\n[x](nowhere.md)\n",
            "Doc file 'pytest.md' contains a link 'nowhere.md', but the target is not found among documentation files.",
        ),
        (
            "pytest.md",
            "\n[x](rules.md#no-such-rule)\n",
            "Doc file 'pytest.md' contains a link 'rules.md#no-such-rule', but the doc 'rules.md' does not contain an "
            "anchor '#no-such-rule'.",
        ),
        (
            "pytest.md",
            "\n[x](../packages/tl-core/pyproject.toml)\n",
            "Doc file 'pytest.md' contains a link '../packages/tl-core/pyproject.toml', but the target is not found "
            "among documentation files.",
        ),
    ],
    ids=["page not in the navigation", "link to no page", "link to no heading", "file without a page"],
)
def test_a_broken_site_is_not_built(copy, page, text, message):
    """The strict build ends with what is wrong."""
    with (copy / "docs" / page).open("a") as file:
        file.write(text)
    built = build(copy, copy / "site")
    assert built.returncode == 1
    assert message in built.stderr


def test_a_copy_that_nobody_broke_is_built(copy):
    """The guard goes off for what was broken, not for the copying."""
    built = build(copy, copy / "site")
    assert built.returncode == 0, built.stderr


def test_what_is_loaded_from_outside_is_seen():
    """Scripts, styles and images of other hosts count, links for the reader do not."""
    page = '<link href="https://a/x.css"><script src="//b/y.js"></script><img src="z.svg"><a href="https://c">c</a>'
    assert outside(page) == ["//b/y.js", "https://a/x.css"]


def test_a_rule_that_the_search_does_not_know_is_seen():
    """A rule counts by a heading of its own, not by the text of another."""
    entries = [{"title": "a-b (static)", "text": "c-d"}, {"title": "a-b-c", "text": ""}]
    assert unknown({"a-b", "c-d", "b-c"}, json.dumps({"docs": entries})) == ["b-c", "c-d"]


@pytest.fixture(scope="module")
def hooks():
    """The module of the site's hooks."""
    spec = importlib.util.spec_from_file_location("site_hooks", TOP / ".mkdocs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "link", "becomes"),
    [
        ("resume.md", "../packages/tl-core", "packages/tl-core.md"),
        ("resume.md", "../packages/tl-core/README.md", "packages/tl-core.md"),
        ("resume.md", "../README.md", "index.md"),
        ("resume.md", "../examples", "examples.md"),
        ("resume.md", "../examples/test_resume.py", "examples.md#test_resumepy"),
        ("resume.md", "rules.md#no-update", "rules.md#no-update"),
        ("packages/tl-core.md", "../../docs/rules.md#no-update", "../rules.md#no-update"),
        ("packages/tl-core.md", "../tl-amp", "tl-amp.md"),
        ("contributing.md", "docs/rules.md", "rules.md"),
        ("resume.md", "https://example.org/../README.md", "https://example.org/../README.md"),
        ("resume.md", "../packages/tl-core/pyproject.toml", "../packages/tl-core/pyproject.toml"),
    ],
)
def test_links_to_files_lead_to_their_pages(hooks, page, link, becomes):
    """A file of the repository that has a page is linked as that page; other links stay."""
    assert hooks.relink(f"see [this]({link}) here", page) == f"see [this]({becomes}) here"


def test_outputs_are_dressed(hooks):
    """Rows keep their width, a rule's id leads to its entry, that of the page's check first, and labels stand out."""
    lines = ["[a-b] seen\n", "  cause: it\n", "  step  loss\n", "a sentence\n", "[x-y] other\n"]
    spans = "".join(f'<span id="__line-0-{number}">{line}</span>' for number, line in enumerate(lines, 1))
    block = f'<div class="language-text output highlight"><pre>{spans}</pre></div>'
    dressed = hooks.dress_output(block, "../rules.html", {"a-b", "a-b-resume"}, "resume")
    assert dressed.replace(' id="__line-0-', ' id="') == (
        '<div class="language-text output highlight"><pre>'
        '<span id="1" class="rule"><a href="../rules.html#a-b-resume">[a-b]</a> seen\n</span>'
        '<span id="2" class="label">  <b>cause:</b> it\n</span>'
        '<span id="3" class="row">  step  loss\n</span>'
        '<span id="4" class="said">a sentence\n</span>'
        '<span id="5" class="rule">[x-y] other\n</span>'
        "</pre></div>"
    )
    code = block.replace("language-text output", "language-python")
    assert hooks.dress_output(code, "../rules.html", {"a-b"}, "") == code
