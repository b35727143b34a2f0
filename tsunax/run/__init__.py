"""The parts of `fit`: settings, feed, the compiled loop, history, callbacks, loggers, pictures.

The loop itself is in `loop.py`. This folder uses steps and checkpoints, and does not compute a step
or write a checkpoint file.
"""
