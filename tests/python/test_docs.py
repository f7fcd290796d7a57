"""The snippets of the documentation run."""

import functools
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_snippets(page, monkeypatch):
    """One after the other, as a reader would type them. Compiled code goes through the same steps, except C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    text = (ROOT / page).read_text()
    snippets = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert snippets
    names = {"__name__": "snippets"}
    for snippet in snippets:
        # Blank lines before it, so that an error names the page's line.
        lines_before = text.count("\n", 0, snippet.start(1))
        exec(compile("\n" * lines_before + snippet.group(1), page, "exec"), names)
