"""Data: batches of arrays and records, a cursor over any data, and prefetching.

`batching` makes batches, of rows in an `order`; `packing` makes arrays of sequences, `graphs` of
graphs; `cursors` read any iterable of batches; `prefetching` reads ahead. Devices occur as
shardings only, states not at all.
"""

from tsunax._core import lazy as _lazy

# The names stand once, in the stub beside this file; each is loaded when it is first used.
__all__, __getattr__, __dir__ = _lazy(globals())  # pyright: ignore[reportUnsupportedDunderAll]
