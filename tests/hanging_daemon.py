"""The command line, whose event loop hangs from SIGUSR1 on; threads of the process continue.

``python -m tests.hanging_daemon serve ...`` is otherwise the same as ``scrubber serve ...``.
"""

import signal
import sys
import time

from scrubber.cli.main import main


def hang(number: int, frame: object) -> None:
    """Block the main thread, which runs the event loop."""
    time.sleep(3600)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, hang)
    main(sys.argv[1:])
