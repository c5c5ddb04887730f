"""Making checkpoints: random ones of every supported architecture, and the tokenizers that go with them.

The door is ``make_model``. This package writes the files of a Hugging Face directory; the loader reads them.
"""

from __future__ import annotations

from kvrelay.executors.torch.checkpoints.architectures import ARCHITECTURES, SIZES
from kvrelay.executors.torch.checkpoints.make_model import DTYPES, make_model

__all__ = ["ARCHITECTURES", "DTYPES", "SIZES", "make_model"]
