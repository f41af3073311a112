"""Generates the Python modules of the messages between machines from their .proto file.

    python -m tools.protos [--check]

`--check` writes nothing and reports whether the files are current.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
PROTO = "swiftspec/distributed/transport/grpc/swiftspec.proto"
MADE = tuple(PROTO.replace(".proto", end) for end in ("_pb2.py", "_pb2.pyi"))


def made() -> dict[str, str]:
    """Returns the text of each generated file, by its path from the root."""
    with tempfile.TemporaryDirectory() as folder:
        if protoc.main(["", f"-I{ROOT}", f"--python_out={folder}", f"--pyi_out={folder}", str(ROOT / PROTO)]) != 0:
            raise SystemExit(f"{PROTO} cannot be compiled")
        return {name: (Path(folder) / name).read_text(encoding="utf-8") for name in MADE}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    texts = made()
    stale = [name for name, text in texts.items() if not (ROOT / name).is_file() or (ROOT / name).read_text() != text]
    for name in [] if check else stale:
        (ROOT / name).write_text(texts[name], encoding="utf-8")
    for name in stale if check else []:
        print(f"{name} is out of date; run python -m tools.protos", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
