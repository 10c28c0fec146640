"""An unrelated process on a GPU, for tests: it has the device open and is on the driver's list until it ends.

It is run by its path, with the GPU's directory, its device node, the directory of the device below the GPU's, the bytes
that it uses, and for an instance its two ids. It prints "ready" when it holds the device, and then does nothing. Its
entry has the format of a context of CuPy's stand-in, without claims: it changes none of the memory.
"""

import fcntl
import os
import signal
import sys
from pathlib import Path


def main(gpu: str, node: str, device: str, used_bytes: str, *ids: str) -> None:
    os.open(node, os.O_RDWR | os.O_NOCTTY)
    entry = Path(gpu) / "processes" / "compute.d" / str(os.getpid())
    entry.parent.mkdir(parents=True, exist_ok=True)
    fresh = entry.with_name(f".{entry.name}")
    with fresh.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(" ".join((used_bytes, *ids)) + f"\n{device}\n")
        file.flush()
        fresh.replace(entry)
        print("ready", flush=True)
        while True:
            signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
