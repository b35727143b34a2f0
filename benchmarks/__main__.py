"""Run the benchmarks named on the command line, or all of them, each in a process of its own; then write RESULTS.md.

Results are written into benchmarks/results/ and replace those of the runs before. Options go to each benchmark.
"""

import os
import subprocess
import sys

from benchmarks._report import TARGETS, report

OVER_DEVICES = ("sharding", "muon")
EIGHT = "--xla_force_host_platform_device_count=8"


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(print(f"{__doc__}\nNames: {', '.join(TARGETS)}"))
    options = [arg for arg in sys.argv[1:] if arg.startswith("-")]
    names = [arg for arg in sys.argv[1:] if not arg.startswith("-")]
    for name in names:
        if name not in TARGETS:
            sys.exit(f"benchmarks: got {name!r}, expected one of {', '.join(TARGETS)}")
    failed = []
    for name in names or TARGETS:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {EIGHT if name in OVER_DEVICES else ''}"
        command = [sys.executable, "-c", f"from benchmarks.{name} import main; main()", *options]
        if subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags.strip()}).returncode:
            failed.append(name)
    report()
    if failed:
        sys.exit(f"benchmarks: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
