"""`python -m docs.generator FOLDER`: write the source of the site into a folder."""

import sys
from pathlib import Path

from docs.generator.assemble import assemble

print(f"{len(assemble(Path(sys.argv[1])))} pages in {sys.argv[1]}")
