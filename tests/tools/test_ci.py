"""What a change has to pass is the same wherever it is run."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
STAGE = WORKFLOW["jobs"]["stage"]


def local_stages() -> list[str]:
    return re.search(r"^for stage in (.*); do$", (ROOT / ".ci/run").read_text(), re.MULTILINE)[1].split()


def test_the_workflow_runs_the_stages_of_the_local_script():
    assert STAGE["strategy"]["matrix"]["stage"] == local_stages()
    commands = [step["run"] for step in STAGE["steps"] if "run" in step]
    assert commands[-1] == "make ${{ matrix.stage }}"


def test_every_stage_is_a_target_of_make():
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(local_stages()) <= targets


def test_the_cache_of_packages_depends_on_all_that_decides_on_them():
    key = next(step["with"]["key"] for step in STAGE["steps"] if "cache" in step.get("uses", ""))
    for part in ("python-version", "matrix.stage", "'Makefile'", "'requirements/*.txt'"):
        assert part in key


def test_the_workflow_installs_what_the_local_script_installs():
    installed = next(step["run"] for step in STAGE["steps"] if "apt-get install" in step.get("run", ""))
    packages = set(re.findall(r"missing\+=\(([a-z0-9+-]+)\)", (ROOT / ".ci/run").read_text()))
    packages.discard("python3-venv")  # setup-python's interpreter has it
    assert packages <= set(installed.split())
