"""Checkpoints: a run on a disk or in a bucket, whole or not there, verified; and files of other
libraries (`exchange`). It knows states and the place in data. It must not know loops.

    saving           Checkpoints, the face: _writing and _reading are its two halves, retention what
                     it keeps, _background its threads and locks, _state_in_hand which one wins
    _home            what the homes of checkpoints do alike; _disk_home: on a disk, safetensors;
                     _orbax_home: kept by orbax, on a disk or in a bucket
    _blocks          named arrays in files, hashed by `checksums`; _safetensors reads and writes
    leaves           a tree on paper, `manifest` all of a checkpoint on paper, _user_values what users add
    _host_copies     the way to the host; _matching the way back, compared first
    state_facts      which numbers win; script_settings what a script gave, and what was edited since
    exchange         one file for others, and theirs; _orbax: the library, kept quiet
"""

from tsunax.checkpoints.saving import Best, Checkpoints, Restored

__all__ = ["Best", "Checkpoints", "Restored"]
