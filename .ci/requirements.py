"""Prints what pyproject.toml asks for, with the extras that a development machine needs, one requirement a line.

The packages are installed before the project itself, so that a change of the code never installs them anew.
"""

import sys
import tomllib
from pathlib import Path

EXTRAS = ("llama", "dev")


def main() -> None:
    """Writes the list to stdout."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    sys.stdout.write("\n".join(wanted) + "\n")


if __name__ == "__main__":
    main()
