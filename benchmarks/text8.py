"""text8: eight real text tasks, one command (about five minutes on a GPU, hours on a CPU)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.suite_table import main

if __name__ == "__main__":
    main("text8")
