"""Writes a width-expanded model: a small model placed in a large shape (see the package docstring).

    python -m tools.width_expand swiftspec/demo/target Llama-3-8B build/grown-8b [--dtype int4] [--seed 0]

The shape is one of SHAPES (shapes.py) or a config.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from swiftspec.errors import UserError
from tools.width_expand.checkpoint import write
from tools.width_expand.shapes import DTYPES, SHAPES, read_shape


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tools.width_expand", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="directory of the small model")
    parser.add_argument("shape", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("out", type=Path, help="output directory")
    parser.add_argument("--dtype", choices=list(DTYPES), default="int4")
    parser.add_argument("--device", default="cpu", help="device on which the weights are computed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    args = parser.parse_args()
    try:
        write(args.model, read_shape(args.shape), args.dtype, args.out, args.device, args.seed)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
