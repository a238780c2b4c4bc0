"""An SVG file is made safe to stand inside a page, beside others."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from fst.studies.reporting.figures import INK

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
ELEMENTS = frozenset(
    "svg g defs path rect circle ellipse line polyline polygon text tspan use clipPath "
    "linearGradient radialGradient stop image pattern mask marker symbol title desc".split()
)
ATTRIBUTES_WITH_IDS = ("clip-path", "fill", "stroke", "mask", "style", "filter")
DATA_IMAGE = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=\s]*")
FOREIGN_CSS = re.compile(r"url\(\s*['\"]?(?!#)|@import", re.IGNORECASE)
SMALLEST = 0.5  # of its natural width, below which a figure is scrolled instead of shrunk


def inline(path: Path, prefix: str, title: str, description: str) -> str:
    """The SVG as an element of an HTML page.

    Only known elements stay; scripts, style sheets, event handlers, metadata and everything that
    would be loaded from elsewhere go. Ids get ``prefix``, so that figures do not mix theirs up;
    ``title`` and ``description`` are what a screen reader says. Plots in the common style are
    transparent, with the page's text colour; others get a white background (class "paper").

    Raises:
        ValueError: the file is no SVG, or has no size.
    """
    text = path.read_text(encoding="utf-8")
    if "<!ENTITY" in text:
        raise ValueError(f"{path}: an SVG that defines entities is not read.")
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise ValueError(f"{path} is no valid SVG: {error}") from error
    if root.tag != f"{{{SVG}}}svg":
        raise ValueError(f"{path} is no SVG: its root is {root.tag!r}.")
    _clean(root, prefix)
    width = _width(root, path)
    drawn = root.find(".//path")
    adapts = INK in text and drawn is not None and "fill: none" in drawn.get("style", "")
    attributes = {
        "class": "adaptive" if adapts else "paper",
        "style": f"width:{width:.0f}pt;min-width:{SMALLEST * width:.0f}pt",
        "stroke-linejoin": "round",
        "role": "img",
        "aria-labelledby": f"{prefix}title {prefix}desc",
    }
    root.attrib.update(attributes)
    for position, (name, content) in enumerate((("title", title), ("desc", description))):
        element = ET.Element(name, {"id": f"{prefix}{name}"})
        element.text = content
        root.insert(position, element)
    markup = ET.tostring(root, encoding="unicode")
    return markup.replace(INK, "currentColor") if adapts else markup


def _width(root: ET.Element, path: Path) -> float:
    """In points, and without fixed width and height."""
    sizes = [re.match(r"[\d.]+", root.attrib.pop(name, "")) for name in ("width", "height")]
    if "viewBox" not in root.attrib and all(sizes):
        root.set("viewBox", " ".join(["0", "0", *(size[0] for size in sizes if size)]))
    box = root.get("viewBox", "").split()
    if len(box) != 4 or not re.fullmatch(r"[\d.]+", box[2]):
        raise ValueError(f"{path}: the SVG has neither a viewBox nor a width and a height.")
    return float(box[2])


def _clean(element: ET.Element, prefix: str) -> None:
    element.tag = element.tag.rpartition("}")[2]
    for name in list(element.attrib):
        value = element.attrib.pop(name)
        space, _, plain = name.rpartition("}")
        if plain.lower().startswith("on") or (space and space != f"{{{XLINK}"):
            continue
        if plain == "href":
            if value.startswith("#"):
                value = f"#{prefix}{value[1:]}"
            elif element.tag != "image" or not DATA_IMAGE.fullmatch(value):
                continue
        elif plain == "id":
            value = prefix + value
        elif space or (plain in ATTRIBUTES_WITH_IDS and FOREIGN_CSS.search(value)):
            continue
        elif plain in ATTRIBUTES_WITH_IDS:
            value = re.sub(r"url\(\s*['\"]?#([^)'\"]+)['\"]?\s*\)", rf"url(#{prefix}\1)", value)
        element.set(plain, value)
    for child in list(element):
        name = str(child.tag).rpartition("}")[2]
        if name not in ELEMENTS:
            element.remove(child)
        else:
            _clean(child, prefix)
