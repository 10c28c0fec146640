"""Run an attack: ``python -m tests.attacks NAME [--accomplice] [--device FILE] [--shared DIR] [--target PATH ...]``.

It prints one JSON line with ``ready`` when the attack has begun, and runs until it is killed. Without a name it lists the
attacks.
"""

import argparse
import importlib
from pathlib import Path

from tests.attacks.programs import names
from tests.attacks.tools import Place


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description="Attack the hand-over of a GPU.")
    parser.add_argument("name", nargs="?", choices=names())
    parser.add_argument(
        "--accomplice", action="store_true", help="the part of another pod, without a GPU; start it first"
    )
    parser.add_argument("--device", type=Path, help="the device's file (default: the first GPU of this container)")
    parser.add_argument("--shared", type=Path, default=Path("/shared"), help="a directory that both pods have")
    parser.add_argument("--target", type=Path, action="append", default=[], help="what is attacked; see the attack")
    options = parser.parse_args()
    if options.name is None:
        for name in names():
            print(f"{name}: {importlib.import_module(f'tests.attacks.{name}').TRIES}")
        return
    program = importlib.import_module(f"tests.attacks.{options.name}")
    part = program.accomplice if options.accomplice else program.attack
    part(Place(options.device, options.shared, tuple(options.target)))


if __name__ == "__main__":
    main()
