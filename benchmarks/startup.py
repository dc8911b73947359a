"""CPU seconds of `--help`, per command: what a person waits for before anything happens.

    python benchmarks/startup.py [RUNS]

Budget: 0.3 s. Prints minimum and median of user plus system time, beside those of a Python
that does nothing.
"""

import os
import statistics
import subprocess
import sys

CALLS = {
    "python -c pass": ["-c", "pass"],
    "prismtrace --help": ["-m", "prismtrace.cli", "--help"],
    "prismcalib --help": ["-m", "prismcalib.cli", "--help"],
    "prismreplay --help": ["-m", "prismreplay.cli", "--help"],
}


def cpu_seconds(arguments: list[str]) -> float:
    before = os.times()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return (
        after.children_user - before.children_user + after.children_system - before.children_system
    )


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    for name, arguments in CALLS.items():
        cpu_seconds(arguments)  # fills the bytecode cache
        times = [cpu_seconds(arguments) for _ in range(runs)]
        print(f"{name:20}  min {min(times):.3f} s  median {statistics.median(times):.3f} s")


if __name__ == "__main__":
    main()
