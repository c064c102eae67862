"""Makes the Python code of proto/; with --check, only says whether the committed code is that."""

import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ROOT / "services"
#: Our own contracts, and what is spoken of another project's.
FOLDERS = ("headrace/v1", "headrace/openengine/v1")


def generate(out: Path) -> None:
    """Writes the generated modules under that folder."""
    protos = sorted(path for folder in FOLDERS for path in (ROOT / "proto").glob(f"{folder}/*.proto"))
    kinds = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    if protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{_well_known()}", *kinds, *map(str, protos)]) != 0:
        sys.exit("the protos do not compile")


def _well_known() -> Path:
    """Where google/protobuf/*.proto are."""
    import grpc_tools

    return Path(grpc_tools.__file__).parent / "_proto"


def main() -> None:
    """Generates, or compares."""
    if "--check" not in sys.argv:
        generate(SERVICES)
        return
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as made:
        generate(Path(made))
        for folder in FOLDERS:
            fresh, committed = Path(made) / folder, SERVICES / folder
            names = sorted(path.name for path in fresh.iterdir())
            _, different, missing = filecmp.cmpfiles(fresh, committed, names, shallow=False)
            stale = sorted({path.name for path in committed.glob("*_pb2*")} - set(names))
            wrong += [f"{folder}/{name}" for name in different + missing + stale]
    if wrong:
        sys.exit(f"generated code is not that of proto/ (run 'make proto'): {', '.join(wrong)}")


if __name__ == "__main__":
    main()
