"""Which lines of a traceback are the user's: not Python's own, not this package's."""

import os

OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
LIBRARIES = "<frozen", os.path.join(os.path.dirname(os.__file__), ""), OURS
