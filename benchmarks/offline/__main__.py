"""Packs what a machine without network lacks into one file, and unpacks it there:

    python -m benchmarks.offline survey > machine.json        # there, in a copy of this checkout
    python -m benchmarks.offline pack --machine machine.json --repo CosyVoice --matcha Matcha-TTS --out offline.tar.xz
    python -m benchmarks.offline unpack offline.tar.xz DIR    # there; then DIR/publish --device cuda --out published

``survey`` and ``unpack`` need Python's standard library alone, ``pack`` also pip and a package index. The machine has
to have torch; it may have other versions of what the reference implementation needs, which sees its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.offline.machine import Machine, survey
from benchmarks.offline.pack import LACKING, PackError, pack
from benchmarks.offline.unpack import UnpackError, unpack


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where something is missing."""
    options = _options(arguments)
    try:
        if options.verb == "survey":
            print(json.dumps(survey()))
        elif options.verb == "pack":
            pack(
                _machine(options),
                options.out,
                repo=options.repo,
                matcha=options.matcha,
                commit=options.reference_commit,
                lacking=options.lacking,
            )
        else:
            unpack(options.bundle, options.folder, links=options.link)
    except (PackError, UnpackError) as error:
        sys.stderr.write(f"offline: {error}\n")
        return 1
    return 0


def _machine(options: argparse.Namespace) -> Machine:
    if options.machine is not None:
        return Machine(**json.loads(options.machine.read_text(encoding="utf-8")))
    return Machine(options.python, options.arch, options.glibc)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What the figures need, for a machine without network.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("survey", help="run there: prints what the machine is and has")
    packing = verbs.add_parser("pack", help="run where there is a network: writes the file")
    which = packing.add_mutually_exclusive_group(required=True)
    which.add_argument("--machine", type=Path, help="what survey printed")
    which.add_argument("--python", help="version there, such as 3.12, where nothing can be asked")
    packing.add_argument("--arch", default="x86_64", help="its processor, with --python")
    packing.add_argument("--glibc", default="2.28", help="its C library, with --python")
    packing.add_argument(
        "--lacking",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"packages that it lacks; default: by survey, or with --python {' '.join(LACKING)}",
    )
    packing.add_argument("--repo", type=Path, help="checkout of the reference; default: no comparison")
    packing.add_argument(
        "--matcha", type=Path, help="checkout of Matcha-TTS; default: third_party of the repo"
    )
    packing.add_argument("--reference-commit", help="of --repo; default: what git says")
    packing.add_argument("--out", type=Path, required=True, help="file, such as offline.tar.xz")
    unpacking = verbs.add_parser("unpack", help="run there: makes a folder with what is needed")
    unpacking.add_argument("bundle", type=Path)
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument(
        "--link", nargs="+", default=[], metavar="NAME", help="more modules of the machine for the reference"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
