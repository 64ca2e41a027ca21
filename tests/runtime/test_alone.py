"""One process without torchrun: what fails there ends the block, and a notebook goes on."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from graphpar.runtime import start
from graphpar.runtime.errors import RuntimeProgramError


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(RuntimeProgramError("no such weight"), 2, "error: no such weight"), (ValueError("odd"), 1, "ValueError: odd")],
)
def test_what_fails_leaves_the_process(
    error: Exception, status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left, start():
        raise error
    assert left.value.code == status and said in capfd.readouterr().err
    assert not dist.is_initialized()
    with start() as ranks:
        assert ranks.world_size == 1
