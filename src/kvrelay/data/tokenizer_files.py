"""Which files of a checkpoint decide how text becomes tokens and tokens become text, and a fingerprint of them.

Workers compute it from their copy of the checkpoint, frontends from theirs: with two different copies an answer
would be other text than the model wrote.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
)


def tokenizer_fingerprint(model_dir: Path) -> str:
    """16 hex digits of the files' bytes; a file that is missing counts as such. Raises OSError."""
    digest = xxhash.xxh3_64()
    for name in TOKENIZER_FILES:
        file = model_dir / name
        content = file.read_bytes() if file.is_file() else None
        digest.update(f"{name}:{-1 if content is None else len(content)}:".encode())
        digest.update(content or b"")
    return str(digest.hexdigest())
