"""Programs that tests start, one process or several: `python -m tests.programs.fitting WORK`."""
