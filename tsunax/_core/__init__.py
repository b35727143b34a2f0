"""What every part of the package may use: trees, patterns, checks, norms, files. It knows nobody.

Nothing here has heard of a training state, a rule or a loop.
"""
