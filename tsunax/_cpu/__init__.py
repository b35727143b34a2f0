"""Programs rewritten for XLA's CPU compiler: the same numbers, in less time.

Two calls, each of which takes a function and returns one: `convolutions.fast` keeps convolutions in
compiled loops fast, and `kept_sums.keep_sums` keeps large sums of cotangents in memory. With both
replaced by the identity the package computes the same (`tests/test_cpu.py`), only slower. The
folder knows jaxprs only.
"""
