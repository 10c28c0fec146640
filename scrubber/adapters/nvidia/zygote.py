"""The process that has imported NVML's bindings and never loaded NVML, so that an event child costs little memory.

Promise: it calls no driver, so it holds no GPU and cannot hang; each child that it forks initialises NVML itself. Runs as
``python -m scrubber.adapters.nvidia.zygote PROGRAM…``.
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
