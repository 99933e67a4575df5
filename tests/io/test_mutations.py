"""Every rule of the reader has a line in the tables, and every line gives its message."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from types import ModuleType, TracebackType

import pytest

from hybrid_pack.errors import HybridPackError
from hybrid_pack.io import bitmap, config, experts, safetensors, shards, tiers
from hybrid_pack.io import checkpoint as checkpoint_module
from hybrid_pack.io.checkpoint import open_checkpoint
from tests.io.content_mutations import CONFIG_CASES, MAP_CASES, TENSOR_CASES
from tests.io.file_mutations import HEADER_CASES, INDEX_CASES
from tests.io.mutation import MAP_FILE, Case

CASES = (*HEADER_CASES, *INDEX_CASES, *MAP_CASES, *CONFIG_CASES, *TENSOR_CASES)
MODULES = (safetensors, shards, bitmap, config, experts, tiers, checkpoint_module)


def fail(root: Path, case: Case) -> HybridPackError:
    case.change(root)
    given = root / MAP_FILE
    with pytest.raises(HybridPackError) as caught:
        open_checkpoint(root, bit_map_file=given if given.is_symlink() or given.exists() else None, **case.options)
    return caught.value


def test_the_good_checkpoint_opens_without_notes(small_checkpoint: Path) -> None:
    assert open_checkpoint(small_checkpoint).notes == ()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_mutation(checkpoint: Path, case: Case) -> None:
    error = fail(checkpoint, case)
    assert type(error) is case.error
    assert re.search(case.message, str(error)), str(error)
    assert "\n" not in str(error)


def raises_of(module: ModuleType) -> set[tuple[str, int]]:
    """(file, first line) of every raise statement."""
    assert module.__file__
    tree = ast.parse(Path(module.__file__).read_text())
    return {(module.__file__, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc}


def lines_of(error: BaseException | None) -> set[tuple[str, int]]:
    """(file, line) of every frame an error, or one it replaced, came through."""
    found: set[tuple[str, int]] = set()
    while error is not None:
        frame: TracebackType | None = error.__traceback__
        while frame is not None:
            found.add((frame.tb_frame.f_code.co_filename, frame.tb_lineno))
            frame = frame.tb_next
        error = error.__context__
    return found


def test_every_raise_has_a_line(small_checkpoint: Path, tmp_path: Path) -> None:
    reached: set[tuple[str, int]] = set()
    for number, case in enumerate(CASES):
        root = tmp_path / str(number) / "small"
        shutil.copytree(small_checkpoint, root)
        reached |= lines_of(fail(root, case))
        shutil.rmtree(root)
    missing = set().union(*map(raises_of, MODULES)) - reached
    assert not missing, sorted(missing)


def test_every_line_has_its_own_name() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
