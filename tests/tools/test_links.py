"""The checks of links find what is broken, and nothing else."""

import links
import pytest


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Top\n\n[page](docs/page.md)\n")
    (tmp_path / "docs/page.md").write_text("# Page\n\n## A `code` heading, twice!\n\n## A code heading, twice!\n")
    (tmp_path / "docs/picture.svg").write_text("<svg/>")
    return tmp_path


def problems_of(repository, text):
    (repository / "docs/page.md").write_text((repository / "docs/page.md").read_text() + "\n" + text)
    return links.problems(repository, links.find_pages(repository))


@pytest.mark.parametrize(
    "link",
    [
        "[up](../README.md)",
        "[up](../README.md#top)",
        "[here](#page)",
        "[a heading](#a-code-heading-twice)",
        "[the second](page.md#a-code-heading-twice-1)",
        "![picture](picture.svg)",
        "[elsewhere](https://example.org/nothing.md#nowhere)",
        "`[no link](nothing.md)`",
        "    [no link](nothing.md)",
    ],
)
def test_sound_links_pass(repository, link):
    assert problems_of(repository, link) == []


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("[x](nothing.md)", "no such file"),
        ("[x](README.md)", "no such file"),
        ("![x](nothing.svg)", "no such file"),
        ("[x](../README.md#bottom)", "no such heading"),
        ("[x](#a-code-heading-twice-2)", "no such heading"),
        ("| a |\n|---|\n| [x](nothing.md) |", "no such file"),
        ("[x][ref]\n\n[ref]: nothing.md", "no such file"),
        ("[x](../../outside.md)", "out of the repository"),
    ],
)
def test_broken_links_are_found(repository, link, reason):
    (found,) = problems_of(repository, link)
    assert found.startswith("docs/page.md:") and reason in found


def test_the_line_of_a_broken_link_is_told(repository):
    (repository / "README.md").write_text("# Top\n\ntext\n\n[x](nothing.md)\n")
    assert links.problems(repository, links.find_pages(repository))[0].startswith("README.md:5: nothing.md")


def test_the_built_site_is_checked_too(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text('<h1 id="here"></h1><a href="sub/b.html#there">b</a><a href="https://x.org">x</a>')
    (tmp_path / "sub/b.html").write_text('<p id="there"></p><a href="../a.html#here">a</a><a href="#there">b</a>')
    assert links.site_problems(tmp_path) == []
    (tmp_path / "a.html").write_text('<a href="sub/b.html#nowhere">b</a><img src="c.png">')
    found = links.site_problems(tmp_path)
    assert any("sub/b.html#nowhere" in line for line in found)
    assert any("c.png" in line for line in found)
    assert any("../a.html#here" in line for line in found)
