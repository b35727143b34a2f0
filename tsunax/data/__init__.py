"""Data: batches of arrays and records, a cursor over any data, and prefetching.

`batching` makes batches, of rows in an `order`; `packing` makes arrays of sequences, `graphs` of
graphs; `cursors` read any iterable of batches; `prefetching` reads ahead. Devices occur as
shardings only, states not at all.
"""

from tsunax._core import lazy as _lazy

# The stub `__init__.pyi` lists the names; each is loaded when it is first used.
__all__, __getattr__, __dir__ = _lazy(globals())  # pyright: ignore[reportUnsupportedDunderAll]
