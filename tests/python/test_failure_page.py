"""docs/failure.md shows what happens: its commands and its snippets run, and say what the page says."""

import doctest
import re
import subprocess
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/failure.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def commands():
    """(command, lines that it prints, exit code or None) of each `$` line of the page."""
    result = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            if command == "echo $?":
                result[-1] = (*result[-1][:2], int(lines[0]))
            else:
                result.append((command, lines, None))
    return result


@pytest.mark.parametrize(("command", "lines", "code"), commands(), ids=lambda value: str(value)[:60])
def test_commands_print_what_the_page_shows(command, lines, code):
    run = subprocess.run(command.split(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert sorted(run.stdout.splitlines()) == sorted(lines)  # a pipe may order the two streams otherwise
    if code is not None:
        assert run.returncode == code


def test_snippets_print_what_the_page_shows():
    names = {}
    runner = doctest.DocTestRunner(verbose=False)
    for number, block in enumerate(blocks("pycon")):
        test = doctest.DocTestParser().get_doctest(block, names, f"snippet {number}", "docs/failure.md", 0)
        runner.run(test, clear_globs=False)
        names = test.globs
    assert runner.tries >= 15
    assert runner.failures == 0
