"""A block keeps the shards of what it gathers, and in the backward gathers again.

    gather_again(block)                    of what ``all_gather`` makes only the argument is kept, where the backward
                                           reads the result
    gather_again(block, pointwise=True)    and what ``recompute_pointwise`` keeps

The backward gathers once for all that reads the result, as q, k and v do, and frees it after the last of them. Nothing
else runs again. All ranks run the same backward in the same order, so their collectives meet.
"""

from torch import nn

from graphpar.emitted.collectives import watchers
from graphpar.emitted.pointwise import made_again


def gather_again(block: nn.Module, pointwise: bool = False) -> None:
    """Make ``block`` keep shards instead of what it gathers."""
    block.forward = made_again(block.forward, pointwise, watchers)
