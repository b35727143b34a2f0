"""Drivers that hurt a run from outside and compare what it ends with. `python -m tests.faults --help`."""
