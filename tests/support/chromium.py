"""A headless Chromium, driven by the DevTools protocol over two pipes."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager

import pytest

KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, "PageUp": 33}
KEYS |= {"PageDown": 34, "Escape": 27, "Tab": 9}
SHIFT = 8
WAIT_SECONDS = 60
CONTRAST = """(() => {
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = numbers(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const visible = element.checkVisibility({visibilityProperty: true}) && !element.closest("script");
    if (!visible || !walker.currentNode.data.trim()) continue;
    const axes = element.closest(".axes");
    const back = axes ? numbers(getComputedStyle(axes.parentElement).backgroundColor) : behind(element);
    const style = getComputedStyle(element), ink = element.closest("svg") ? style.fill : style.color;
    if (element.closest("svg") && /^rgb\\((27, 27, 27|254, 254, 254)\\)$/.test(ink)) continue;  // on a coloured cell
    const pair = [light(numbers(ink)), light(back)].sort((a, b) => a - b);
    found.push([(pair[1] + 0.05) / (pair[0] + 0.05), walker.currentNode.data.trim().slice(0, 30)]);
  }
  return [found.length, ...found.sort((a, b) => a[0] - b[0])[0]];
})()"""
"""The number of visible texts, the least contrast, and the words that have it."""


class Browser:
    """One page. `requests` and `complaints` collect what it asks the network for, and its errors and warnings."""

    def __init__(self, send, receive):
        self._send, self._receive, self._count = send, receive, 0
        self.requests, self.complaints, self._session = [], [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Send a command and return its result, noting the events that come before."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        self._send(message if self._session is None else message | {"sessionId": self._session})
        while (found := self._receive()).get("id") != self._count:
            self._note(found.get("method"), found.get("params", {}))
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        return found["result"]

    def _note(self, event, params):
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(params["args"])
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"])

    def open(self, path, *, width=1280, height=900, scheme="light", ready="document.readyState == 'complete'"):
        """Open a file on a screen of this size, and wait until `ready` holds."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.media(scheme)
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + WAIT_SECONDS
        while not self.run(f"Boolean({ready})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{path.name} is not ready: {self.complaints}")
            time.sleep(0.02)

    def media(self, scheme, kind=""):
        """Prefer light or dark; `kind` print shows the page as printed."""
        self.call(
            "Emulation.setEmulatedMedia", media=kind, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def run(self, script):
        """Return what a JavaScript expression gives, awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def press(self, key, *, shift=False):
        """Press a key of the keyboard."""
        code = KEYS.get(key)
        key_of = {"key": key, "windowsVirtualKeyCode": code} if code else {"key": key, "text": key}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, modifiers=SHIFT * shift, **key_of)

    def move(self, selector, x=0.5, y=0.5, *, click=False):
        """Move the mouse to a place in the first element of a selector, given as shares of its size."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height] })()"
        )
        at = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def picture(self, path, *, whole=True):
        """Save a screenshot of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium():
    """Start a browser; skips the test where there is none."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium")
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]

    def place():  # the protocol's pipes are the file descriptors 3 and 4
        os.dup2(os.dup(to_read), 3)
        os.dup2(os.dup(from_write), 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [program, *words, "--remote-debugging-pipe", f"--user-data-dir={folder}"],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        rest = b""

        def receive():
            nonlocal rest
            while b"\0" not in rest:
                part = os.read(from_read, 1 << 20)
                if not part:
                    raise RuntimeError("Chromium has ended")
                rest += part
            message, _, rest = rest.partition(b"\0")
            return json.loads(message)

        try:
            yield Browser(lambda message: os.write(to_write, json.dumps(message).encode() + b"\0"), receive)
        finally:
            process.kill()
            process.wait()
            os.close(to_write)
            os.close(from_read)
