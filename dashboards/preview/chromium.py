"""Takes screenshots of a file with a headless Chromium over a pipe, without a port, network access or stored data.

It uses Debian's package `chromium`; SCRUBBER_PREVIEW_BROWSER names another browser.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Without --no-sandbox Chromium refuses to run as root; it opens only files of this tree and has no network access.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--run-all-compositor-stages-before-draw",
    "--disable-checker-imaging",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)
STATE_EXPRESSION = "window.previewState ?? ''"
PAUSE_EXPRESSION = "new Promise((done) => setTimeout(done, 500))"
MAX_SCREENSHOTS = 20


class BrowserError(Exception):
    """There is no browser, it did not respond, or the page reports that it could not be drawn."""


def find_browser() -> str:
    named = os.environ.get("SCRUBBER_PREVIEW_BROWSER")
    found = named or next((path for name in NAMES if (path := shutil.which(name))), None)
    if not found:
        raise BrowserError("Chromium was not found: `apt-get install --no-install-recommends chromium`")
    return found


class Chromium:
    """A browser, for use in a `with` statement."""

    def __init__(self, deadline: float = 60.0) -> None:
        self._deadline = deadline
        self._profile = tempfile.TemporaryDirectory(prefix="scrubber-preview-", ignore_cleanup_errors=True)
        self._sent = 0
        self._unread = b""
        self.page_errors: list[str] = []
        # Chromium reads commands from descriptor 3 and writes responses to 4.
        shell = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null', "sh"]
        self._process = subprocess.Popen(
            [*shell, find_browser(), *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"TZ": "UTC", "LANG": "C.UTF-8"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        self._profile.cleanup()

    def screenshot(self, page: Path, width: int) -> bytes:
        """Return a PNG of a page, `width` pixels wide and as high as its content, once it reports that it is done."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Runtime.enable", session)
        self._call("Page.bringToFront", session)
        self._size(session, width, 1000)
        self._call("Page.navigate", session, url=page.as_uri())
        self._wait_until_drawn(session)
        height = int(self._evaluate(session, "document.getElementById('board').firstElementChild.offsetHeight"))
        self._size(session, width, height)
        if (state := self._evaluate(session, "window.previewFinished()")) != "done":
            raise BrowserError(str(state))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        # On a busy machine, scrolling layers are drawn some frames later than the rest, without any notification.
        shot = ""
        for _ in range(MAX_SCREENSHOTS):
            before = shot
            shot = self._call("Page.captureScreenshot", session, format="png", clip=clip)["data"]
            if shot == before:
                self._call("Target.closeTarget", targetId=target)
                return base64.b64decode(shot)
            self._evaluate(session, PAUSE_EXPRESSION)
        raise BrowserError("the page keeps changing")

    def _size(self, session: str, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", session, **metrics)

    def _wait_until_drawn(self, session: str) -> None:
        end = time.monotonic() + self._deadline
        while (state := self._evaluate(session, STATE_EXPRESSION)) != "done":
            if state:
                raise BrowserError(str(state))
            if time.monotonic() > end:
                raise BrowserError(f"the page was not drawn in {self._deadline:g} s")
            select.select([], [], [], 0.1)

    def _evaluate(self, session: str, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", session, expression=expression, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        pipe: IO[bytes] | None = self._process.stdin
        assert pipe
        pipe.write(json.dumps(message).encode() + b"\0")
        pipe.flush()
        while (answer := self._next()).get("id") != self._sent:
            self._note(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout
        descriptor = self._process.stdout.fileno()
        while b"\0" not in self._unread:
            if not select.select([descriptor], [], [], self._deadline)[0]:
                raise BrowserError(f"Chromium did not respond within {self._deadline:g} s")
            read = os.read(descriptor, 1 << 16)
            if not read:
                raise BrowserError(f"Chromium exited with status {self._process.wait()}")
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.page_errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.page_errors.append(
                " ".join(str(part.get("value", part.get("description"))) for part in params["args"])
            )
