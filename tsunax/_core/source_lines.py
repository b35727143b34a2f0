"""Which lines of a traceback are the user's: not Python's own, not this package's."""

import os
import types

import jax

OUR_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
LIBRARIES = "<frozen", os.path.join(os.path.dirname(os.__file__), ""), OUR_FOLDER


def hide_own_frames(error: BaseException) -> None:
    """Remove tsunax's frames from the traceback of an exception of other code, as JAX does.

    They stay if the exception comes from tsunax, or from JAX called by it: they show the fault.
    """
    if jax.config.jax_traceback_filtering == "off":  # type: ignore[attr-defined]
        return
    tb, frames = error.__traceback__, []
    while tb is not None:
        frames.append((tb, tb.tb_frame.f_code.co_filename))
        tb = tb.tb_next
    jax_folder = os.path.dirname(jax.__file__)
    files_outside_jax = [name for _, name in frames if not name.startswith(jax_folder)]
    if files_outside_jax and not files_outside_jax[-1].startswith(OUR_FOLDER):
        traceback = None
        for tb, name in reversed(frames):
            if not name.startswith(OUR_FOLDER):
                traceback = types.TracebackType(traceback, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
        error.__traceback__ = traceback
