"""What `fit` is made of: settings, feed, the compiled loop, history, callbacks, loggers, pictures.

The loop itself stands in `loop.py`. How a step computes, or a checkpoint is written, is not known.
"""
