"""What `fit` is made of: settings, feed, the compiled loop, history, callbacks, loggers, progress,
pictures.

The loop itself stands in `loop.py`. Nothing here must know how a step computes, or how a checkpoint
is written.
"""
