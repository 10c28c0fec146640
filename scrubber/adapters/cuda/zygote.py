"""The process that has imported CuPy and never touched CUDA, so that a job on a device costs only a context.

Promise: it never opens a device itself, so it holds none and blocks no reset; where CuPy cannot be imported it reports
what to install. The children that it forks see one device, by their environment
(:mod:`scrubber.adapters.cuda.programs`).

Runs as ``python -m scrubber.adapters.cuda.zygote PROGRAM…``; the environment must keep numerical libraries from
starting threads (``OPENBLAS_NUM_THREADS=1``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

from scrubber.adapters.children import child
from scrubber.adapters.children.child import ParentSocket
from scrubber.adapters.children.zygote_server import ZygoteSocket, serve_forks

__all__: list[str] = []


def _load_programs(programs: Sequence[str]) -> Mapping[str, Callable[[ParentSocket], None]]:
    """Import CuPy and the programs; each program is a module with a function ``run(link)``."""
    importlib.import_module("cupy")
    return {name: importlib.import_module(name).run for name in programs}


def _report_load_failure(link: ZygoteSocket, error: Exception) -> None:
    """Answer the next request with what is missing, and end: it may be installed when the next zygote is started."""
    message = (
        f"CuPy cannot be imported ({error}), so no GPU can be cleared: install the service with its extra "
        "cuda12 (or cuda13, depending on the driver's version)."
    )
    if link.receive() is not None:
        link.send({"fault": "away", "message": message})


def main() -> None:
    link = child.connect_to_parent_as(ZygoteSocket)
    try:
        programs = _load_programs(link.arguments)
    except ImportError as error:
        _report_load_failure(link, error)
        return
    run = serve_forks(link, programs)
    if run is not None:
        run()


if __name__ == "__main__":
    main()
