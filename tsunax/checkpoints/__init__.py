"""Checkpoints: a run on a disk or in a bucket, whole or not there, verified; and files of other
libraries (`exchange`). The package deals with states and the place in data, never with loops.

    saving           Checkpoints, the class of users: _writing and `reading` are its two halves,
                     _background its threads and locks
    _home            the home of checkpoints on a disk, safetensors; _orbax_home: kept by orbax, on
                     a disk or in a bucket
    _blocks          named arrays in files, hashed by `checksums`; _safetensors reads and writes
    _foreign         the gate for foreign files: their memory and kinds, by their bytes
    leaves           describes a tree, `manifest` a checkpoint and the values of users in it
    _matching        compares a checkpoint with a tree, and fills the tree
    state_facts      facts of a state; merging which numbers win; script_settings a script's
                     settings and their later edits
    exchange         single files for and of other programs; _orbax: the library, kept quiet
"""

from tsunax.checkpoints.saving import Best, Checkpoints, Restored

__all__ = ["Best", "Checkpoints", "Restored"]
