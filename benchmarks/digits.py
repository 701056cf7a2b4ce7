"""digits: the embedded suite with every protocol and aligner, on a CPU, one command."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.suite_table import main

if __name__ == "__main__":
    main("digits")
