"""Records `make demo` as an animated picture: docs/assets/demo.svg.

The demo runs in a terminal of its own, and what it prints is kept with the time when it came. The
picture shows each line at that time, then the summary for a while, and starts again. Readers who
prefer no motion, and programs that play no animation, see the last screen. The picture brings its
own dark card, and asks for no font but the reader's own.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

PROJECT = Path(__file__).resolve().parents[1]
PICTURE = PROJECT / "docs" / "assets" / "demo.svg"

COLUMNS, ROWS = 64, 32
STEP = 0.2
"""Seconds between two pictures of the same line, at least."""
BEFORE = 1.0
"""Seconds until the first line; how long Python takes to start is left out."""
HOLD = 6.0
"""Seconds that the last screen stays."""

CHARACTER, LINE, SIZE = 7.2, 17, 12
LEFT, TOP = 14, 52

STYLE = """\
    .card { fill: #0d1117; stroke: #30363d }
    .dot { fill: #484f58 }
    .name { fill: #8b949e; font: 12px system-ui, sans-serif; text-anchor: middle }
    .text { fill: #e6edf3 }
    .soft { fill: #8b949e }
    .bar { fill: #3bc9db }
    .good { fill: #69db7c; font-weight: bold }
    .bad { fill: #ffa94d }
    .past { opacity: 0 }"""


class Shown(NamedTuple):
    """What a line of the terminal says, from a time on."""

    at: float
    text: str


Lines = Sequence[Sequence[Shown]]


def main() -> int:
    """Run the demo and draw it; a demo that failed is not drawn."""
    status, chunks = record([sys.executable, "-m", "examples.demo"])
    lines = list(screen(chunks))
    if status != 0:
        print(*(line[-1].text for line in lines if line), sep="\n")
        return status
    PICTURE.write_text(draw(lines), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(PROJECT)}: {len(lines)} lines")
    return 0


def record(command: Sequence[str]) -> tuple[int, list[Shown]]:
    """Run a command in a terminal; return its exit status, and what it printed when."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    # The size of the terminal itself counts, not what these two say of the caller's.
    env = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    began = time.monotonic()
    ran = subprocess.Popen(command, cwd=PROJECT, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    chunks: list[Shown] = []
    while chunk := _read(ours):
        chunks.append(Shown(time.monotonic() - began, chunk.decode()))
    os.close(ours)
    started = chunks[0].at - BEFORE if chunks else 0.0
    return ran.wait(), [Shown(at - started, text) for at, text in chunks]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the last writer is gone
        return b""


def screen(chunks: Sequence[Shown]) -> Iterator[list[Shown]]:
    """Return each line with all that it said; a line that is written over says several things."""
    line: list[Shown] = []
    text = ""
    for at, chunk in chunks:
        for part in re.split(r"(\r?\n|\r\x1b\[K)", chunk):
            if part.endswith("\n"):
                yield _steps([*line, Shown(at, text)])
                line, text = [], ""
            elif part.endswith("\x1b[K"):
                line, text = [*line, Shown(at, text)] if text else line, ""
            else:
                text += part


def _steps(line: Sequence[Shown]) -> list[Shown]:
    """Leave out what is gone too soon to be read; the last text always stays."""
    kept: list[Shown] = []
    for shown in line[:-1]:
        if not kept or shown.at - kept[-1].at >= STEP:
            kept.append(shown)
    last = line[-1]
    return kept if kept and kept[-1].text == last.text else [*kept, last]


def draw(lines: Lines) -> str:
    """Return the picture: one text for each state of each line."""
    end = max(shown.at for line in lines for shown in line)
    whole = end + HOLD
    width = round(2 * LEFT + COLUMNS * CHARACTER)
    height = TOP + LINE * (len(lines) + 1) + 8
    frames: list[str] = []
    texts = [_text("$ make demo", 0, "text", "")]
    for row, line in enumerate(lines, start=1):
        for number, (shown, until) in enumerate(pairwise([*line, None])):
            if shown is None or not shown.text:
                continue
            name = f"r{row}s{number}"
            frames.append(_frames(name, shown.at / whole, until and until.at / whole))
            kind = "" if until is None else " past"
            texts += _coloured(shown.text, row, f"{name}{kind}")
    moving = "\n".join(f"      {frame}" for frame in frames)
    body = "\n".join(f"    {text}" for text in texts)
    last = "\n".join(line[-1].text for line in lines)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" \
height="{height}" role="img" aria-labelledby="title desc">
  <title id="title">make demo, recorded</title>
  <desc id="desc">{escape(last)}</desc>
  <style>
{STYLE}
    @media (prefers-reduced-motion: no-preference) {{
      .moves {{ animation: 0s step-end infinite; animation-duration: {whole:.1f}s }}
{moving}
    }}
  </style>
  <rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10"/>
  <g class="dot"><circle cx="20" cy="18" r="5"/><circle cx="37" cy="18" r="5"/>\
<circle cx="54" cy="18" r="5"/></g>
  <text class="name" x="{width // 2}" y="22">semel</text>
  <g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="{SIZE}">
{body}
  </g>
</svg>
"""


def _frames(name: str, start: float, end: float | None) -> str:
    """Return the rules that show something from a share of the time on, until another."""
    steps = ["0%{opacity:0}", f"{start:.2%}{{opacity:1}}"]
    if end is not None:
        steps.append(f"{end:.2%}{{opacity:0}}")
    return f"@keyframes {name}{{{''.join(steps)}}} .{name}{{animation-name:{name}}}"


def _coloured(text: str, row: int, classes: str) -> Iterator[str]:
    """Return the texts of a line: its bar and its numbers have colors of their own."""
    classes = f"moves {classes}"
    if text.startswith("OK:"):
        yield _text(text, row, "good", classes)
        return
    colour = "bad" if "SIGKILL" in text else "text"
    for piece in re.finditer(r"#+|\.{2,}|(?:(?!#|\.{2,}).)+", text):
        kind = {"#": "bar", ".": "soft"}.get(piece[0][0], colour)
        yield _text(piece[0], row, kind, classes, piece.start())


def _text(text: str, row: int, colour: str, classes: str, column: int = 0) -> str:
    """Return one text at its place: the length is given, whatever font the reader has."""
    column += len(text) - len(text.lstrip())
    text = text.strip()
    if not text:
        return ""
    left = LEFT + column * CHARACTER
    names = " ".join(filter(None, (colour, classes)))
    return (
        f'<text class="{names}" x="{left:.1f}" y="{TOP + row * LINE}" xml:space="preserve" '
        f'textLength="{len(text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs">'
        f"{escape(text)}</text>"
    )


if __name__ == "__main__":
    sys.exit(main())
