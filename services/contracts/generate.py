"""Regenerate the Python stubs from the .proto files, or check that they are current.

Usage: ``python services/contracts/generate.py [--check]``.
"""

from __future__ import annotations

import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent
PROTO, OUT = ROOT / "proto", ROOT / "src"
SCRIPTS = Path(sys.executable).parent
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")


def generate(out: Path) -> None:
    """Write stubs, type stubs and package markers for every .proto into *out*."""
    out.mkdir(parents=True, exist_ok=True)
    protos = sorted(PROTO.rglob("*.proto"))
    flags = [f"--{kind}_out={out}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")]
    flags += [f"--plugin={name}={SCRIPTS / name}" for name in PLUGINS]
    names = [str(p.relative_to(PROTO)) for p in protos]
    if protoc.main(["protoc", f"-I{PROTO}", *flags, *names]):
        raise SystemExit("protoc failed")
    for proto in protos:
        folder = out / proto.relative_to(PROTO).parent
        if "\nservice " not in proto.read_text():
            for path in folder.glob(f"{proto.stem}_pb2_grpc.py*"):
                path.unlink()
        while folder != out:
            (folder / "__init__.py").touch()
            folder = folder.parent
    for package in out.iterdir():
        (package / "py.typed").touch()


def differences(left: Path, right: Path) -> list[str]:
    """Return the relative paths whose content differs or that exist on one side only."""

    def files(base: Path) -> set[Path]:
        return {p.relative_to(base) for p in base.rglob("*.py*") if p.suffix in {".py", ".pyi"}}

    common = files(left) & files(right)
    changed = {n for n in common if not filecmp.cmp(left / n, right / n, shallow=False)}
    return sorted(map(str, changed | (files(left) ^ files(right))))


def main() -> None:
    """Write the stubs, or with ``--check`` compare them and exit 1 on a difference."""
    if "--check" not in sys.argv:
        generate(OUT)
        return
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        if stale := differences(Path(tmp), OUT):
            raise SystemExit("stale stubs, run `make proto`: " + ", ".join(stale))


if __name__ == "__main__":
    main()
