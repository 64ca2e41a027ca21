"""``Parts``: a partitioned program, what ``graphpar.partition`` returns."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from graphpar.codegen.package import import_stage
from graphpar.codegen.saving import save_package
from graphpar.errors import GraphparError
from graphpar.ir.program import Program
from graphpar.ir.stage import Stage
from graphpar.passes.compilation import Compilation
from graphpar.passes.planning.planned import Planned
from graphpar.report.notebook import report_frame
from graphpar.runtime.checkpoints.weights import save_tensors
from graphpar.runtime.option_kinds import GENERATE


@dataclass
class Parts:
    """A partitioned program: its compilation, the text of the emitted package, and the data of its report."""

    compilation: Compilation
    files: dict[str, str]
    report: dict[str, Any]
    model_file: str | None = None
    _folder: Any = field(default=None, repr=False)

    @property
    def program(self) -> Program:
        """The program of one rank, before it is split into stages."""
        return self.compilation.sharded.local

    @property
    def plan(self) -> Planned:
        """The plan that the program was compiled by, and what was found beside it."""
        return self.compilation.plan

    @property
    def stages(self) -> list[Stage]:
        """The stages, in order."""
        return self.compilation.stages

    @property
    def constants(self) -> dict[str, Tensor]:
        """The tensors of ``constants.safetensors``."""
        assert self.compilation.package is not None
        return self.compilation.package.constants

    @cached_property
    def generating(self) -> Parts | None:
        """The program by which this one generates between steps of training, in a folder of the package; None where it does not."""
        made = self.compilation.generating
        if made is None or made.package is None:
            return None
        parts = Parts(made, made.package.files, {}, self.model_file, self)
        parts.folder = self.folder / GENERATE
        return parts

    def __repr__(self) -> str:
        return f"Parts({self.plan!r}: {', '.join(self.files)})"

    def _repr_html_(self) -> str:
        return report_frame(self.report)

    def save(self, folder: str | Path, weights: Mapping[str, Tensor] | None = None, force: bool = False) -> Path:
        """Write the package to ``folder``, which is replaced as a whole; return the folder.

        Args:
            weights: tensors by state_dict name, written to ``weights/model.safetensors``.
            force: write although files in ``folder`` were changed or added. Changed ones are kept as ``NAME.orig``, others stay.

        Raises:
            GraphparError: ``folder`` can't be written, holds something else, or holds changed or added files and ``force`` is not set.
        """

        def write(scratch: Path) -> None:
            for name, text in self.files.items():
                (scratch / name).parent.mkdir(exist_ok=True)
                (scratch / name).write_text(text, encoding="utf-8")
                if name.endswith(".sh"):
                    (scratch / name).chmod(0o755)
            others = {} if self.compilation.generating is None else {GENERATE: self.compilation.generating}
            for place, made in {"": self.compilation, **others}.items():
                assert made.package is not None
                if constants := {name: value.contiguous() for name, value in made.package.constants.items()}:
                    save_tensors(constants, scratch / place / "constants.safetensors")
            if weights is not None:
                (scratch / "weights").mkdir()
                save_tensors(untied(weights), scratch / "weights" / "model.safetensors")

        save_package(folder, write, force)
        return Path(folder)

    @cached_property
    def folder(self) -> Path:
        """The package on disk, in a temporary folder that goes away with this object."""
        self._folder = tempfile.TemporaryDirectory(prefix="graphpar-")
        return self.save(Path(self._folder.name) / "out")

    def stage(self, rank: int) -> nn.Module | list[nn.Module]:
        """Build the emitted stage module of pp rank ``rank`` on the meta device (a list where the rank holds several).

        Raises:
            GraphparError: the plan has no such rank.
        """
        indices = [stage.index for stage in self.plan.stages if stage.rank == rank]
        if not indices:
            raise GraphparError(f"There is no rank {rank}; the plan has ranks 0 to {self.plan.mesh.pp - 1}.")
        modules = [import_stage(self.folder, index) for index in indices]
        return modules[0] if len(modules) == 1 else modules


def untied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep tied tensors under their first name only: a safetensors file can't hold shared memory."""
    seen: set[tuple[int, Any, tuple[int, ...]]] = set()
    kept: dict[str, Tensor] = {}
    for name, value in weights.items():
        key = (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape))
        if key in seen and value.numel():
            continue
        seen.add(key)
        alone = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        kept[name] = value.detach() if alone else value.detach().contiguous().clone()
    return kept
