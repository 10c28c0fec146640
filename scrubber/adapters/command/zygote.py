"""The process that forks the supervisors of commands, so that no command waits for an interpreter.

Runs as ``python -m scrubber.adapters.command.zygote PROGRAM…``; each program is a module with a function ``run(link)``.
"""

from __future__ import annotations

import importlib

from scrubber.adapters.children import child
from scrubber.adapters.children.zygote_server import ZygoteSocket, serve_forks

__all__: list[str] = []


def main() -> None:
    link = child.connect_to_parent_as(ZygoteSocket)
    run = serve_forks(link, {name: importlib.import_module(name).run for name in link.arguments})
    if run is not None:
        run()


if __name__ == "__main__":
    main()
