"""The count of private accesses sees what it should, and nothing else; it guards a limit."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tools.private_access import main, private_accesses

CODE = """
worker._decode._ledger.open()
self._own = cls._also = pair._replace(a=1)._asdict()
worker.__class__.public = node.lease
setattr(worker, "_name", 1)
worker._writes = 2
"""


def test_only_private_names_of_other_objects_count() -> None:
    assert sorted(private_accesses(ast.parse(CODE))) == ["_decode", "_ledger", "_writes"]


@pytest.mark.parametrize(("limit", "status"), [("3", 0), ("2", 1)])
def test_a_limit_is_guarded(tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str, status: int) -> None:
    (tmp_path / "test_it.py").write_text(CODE)
    assert main([str(tmp_path), "--max", limit]) == status
    assert "    3  in all" in capsys.readouterr().out
