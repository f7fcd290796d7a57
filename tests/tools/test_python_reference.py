"""The reference of the Python package has everything that it exports, read without importing it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import python_reference

ROOT = Path(__file__).parents[2]

SOURCE = {
    "__init__.py": '"""A package."""\n\nfrom . import part\nfrom .work import Result, Worker, run\n\n'
    '__all__ = ["Result", "Worker", "part", "run"]\n',
    "part.py": '"""A part."""\n\nfrom .work import run\n\n__all__ = ["run"]\n',
    "work.py": '''
"""Work."""
import a_module_that_is_nowhere
from typing import NamedTuple

class Result(NamedTuple):
    """What came of it."""

    value: int
    note: str | None = None

class Worker:
    """Works.

    Args:
        hours: of a day.

    Attributes:
        tired: after work.
    """

    def __init__(self, hours: int, *, _secret: int = 0) -> None:
        self.tired = False

    def work(self, times: int = 1, more=0, others=0) -> Result:
        """Does it.

        Args:
            times: how often; the
                second line.
            more, others: likewise.

        Returns:
            What came of it.

        Raises:
            ValueError: never.
        """

    @property
    def name(self) -> str:
        """Its name."""

    def undocumented(self): ...
    def _hidden(self):
        """Hidden."""

def run(worker: Worker) -> Result:
    """Runs `worker`."""
''',
}


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "pack"
    folder.mkdir()
    for name, text in SOURCE.items():
        (folder / name).write_text(text)
    return folder


def test_pages(package, tmp_path):
    assert python_reference.write_pages(package, tmp_path) == ["pack", "pack.part"]
    page = (tmp_path / "pack.md").read_text()
    for expected in (
        "{py:class} Result",
        "{py:attribute} value\n\n:type: int",
        "{py:class} Worker(hours: int)\n",
        ":param hours: of a day.",
        "{py:attribute} tired\n\nafter work.",
        "{py:method} work(times: int = 1, more=0, others=0) -> Result\n",
        ":param times: how often; the\n  second line.",
        ":param more: likewise.\n:param others: likewise.",
        ":returns: What came of it.",
        ":raises ValueError: never.",
        "{py:property} name\n\nIts name.",
        "{py:function} run(worker: Worker) -> Result\n\nRuns `worker`.",
    ):
        assert expected in page
    for hidden in ("_secret", "undocumented", "_hidden"):
        assert hidden not in page
    assert (
        "{py:currentmodule} pack.part\n:::\n\n## run\n\n:::{py:function} run" in (tmp_path / "pack.part.md").read_text()
    )


def test_an_export_without_a_docstring_is_an_error(package, tmp_path):
    (package / "work.py").write_text(SOURCE["work.py"].replace('    """Runs `worker`."""', "    return worker.work()"))
    with pytest.raises(ValueError, match=r"pack.work.run is exported and has no docstring"):
        python_reference.write_pages(package, tmp_path)


def test_the_real_package_is_complete(tmp_path):
    names = python_reference.write_pages(ROOT / "python/clowder", tmp_path)
    assert names[0] == "clowder"
    page = (tmp_path / "clowder.md").read_text()
    exported = {}
    exec((ROOT / "python/clowder/__init__.py").read_text().partition("__all__ =")[2].join(["__all__ =", ""]), exported)
    for name in exported["__all__"]:
        assert f"clowder.{name}" in names or re.search(rf"^:+{{py:(class|function)}} {name}\b", page, re.MULTILINE)


def test_torch_is_not_needed(tmp_path):
    """The reference is made without importing the package or what it imports."""
    program = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, 'tools/docs')\n"
        "from pathlib import Path; import python_reference\n"
        f"python_reference.write_pages(Path('python/clowder'), Path({str(tmp_path)!r}))\n"
        "assert 'clowder' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
