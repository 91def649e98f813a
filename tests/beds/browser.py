"""Headless Chromium, driven over its DevTools pipe, and what is asked of our page in it."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT = 30.0


class Page:
    """One tab."""

    def __init__(self, send_to: int, receive_from: int) -> None:
        self._send_to, self._receive_from = send_to, receive_from
        self._buffer = b""
        self._id = 0
        self._session = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send_to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._event(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receive_from], [], [], deadline - time.monotonic())
            if not ready:
                raise AssertionError("the browser does not answer")
            data = os.read(self._receive_from, 1 << 20)
            if not data:
                raise AssertionError("the browser ended")
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(raw))

    def _event(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            text = details.get("exception", {}).get("description") or details["text"]
            self.errors.append(text)
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url')}")
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, expression: str) -> Any:
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"])
        return result["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The expression's value once it is true."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            try:
                if value := self.run(expression):
                    return value
            except AssertionError as error:
                if "navigated" not in str(error):  # a new page is on its way: ask that one
                    raise
            time.sleep(0.02)
        raise AssertionError(f"never true: {expression}; errors: {self.errors}")

    def press(self, key: str) -> None:
        codes = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            "End": 35,
            "Home": 36,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        text = {"Enter": "\r"}.get(key)
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **extra,
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """A real click with the mouse into the middle of an element, scrolled into sight."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(data["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A fresh browser with one tab.

    Args:
        profile: empty directory for its files.
    """
    assert CHROMIUM is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    command = [CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox"]
    command += ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"]
    command += ["--disable-background-networking", "--disable-component-update"]
    command += ["--disable-quic", "--disable-sync"]
    command += [f"--user-data-dir={profile}", "about:blank"]
    # DevTools wants exactly the descriptors 3 and 4.
    shell = f'exec "$@" 3<&{to_read} 4>&{from_write}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(to_write, from_read)
    finally:
        process.terminate()
        process.wait(10)
        os.close(to_write)
        os.close(from_read)


LIVE = (
    "(document.getElementById('link-agent')?.textContent === 'agent: live'"
    " && !document.getElementById('main').hidden)"
)
DETAILS = "document.getElementById('details').textContent"
DETAILS_TITLE = "document.getElementById('details-title').textContent"
BANNERS = "document.getElementById('banners').textContent"
TITLE = "document.getElementById('containers-title').textContent"
LIST = "document.getElementById('list').textContent"
MORE = "document.getElementById('more').textContent"
REJECTIONS = "document.getElementById('refusals').textContent"
STEPS = "document.querySelectorAll('#details .steps li').length"
ROWS = "document.querySelectorAll('#list tbody tr').length"
PODS = (
    "[...document.querySelectorAll('#list tbody tr')].map(r => r.querySelector('bdi').textContent)"
)
LETTERS = (
    "[...document.querySelectorAll('#list tbody tr')]"
    ".map(r => r.dataset.id + r.querySelector('.key').textContent)"
)
CPUS = "[...document.querySelectorAll('#map [data-cpu]')].map(c => +c.dataset.cpu)"
NUMA_NODES = "[...document.querySelectorAll('[data-numa]')].map(c => +c.dataset.numa)"
MARKED = "[...document.querySelectorAll('.cpu.marked')].map(c => +c.dataset.cpu)"
STICKING_OUT = (
    "[...document.querySelectorAll('.node')].filter(n => n.scrollWidth > n.clientWidth).length"
)

SHAPES = """(() => {
  // What is left of every state's look when all colours are taken away.
  const plain = (text) => text.replace(/(rgba?|color)\\([^()]*\\)/g, 'colour');
  const found = {};
  for (const cell of document.querySelectorAll('#map .cpu')) {
    const style = getComputedStyle(cell), letter = cell.lastChild;
    const shown = getComputedStyle(letter).display === 'none' ? '' : letter.textContent;
    found[cell.dataset.dress.split(' ')[0]] =
      [plain(style.backgroundImage), plain(style.boxShadow), shown ? 'letter' : ''].join(' | ');
  }
  return found;
})()"""


def cell(cpu: int) -> str:
    return f"document.querySelector('[data-cpu=\"{cpu}\"]')"


def label(cpu: int) -> str:
    """What a screen reader says of a CPU."""
    return f"{cell(cpu)}.getAttribute('aria-label')"


def press_button(selector: str, text: str) -> str:
    """Presses the first button whose text holds ``text``."""
    return (
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        f".find(b => b.textContent.includes({json.dumps(text)})).click()"
    )


def fill(element: str, value: str, event: str = "input") -> str:
    """Sets the value of a field or a choice, as a hand would."""
    return (
        f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('{event}')); }})"
        f"(document.getElementById('{element}'))"
    )


def look(element: str) -> str:
    """Colour, texture and letter of a thread or of a row's key."""
    return (
        f"(e => {{ const s = getComputedStyle(e); return s.backgroundColor + s.backgroundImage"
        f" + (e.querySelector('.letter') ?? e).textContent; }})({element})"
    )


def visit(page: Page, bed: Any, fragment: str = "") -> None:
    """Open the page that a bed serves, until it is up to date."""
    page.open(bed.url + fragment)
    page.wait(f"location.href.startsWith('{bed.url}') && {LIVE}")


def tick(root: Path, busy: Mapping[int, int], total: int) -> None:
    """The modelled kernel's count of each CPU's time, by its number."""
    lines = (f"cpu{cpu} {now} 0 0 {total - now} 0 0 0 0 0 0" for cpu, now in busy.items())
    file = root / "proc/stat"
    file.parent.mkdir(exist_ok=True)
    fresh = file.with_name("stat.new")
    fresh.write_text("\n".join(["cpu  1 1 1 1", *lines, ""]))
    fresh.rename(file)
