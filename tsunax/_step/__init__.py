"""Parts of a training step: the gradient, calls of a loss function, populations, error messages.

It knows states and losses. It must not know loops, data or files.
"""
