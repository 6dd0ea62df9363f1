"""A headless Chromium that tests talk to over pipes, in the DevTools protocol; nothing is listening on any port.

Protocol: https://chromedevtools.github.io/devtools-protocol/ (messages are JSON, each ended by a zero byte).
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe")
# The browser reads commands from descriptor 3 and writes answers to 4. Duplicate first, because our own descriptors may have these numbers.
_LAUNCH = """
import os, sys
ends = [os.dup(int(number)) for number in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
    os.set_inheritable(number, True)
os.execv(sys.argv[3], sys.argv[3:])
"""
_ERRORS = ("Runtime.exceptionThrown", "Log.entryAdded")


class Page:
    """One page. `errors` are the exceptions and log entries of its scripts, as they came in; `requests` the URLs that it has asked for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = os.fdopen(answers, "rb")
        self._number = 0
        self._session = ""
        self._target = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = False

    def open(self, url: str) -> None:
        """Show a page in place of the one before, and return once it has loaded."""
        before, self._session = self._target, ""
        self._target = target = self.send("Target.createTarget", url="about:blank")["targetId"]
        if before:
            self.send("Target.closeTarget", targetId=before)
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self._load("Page.navigate", url=url)  # about:blank has been loaded, too

    def reload(self) -> None:
        self._load("Page.reload")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page. A promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str, within_s: float) -> None:
        """Wait until a JavaScript expression is true."""
        look = f"const look = () => {condition} ? done(true) : performance.now() > end ? done(false) : setTimeout(look, 50);"
        end = f"const end = performance.now() + {1000 * within_s};"
        is_true = self.evaluate(f"new Promise((done) => {{ {end} {look} look(); }})")
        assert is_true, (
            f"{condition} did not become true in {within_s} s; the page: {self.evaluate('document.body.innerText')}; {self.errors}"
        )

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that `selector` matches."""
        found: list[str] = self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)")
        return found

    def resize(self, width: int, height: int) -> None:
        """Resize the window; return when the page has heard of it."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def press(self, key: str, *, text: str = "") -> None:
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol and return its answer; what happens meanwhile is noted."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _load(self, method: str, **parameters: object) -> None:
        self.loaded = False
        self.send(method, **parameters)
        while not self.loaded:
            self._receive()

    def close(self) -> None:
        os.close(self._commands)
        self._answers.close()

    def _receive(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "Chromium ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        self.loaded |= message.get("method") == "Page.loadEventFired"
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") in _ERRORS:
            self.errors.append(json.dumps(message["params"]))
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with one page, and a profile of its own. Ends the browser in any case."""
    assert CHROMIUM, "the test should have been skipped"
    from_us, commands = os.pipe()
    answers, to_us = os.pipe()
    launch = [sys.executable, "-c", _LAUNCH, str(from_us), str(to_us)]
    command = [*launch, CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(from_us)
    os.close(to_us)
    page = Page(commands, answers)
    try:
        yield page
        page.send("Browser.close")
    finally:
        page.close()  # an orderly browser ends when its pipe does
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
