"""Sends outputs to one frontend: in one message, or in several if the transport's limit requires it; and joins those of
one request that wait together.

It does not know the requests' owners. If a frontend cannot be reached, the request plane ends its connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import msgspec

from kvrelay.core.messages import OutputBatch, TokenOutput
from kvrelay.errors import PayloadTooLargeError
from kvrelay.rpc.base import Peer, RpcServer


def send_outputs(server: RpcServer, peer: Peer, outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
    """Send ``outputs`` in order. Returns the outputs that are too large for a message of their own; they were not
    sent."""
    try:
        server.send(peer, OutputBatch(tuple(outputs)))
    except PayloadTooLargeError:
        if len(outputs) == 1:
            return list(outputs)
        half = len(outputs) // 2
        return send_outputs(server, peer, outputs[:half]) + send_outputs(server, peer, outputs[half:])
    return []


def joined(outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
    """What these outputs of one request say, in as few: a frontend handles one with many tokens as fast as any."""
    runs = [[outputs[0]]]
    for before, output in pairwise(outputs):
        if not _may_join(before, output):
            runs.append([])
        runs[-1].append(output)
    return [_join(run) if len(run) > 1 else run[0] for run in runs]


def _may_join(before: TokenOutput, output: TokenOutput) -> bool:
    """Logprobs may be so many that each output needs a message. An end without a token says that no token is the end:
    the answer was given up, or its server told text."""
    return (
        output.position == before.position + len(before.token_ids)
        and before.finish_reason is None
        and len(output.token_ids) > 0
        and before.logprobs is output.logprobs is None
    )


def _join(run: Sequence[TokenOutput]) -> TokenOutput:
    first, last = run[0], run[-1]
    return msgspec.structs.replace(
        first,
        token_ids=tuple(chain.from_iterable([output.token_ids for output in run])),
        finish_reason=last.finish_reason,
        stop_token=last.stop_token,
    )
