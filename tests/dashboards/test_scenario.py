"""The scenario as a program: it reports its progress, and an interruption leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

from tests.chaos.children import children_of
from tests.dashboards.prometheus import POSSIBLE
from tests.dashboards.stage import SOON
from tests.pods import only_with

ROOT = Path(__file__).parents[2]
FIRST = r"\d+ s  strict +ScrubberResidueAfterCertificate: cause present"
"""The message that appears once the acts have begun."""


def places_of(program: int) -> set[Path]:
    """Return the directories of the daemons that ``program`` has started."""
    found = set[Path]()
    for child in children_of(program):
        with suppress(OSError):  # a tenant or a command that has just ended
            words = Path(f"/proc/{child.pid}/cmdline").read_text()
            found |= {Path(each) for each in re.findall(r"--(?:sim|state|kubelet)-dir\0([^\0]+)", words)}
    return found


@only_with(POSSIBLE)
async def test_interrupted_scenario_leaves_nothing_behind(tmp_path: Path) -> None:
    # In a separate session, so that its processes can be counted, and with SIGINT not ignored, even if the test runner
    # does.
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.dashboards.scenario"),
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert program.stdout is not None
    try:
        output = ""
        async with asyncio.timeout(2 * SOON):
            while re.search(FIRST, output) is None:
                line = (await program.stdout.readline()).decode()
                assert line, output
                output += line
        (address,) = re.findall(r"prometheus (http://127\.0\.0\.1:\d+) answers", output)
        with await asyncio.to_thread(urllib.request.urlopen, f"{address}/-/ready", timeout=SOON) as page:
            assert page.status == 200
        places = set[Path]()
        async with asyncio.timeout(SOON):
            while len(places) < 3 * 5:  # a daemon may be restarting
                places |= places_of(program.pid)
                await asyncio.sleep(0.05)
        assert len(places) == 3 * 5
        assert all(each.exists() for each in places)
        program.send_signal(signal.SIGINT)
        async with asyncio.timeout(SOON):
            output = (await program.stdout.read()).decode()
            status = await program.wait()
        assert status == 128 + signal.SIGINT
        assert "interrupted" in output
        assert [each for each in places if each.exists()] == []
        assert list(tmp_path.iterdir()) == []
        async with asyncio.timeout(SOON):
            with suppress(ProcessLookupError):
                while True:  # a process killed with its daemon is a zombie until it is reaped
                    os.killpg(program.pid, 0)
                    await asyncio.sleep(0.05)
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
