"""Ranks of one group that read a checkpoint together, so that each byte is read once.

A cooperative checkpoint is a mapping of handles, like any other. Rows that one rank alone wants,
it reads itself. Rows that several ranks want are laid out in batches, in the order in which a load
reads them, and go through a ring of buffers: each rank reads its part of a batch, and a handle
copies its region out of the buffers. A handle that is read in another order, or again, reads
directly.

``region.py`` has handles that know their region, ``wants.py`` what ranks tell each other,
``batches.py`` the layout, ``checkpoint.py`` the load, and ``choice.py`` whether it is worth it.
"""

from vllm_module.cooperative.checkpoint import CooperativeCheckpoint
from vllm_module.cooperative.reading import read_together

__all__ = ["CooperativeCheckpoint", "read_together"]
