"""Builds the documentation's site into build/docs/html, and fails on any warning and on any broken internal link.

The pages are those of the repository, read as they are there. docs/README.md is also the site's list of contents: its
headings are the parts, its links the pages. References of the headers and of the Python package are added.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import cpp_reference
import links
import python_reference
from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parents[2]
CONTENTS = Path("docs/README.md")
_TARGET = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")


def main() -> int:
    pages = links.find_pages(ROOT)
    if found := links.problems(ROOT, pages):
        return fail(found)

    folder = ROOT / "build/docs"
    shutil.rmtree(folder, ignore_errors=True)
    source, site = folder / "source", folder / "html"
    lay_source(pages, source)
    conf = str(Path(__file__).parent)
    options = [
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "-j",
        "auto",
        "-b",
        "html",
        "-d",
        str(folder / "doctrees"),
    ]
    if status := build_main([*options, "-c", conf, str(source), str(site)]):
        return status
    shutil.copy(site / "README.html", site / "index.html")
    if found := links.site_problems(site):
        return fail(found)

    external = {link.target for page in pages for link in links.links_of(ROOT, page) if link.is_external}
    (folder / "external-links.txt").write_text("".join(f"{target}\n" for target in sorted(external)))
    print(
        f"docs: build/docs/html/index.html; {len(external)} external links, not tried, in build/docs/external-links.txt"
    )
    return 0


def lay_source(pages: list[Path], source: Path) -> None:
    """Lays the site's source: the pages, the files that they show or link, the references, and the list of contents."""
    reference = source / "reference"
    reference.mkdir(parents=True)
    cpp = cpp_reference.write_pages(ROOT / "include", reference)
    python = python_reference.write_pages(ROOT / "python/clowder", reference)
    moved = {Path("include") / name.replace("-", "/"): Path("reference") / f"{name}.md" for name in cpp}
    moved[Path("python/clowder/__init__.py")] = Path("reference/clowder.md")

    for page in pages:
        text = (ROOT / page).read_text()
        if page == Path("README.md"):
            text += contents((ROOT / CONTENTS).read_text(), [*python, *cpp])
        write(source / page, rewrite(text, page, moved))
        for link in links.links_of(ROOT, page):
            target = links.target_of(page, link.target)
            if not link.is_external and (ROOT / target).is_file() and target.suffix != ".md":
                (source / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / target, source / target)


def rewrite(text: str, page: Path, moved: dict[Path, Path]) -> str:
    """Links to sources that have a page of reference lead there; links to folders, which a site has none of, become text."""
    internal = {link.target for link in links.links_in(text, page) if not link.is_external}

    def replace(match: re.Match[str]) -> str:
        if match["target"] not in internal:
            return match[0]
        target = links.target_of(page, match["target"])
        if target in moved:
            up = "../" * len(page.parent.parts)
            return f"[{match['text']}]({up}{moved[target].as_posix()})"
        return match[0] if (ROOT / target).is_file() else match["text"]

    return _TARGET.sub(replace, text)


def contents(text: str, references: list[str]) -> str:
    """Sphinx's lists of contents from the page that lists the pages."""
    parts: dict[str, list[str]] = {}
    entries: list[str] = []
    for line in text.splitlines():
        if line.startswith("## "):
            entries = parts.setdefault(line.removeprefix("## "), [])
        elif line.startswith("- ") and (match := _TARGET.search(line)) and match["target"].endswith(".md"):
            entries.append(f"/{links.target_of(CONTENTS, match['target']).with_suffix('')}")
    parts["Reference"] = [f"/reference/{name}" for name in references]
    parts["Pages"] = [f"/{CONTENTS.with_suffix('')}"]
    lists = [
        f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(entries) + "\n```\n"
        for caption, entries in parts.items()
        if entries
    ]
    return "\n" + "\n".join(lists)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def fail(found: list[str]) -> int:
    print("\n".join(found), file=sys.stderr)
    print(f"docs: {len(found)} broken links", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
