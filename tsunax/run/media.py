"""Images, histograms and texts that `run.log` takes like numbers.

A history keeps numbers only. Loggers with the attribute `media = True` get these objects in their
rows.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from tsunax._core import trees
from tsunax.errors import RowError


class Image:
    """An image for `run.log(x=Image(array))`, at loggers that show images.

    `array` has the shape (height, width), or (height, width, channels) with 1, 3 (RGB) or 4 (RGBA)
    channels: uint8, or real numbers between 0 and 1, which are clipped. Raises RowError for another
    shape or dtype.

    >>> Image(np.zeros((2, 3))).pixels.shape
    (2, 3, 1)
    """

    def __init__(self, array: ArrayLike) -> None:
        pixels = np.asarray(array)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        is_real = np.issubdtype(pixels.dtype, np.floating) or str(pixels.dtype) == "bfloat16"
        if pixels.ndim != 3 or pixels.shape[-1] not in (1, 3, 4) or not pixels.size:
            raise RowError(
                "array",
                "Image()",
                got=trees.describe(array),
                expected="(height, width) or (height, width, 1, 3 or 4)",
            )
        if is_real:
            pixels = np.round(np.clip(np.nan_to_num(pixels.astype(np.float32)), 0, 1) * 255)
        elif pixels.dtype != np.uint8:
            raise RowError(
                "array", "Image()", trees.describe(array), "uint8, or floats from 0 to 1"
            )
        self.pixels: np.ndarray = pixels.astype(np.uint8)

    def png(self) -> bytes:
        """The content of a PNG file."""
        height, width, channels = self.pixels.shape
        color_type = {1: 0, 3: 2, 4: 6}[channels]
        rows = np.insert(self.pixels.reshape(height, -1), 0, 0, axis=1)  # 0: a row without a filter
        chunks = {
            b"IHDR": struct.pack(">2I5B", width, height, 8, color_type, 0, 0, 0),
            b"IDAT": zlib.compress(rows.tobytes()),
            b"IEND": b"",
        }
        content = b"\x89PNG\r\n\x1a\n"
        for kind, data in chunks.items():
            checksum = zlib.crc32(kind + data)
            content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
        return content


class Histogram:
    """A histogram of the finite elements of an array, for `run.log(x=Histogram(array))`.

    `counts` has the shape (bins,), `edges` (bins + 1,), as `np.histogram` returns them. With
    `edges` the first argument has counts. Raises RowError for arrays of other shapes.

    >>> Histogram([0.0, 1.0, 1.0], bins=2).counts
    array([1., 2.])
    """

    def __init__(self, values: ArrayLike, bins: int = 64, *, edges: Any = None) -> None:
        array = np.asarray(values).astype(np.float64)
        if edges is None:
            array, edges = np.histogram(array[np.isfinite(array)], bins)
        edges = np.asarray(edges, np.float64)
        if array.ndim != 1 or edges.shape != (len(array) + 1,):
            raise RowError(
                "histogram",
                "Histogram()",
                got=f"edges {edges.shape}",
                expected=f"edges of the shape ({len(array) + 1},)" if array.ndim else "an array",
            )
        self.counts: np.ndarray = array.astype(np.float64)
        self.edges: np.ndarray = edges


@dataclass(frozen=True)
class Text:
    """A text for `run.log(sample=Text("..."))`, at loggers that show texts."""

    text: str


MEDIA = Image, Histogram, Text
