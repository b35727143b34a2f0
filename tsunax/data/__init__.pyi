# The names of `tsunax.data`, each with its module. Type checkers read this file, and `__init__.py`
# loads a name from here when it is first used.
from tsunax.data.batching import Batches as Batches
from tsunax.data.batching import batches as batches
from tsunax.data.cursors import Source as Source
from tsunax.data.cursors import as_source as as_source
from tsunax.data.graphs import pack_graphs as pack_graphs
from tsunax.data.on_devices import gather as gather
from tsunax.data.packing import interleave as interleave
from tsunax.data.packing import pack as pack
from tsunax.data.packing import pad as pad
from tsunax.data.prefetching import Prefetched as Prefetched
from tsunax.data.prefetching import prefetch as prefetch
