"""Which message of a post carries its notification."""

from __future__ import annotations

import pytest

from kvrelay.transfer.p2p.posts import SentPost, rides
from kvrelay.transfer.values import Pieces, TransferOp


@pytest.mark.parametrize(
    ("op", "num_parts", "is_carried"),
    [
        (TransferOp.WRITE, 1, True),
        # The first message of several would tell of a write whose last bytes have not landed.
        (TransferOp.WRITE, 2, False),
        (TransferOp.READ, 1, False),
    ],
)
def test_only_the_one_message_of_a_write_carries_its_notification(
    op: TransferOp, num_parts: int, is_carried: bool
) -> None:
    post = SentPost(1, op, "d", Pieces((), (), ()), b"done", None, num_parts)
    assert rides(post) == (b"done" if is_carried else None)
