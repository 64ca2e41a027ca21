"""torchrun for nodes that come and go: where the job that they meet for has ended, that is said.

python3 -m graphpar.runtime.launching.nodes OPTIONS OF TORCHRUN
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from graphpar.runtime.distributed import USER_ERROR


def main(arguments: Sequence[str]) -> None:
    """Run torchrun with these arguments."""
    try:
        run.main(list(arguments))
    except RendezvousClosedError:
        given = run.parse_args(list(arguments))
        print(
            f"launch.sh: the job {given.rdzv_id} that nodes met for at {given.rdzv_endpoint} has ended, so none can join it. For a new "
            "start set HEAD to a new file, or JOB to another name, the same on all nodes",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(USER_ERROR) from None


if __name__ == "__main__":
    main(sys.argv[1:])
