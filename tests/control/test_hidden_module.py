from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from kvrelay.control.nats.hidden_module import hidden_module


def test_a_hidden_module_cannot_be_imported_inside_and_can_afterwards(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with hidden_module("colorsys"), pytest.raises(ImportError):
        importlib.import_module("colorsys")
    assert importlib.import_module("colorsys").hsv_to_rgb(0, 0, 1) == (1, 1, 1)


def test_a_module_that_is_loaded_stays_usable():
    before = sys.modules["sys"]
    with hidden_module("sys"):
        assert importlib.import_module("sys") is before
    assert sys.modules["sys"] is before


def test_the_block_ends_with_an_error_and_the_module_is_visible_again():
    with pytest.raises(RuntimeError), hidden_module("not_a_module"):
        raise RuntimeError
    assert "not_a_module" not in sys.modules


def test_the_nats_connection_does_not_import_aiohttp():
    code = "import sys, kvrelay.control.nats.connection; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
