"""Failures in modules that tests share show what was compared, as those in the tests themselves do."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"tests.{folder.name}" for folder in Path(__file__).parent.iterdir()))
