"""Run the benchmarks named on the command line, or all of them."""

import importlib
import sys

ALL = (
    *("recompiles", "selection", "step", "rules", "convolutions", "accumulate", "precision", "remat"),
    *("data", "loop", "checkpoint", "sharding", "population", "search", "insight", "importing"),
)

if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or ALL
    for name in names:
        if name not in ALL:
            sys.exit(f"benchmarks: got {name!r}, expected one of {', '.join(ALL)}")
    for name in names:
        importlib.import_module(f"benchmarks.{name}").main()
