"""How the site's source is laid from the repository's pages."""

from pathlib import Path

import build
import links
import pytest

MOVED = {Path("include/clowder/layer.h"): Path("reference/clowder-layer.h.md")}


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("docs/a.md", "[l](../include/clowder/layer.h)", "[l](../reference/clowder-layer.h.md)"),
        ("README.md", "[l](include/clowder/layer.h)", "[l](reference/clowder-layer.h.md)"),
        ("docs/a.md", "[code](../src/plan)", "code"),
        ("docs/a.md", "[plan](../src/plan/task.h)", "[plan](../src/plan/task.h)"),
        ("docs/a.md", "[x](https://example.org/layer.h)", "[x](https://example.org/layer.h)"),
        ("docs/a.md", "[there](memory.md#formulas), `w[i](j)`", "[there](memory.md#formulas), `w[i](j)`"),
    ],
)
def test_links_lead_to_what_the_site_has(page, text, expected):
    assert build.rewrite(text, Path(page), MOVED) == expected


def test_contents_are_the_headings_and_links_of_the_list_of_pages():
    text = "# Title\n\nText with a [link](memory.md).\n\n## One\n\n- [A](a.md): what\n- [B](../b.md)\n\n## Two\n\n- [C](c/d.md)\n"
    made = build.contents(text, ["clowder"])
    assert made.count("```{toctree}") == 4
    assert ":caption: One\n\n/docs/a\n/b\n```" in made
    assert ":caption: Two\n\n/docs/c/d\n```" in made
    assert ":caption: Reference\n\n/reference/clowder\n```" in made


def test_every_page_of_the_repository_is_in_the_list_of_pages():
    listed = {links.target_of(build.CONTENTS, link.target) for link in links.links_of(build.ROOT, build.CONTENTS)}
    pages = set(links.find_pages(build.ROOT)) - {Path("README.md"), build.CONTENTS}
    assert pages <= listed
