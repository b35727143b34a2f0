"""Data: batches from arrays and records, the place in any data to go on from, and prefetching.

It knows devices by their shardings only, and nothing of states.
"""

from tsunax.data.batching import Batches, batches
from tsunax.data.cursors import Source, as_source
from tsunax.data.prefetching import Prefetched, prefetch

__all__ = ["Batches", "Prefetched", "Source", "as_source", "batches", "prefetch"]
