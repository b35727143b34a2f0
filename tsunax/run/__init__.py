"""A run of `fit`: its data, calls, rows and displays, and the parts between its steps.

The loop itself is in `loop.py`. This folder uses steps and checkpoints, and does not compute a step
or write a checkpoint file. To understand a run, read in this order:

    loop.py       the loop: call, read the calls before, hold the boundary
    part.py       a part of a run: `due`, `at`, `read` and `end`; evaluation and saving are parts
    fitting.py    the steps of the loop: calls under way, their rows, boundaries
    saving.py     a save, and the checkpoint from which a run starts; rewinding.py: the way back
    opening.py    how a run starts; options.py checks its arguments

Batches come from feed.py, which chooses a feeder of chunks.py; fused_loop.py has the compiled loop.
run.py is the `run` that callbacks get, with its rows; info_columns.py makes numbers of infos,
history.py keeps them, and rejections.py counts rejected steps. user_calls.py calls `evaluate`,
callbacks and parts of users. callbacks.py, profiling.py, verifying.py and watchdog.py, loggers.py
and media.py, progress.py and plots.py, control.py and mailboxes.py (commands) are loaded if needed.
evaluation.py has `evaluate` and `predict`.
"""
