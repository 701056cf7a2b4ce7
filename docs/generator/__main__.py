"""`python -m docs.generator FOLDER`: write the site's source there."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.generator.assemble import assemble

if __name__ == "__main__":
    try:
        print(f"{len(assemble(Path(sys.argv[1])))} pages in {sys.argv[1]}")
    except ValueError as error:
        sys.exit(f"the site cannot be made: {error}")
