"""Makes services/headrace/v1 from proto/headrace/v1; with --check, only says whether the committed code is that."""

import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "services" / "headrace" / "v1"


def generate(out: Path) -> None:
    """Writes the generated modules under that folder."""
    protos = sorted((ROOT / "proto").glob("headrace/v1/*.proto"))
    kinds = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    if protoc.main(["protoc", f"-I{ROOT / 'proto'}", *kinds, *map(str, protos)]) != 0:
        sys.exit("the protos do not compile")


def main() -> None:
    """Generates, or compares."""
    if "--check" not in sys.argv:
        generate(ROOT / "services")
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "headrace" / "v1"
        names = sorted(path.name for path in fresh.iterdir())
        _, different, missing = filecmp.cmpfiles(fresh, TARGET, names, shallow=False)
        stale = sorted({path.name for path in TARGET.glob("*_pb2*")} - set(names))
    if different or missing or stale:
        sys.exit(f"generated code is not that of proto/ (run 'make proto'): {', '.join(different + missing + stale)}")


if __name__ == "__main__":
    main()
