"""Draw the four figures of docs/kernels.md: `python docs/images/zeros.py` writes them here.

Filled cells are numbers that are not zero. Colours are those of strategies.svg: blue is the weight,
green the input, orange a gradient of the output, grey a result in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

W, X, DY, SUM, INK, LINE = "#2563a8", "#3f7d3a", "#b4540a", "#6b7280", "#1b1f24", "#8a929c"
WIDTH = 640


class Drawing:
    """An SVG of boxes, lines and texts, WIDTH units wide."""

    def __init__(self, title: str, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="sans-serif" fill="{INK}">',
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        ]

    def box(
        self, x: int, y: int, colour: str, full: bool = True, *, w: int = 16, h: int = 16
    ) -> None:
        """A cell; white inside where the number is zero, or never read."""
        fill = colour if full else "#ffffff"
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="{colour}"/>'
        )

    def row(self, x: int, y: int, colour: str, bits: str, *, w: int = 16, step: int = 20) -> None:
        """Cells side by side, filled where ``bits`` has a 1."""
        for i, bit in enumerate(bits):
            self.box(x + step * i, y, colour, bit == "1", w=w)

    def text(self, x: int, y: int, words: str, *, code: bool = False, bold: bool = False) -> None:
        """A line of words that begins at x."""
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        style = ' font-family="monospace"' * code + ' font-weight="bold"' * bold
        self.parts.append(f'<text x="{x}" y="{y}" font-size="15"{style}>{words}</text>')

    def arrow(self, x: int, y: int, to_x: int, to_y: int) -> None:
        """A horizontal or vertical line with a head."""
        self.parts.append(f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{LINE}" stroke-width="1.5"/>')
        dx, dy = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
        head = f"M{to_x} {to_y}l{-7 * dx - 4 * dy} {-7 * dy - 4 * dx}l{8 * dy} {8 * dx}z"
        self.parts.append(f'<path d="{head}" fill="{LINE}"/>')

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def loop() -> Drawing:
    """One weight after the other: those that are not zero add a row of X to the registers."""
    d = Drawing("The inner loop: each number that is not zero adds one row to registers", 300)
    d.text(20, 28, "one output channel of W", bold=True)
    d.text(250, 28, "packed X: T vectors for each weight", bold=True)
    for i, bit in enumerate("10010110"):
        y = 48 + 22 * i
        d.box(100, y, W, bit == "1")
        d.row(250, y, X, bit * 7, w=26, step=30)
        if bit == "1":
            d.arrow(122, y + 8, 242, y + 8)
            d.text(132, y + 3, "offset")
            d.text(472, y + 13, "read")
    d.arrow(354, 228, 354, 246)
    d.row(250, 250, SUM, "1111111", w=26, step=30)
    d.text(20, 263, "T registers: the result")
    d.text(20, 288, "acc[0:T] += value · row[offset : offset + T vectors]", code=True)
    return d


def weight() -> Drawing:
    """Layout 1: a vector is one pixel of eight images, so that a tap is an offset."""
    d = Drawing("Layout 1: vectors over images; each tap of the kernel is an offset", 268)
    d.text(20, 28, "eight images", bold=True)
    for image in range(8):
        x, y = 20 + 9 * image, 104 - 8 * image
        d.box(x, y, X, False, w=60, h=60)
        d.box(x + 20, y + 20, X, w=12, h=12)
    d.arrow(164, 110, 206, 110)
    d.text(216, 68, "the same pixel of each: one vector", bold=True)
    d.row(216, 78, X, "11111111")
    d.text(216, 128, "a row of X: one vector for each column", bold=True)
    d.row(216, 138, X, "1" * 10, w=32, step=36)
    for tap in range(3):
        x, y = 216 + 36 * tap, 168 + 22 * tap
        d.parts.append(f'<path d="M{x} {y}v8h284v-8" fill="none" stroke="{W}" stroke-width="2"/>')
        d.text(x + 292, y + 10, f"tap {tap}")
    d.text(
        20, 256, "A tap moves the window by whole vectors: no load is unaligned, no lane is empty."
    )
    return d


def maps() -> Drawing:
    """Layout 2: a pixel's channels become a list, and each entry adds a row of the weight."""
    d = Drawing("Layout 2: each pixel's channels become a list of values and places", 268)
    d.text(20, 28, "a pixel of X", bold=True)
    d.text(20, 46, "after ReLU")
    d.text(150, 28, "its list", bold=True)
    d.text(320, 28, "W of one tap: a row for each", bold=True)
    d.text(320, 46, "input channel, output channels across")
    entries = 0
    for channel, bit in enumerate("01101000"):
        y = 58 + 20 * channel
        d.box(60, y, X, bit == "1")
        d.row(320, y, W, bit * 8, w=26, step=30)
        if bit == "1":
            d.text(150, 91 + 24 * entries, f"value, place {channel}", code=True)
            entries += 1
    d.arrow(84, 106, 140, 106)
    d.arrow(284, 106, 312, 106)
    d.arrow(436, 218, 436, 230)
    d.row(320, 234, SUM, "1" * 8, w=26, step=30)
    d.text(20, 247, "registers: Y of this pixel")
    return d


def grad_weight() -> Drawing:
    """Layout 3: bits of positions, combined with those that a tap sees."""
    d = Drawing("Layout 3: masks of positions; each bit adds a row of dY to a row of dW", 292)
    mask, tap = "101100101101", "011111101111"
    both = "".join("1" if a == b == "1" else "0" for a, b in zip(mask, tap, strict=True))
    names = ("X, one channel: not zero", "tap: inside, and listed", "both")
    for i, (name, bits) in enumerate(zip(names, (mask, tap, both), strict=True)):
        d.text(20, 55 + 28 * i, name)
        d.row(220, 42 + 28 * i, (X, LINE, X)[i], bits)
    d.text(220, 28, "64 positions: the bits of a word", bold=True)
    d.text(470, 55, "mask of the channel")
    d.text(470, 83, "and")
    d.text(470, 111, "six products")
    d.text(220, 144, "dY: a row for each position", bold=True)
    for i, position in enumerate(("2", "3", "6", "…")):
        d.text(220, 169 + 22 * i, position)
        d.row(250, 156 + 22 * i, DY, "1" * 7, w=26, step=30)
    d.arrow(354, 244, 354, 258)
    d.row(250, 262, SUM, "1" * 7, w=26, step=30)
    d.text(20, 275, "registers: a row of dW")
    return d


FIGURES: dict[str, Callable[[], Drawing]] = {
    "zeros_loop.svg": loop,
    "zeros_weight.svg": weight,
    "zeros_maps.svg": maps,
    "zeros_grad_weight.svg": grad_weight,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        Path(__file__).with_name(name).write_text(str(draw()), encoding="utf-8")
