"""The command `clowder`: hands over to the program that the package carries."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    program = Path(__file__).parent / "bin" / "clowder"
    if not program.exists():
        sys.exit("clowder: this package was built without the command (CLOWDER_BUILD_CLI=OFF)")
    os.execv(program, [str(program), *sys.argv[1:]])
