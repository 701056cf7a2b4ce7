"""One run in several processes, under torchrun: the first one drives, the others join in where there is work for all.

`launch` starts it. Encoding and fits are shared out (see docs/torchrun.md); all else, and all writing, is the first
process's own.
"""

from orthomerge.distributed.group import Group, current_group
from orthomerge.distributed.launch import launch, under_torchrun

__all__ = ["Group", "current_group", "launch", "under_torchrun"]
