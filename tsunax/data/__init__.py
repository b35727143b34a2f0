"""Data: batches of arrays and records, a cursor over any data, and prefetching.

`batching` makes batches, of rows in an `order`; `packing` makes arrays of sequences, `graphs` of
graphs; `cursors` read any iterable of batches; `prefetching` reads ahead. Devices occur as
shardings only, states not at all.
"""

from tsunax.data.batching import Batches, batches
from tsunax.data.cursors import Source, as_source
from tsunax.data.graphs import pack_graphs
from tsunax.data.on_devices import gather
from tsunax.data.packing import interleave, pack, pad
from tsunax.data.prefetching import Prefetched, prefetch

__all__ = [
    "Batches", "Prefetched", "Source", "as_source", "batches", "gather", "interleave", "pack",
    "pack_graphs", "pad", "prefetch",
]  # fmt: skip
