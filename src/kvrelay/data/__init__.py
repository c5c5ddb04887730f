"""Files and texts: the bundled checkpoint, the generators of the text it was trained on, tokenizer files.

Owns where the bundled checkpoint lies and what its training text looks like. Knows nothing of models, tensors or
serving, and imports neither torch nor transformers, so that any process may use it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

BUNDLED_MODEL_NAME = "llama-kvrecall"


def bundled_checkpoint_path() -> Path:
    """The directory of the bundled checkpoint, in Hugging Face layout."""
    return Path(str(files(__package__).joinpath(BUNDLED_MODEL_NAME)))
