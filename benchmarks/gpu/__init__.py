"""Nine minutes on one GPU: is tsunax right there, and what does it cost? The package runs where nothing is installed.

    PYTHONPATH=. python -m benchmarks.gpu                  # from the root of a checkout, with any jax that has CUDA
    PYTHONPATH=. python -m benchmarks.gpu --tiny           # all of it, in small shapes, on a CPU
    PYTHONPATH=. python -m benchmarks.gpu --only checks,gpt --seconds 200 --out DIR

`programme.py` starts each part in a process of its own with a limit of its time, the most valuable first. A part writes
the file of results anew after every number, so that the file is complete whatever ends the run. Contenders of a ratio
take turns within one process; torch has a process of its own. `checks.py` says whether results are right on the device;
`tests/test_gpu.py` runs the same checks under pytest.
"""
