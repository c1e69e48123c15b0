"""What the HTML pages share: the plotting library and their data, compressed, and the script that unpacks them.

plotly.js is 4.8 MB of text. It is stored compressed (gzip in base 85) and unpacked with the browser's own
DecompressionStream, which keeps a page under 2 MB.
"""

from __future__ import annotations

import base64
import gzip
from functools import cache
from pathlib import Path

__all__ = ["pack", "packed_plotly", "unpack_script"]


def pack(content: bytes) -> str:
    """Compress to text that can stand in an HTML script element: base 85 without `<` and `&`."""
    packed = base64.b85encode(gzip.compress(content, 9, mtime=0))
    return packed.translate(bytes.maketrans(b"<&", b".,")).decode()


@cache
def packed_plotly() -> str:
    """Return plotly.js as `pack` writes it."""
    from plotly.offline import get_plotlyjs

    return pack(get_plotlyjs().encode())


def unpack_script() -> str:
    """Return the script that defines `unpack(id)`, a promise of the text packed in an element, and `loadPlotly()`."""
    return (Path(__file__).parent / "unpack.js").read_text(encoding="utf-8")
