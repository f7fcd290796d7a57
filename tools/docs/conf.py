"""Settings of Sphinx for the documentation's site; build.py lays its source and runs it."""

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]

project = "Clowder"
author = "the authors of Clowder"
version = release = re.search(r'^version = "(.*)"', (_ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 4
smartquotes = False  # "argument" is what a user compares with
root_doc = "README"
highlight_language = "text"
html_theme = "furo"
html_title = f"Clowder {version}"
html_copy_source = False
html_show_sphinx = False
