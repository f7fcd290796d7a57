"""Links of the Markdown pages, as they stand in the repository, and of the built site."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token


class Link(NamedTuple):
    page: Path
    line: int
    target: str

    @property
    def is_external(self) -> bool:
        return bool(urlsplit(self.target).scheme)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.target}"


def find_pages(root: Path) -> list[Path]:
    """The Markdown pages of the repository, relative to `root`."""
    patterns = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    return sorted({path.relative_to(root) for pattern in patterns for path in root.glob(pattern)})


def links_of(root: Path, page: Path) -> Iterator[Link]:
    return links_in((root / page).read_text(), page)


def links_in(text: str, page: Path) -> Iterator[Link]:
    """The links and images of a page's text; what looks like one in code is none."""
    for token in _tokens(text):
        for child in token.children or []:
            target = child.attrGet("href") or child.attrGet("src")
            if target:
                yield Link(page, token.map[0] + 1, str(target))


def problems(root: Path, pages: list[Path]) -> list[str]:
    """One line for each internal link whose file or heading is not there."""
    result = []
    for page in pages:
        for link in links_of(root, page):
            if not link.is_external and (reason := _problem(root, link)):
                result.append(f"{link}: {reason}")
    return result


def target_of(page: Path, target: str) -> Path:
    """The file that a link of `page` names, relative to the repository."""
    path = unquote(urlsplit(target).path)
    parts: list[str] = []
    for part in (page.parent / path).parts if path else page.parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        else:
            parts.append(part)
    return Path(*parts)


def _problem(root: Path, link: Link) -> str | None:
    target = target_of(link.page, link.target)
    fragment = urlsplit(link.target).fragment
    if ".." in target.parts or target.is_absolute():
        return "leads out of the repository"
    if not (root / target).exists():
        return "there is no such file"
    if fragment and target.suffix == ".md" and fragment not in anchors((root / target).read_text()):
        return "there is no such heading"
    return None


@cache
def anchors(text: str) -> frozenset[str]:
    """Of the headings, as forges make them: lower case, no punctuation, hyphens for spaces, numbers for repetitions."""
    tokens = _tokens(text)
    seen: Counter[str] = Counter()
    result = set()
    for opening, inline in pairwise(tokens):
        if opening.type != "heading_open":
            continue
        plain = "".join(child.content for child in inline.children if child.type in ("text", "code_inline"))
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        result.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(result)


def site_problems(site: Path) -> list[str]:
    """One line for each internal link of the built site whose file or anchor is not there."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    result = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.exists():
                result.append(f"{path.relative_to(site)}: {target}: there is no such file")
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].ids:
                result.append(f"{path.relative_to(site)}: {target}: there is no such anchor")
    return result


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = {"top"}
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if name in ("href", "src") and value and value != "#":
                self.targets.add(value)


def _tokens(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)
