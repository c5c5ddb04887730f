"""One exception tree, ordered by what the caller can do about it.

=====================  ==========================================  ============================
branch                 the caller can                              seen by a client as
=====================  ==========================================  ============================
InvalidInputError      fix the input                               400, 404, 413 / exit code 2
RetryElsewhereError    try again later, or at another worker       429, 503 with Retry-After
RecomputeError         compute the KV cache again, locally         nothing but a later token
ReRegisterError        register again under a new lease            nothing
FatalError             restart the process                         another worker's answer
=====================  ==========================================  ============================

Foreign exceptions are mapped to these at the edge where they arise, with ``from exc``. Attributes carry the values that
a handler needs; the message is one line that a person can act on.
"""

from __future__ import annotations

import errno


class KvrelayError(Exception):
    """Base of all exceptions that kvrelay raises on purpose. ``exit_code`` is the command line's exit code."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def noted(self) -> str:
        """The message without what it quotes of a prompt, to be kept and shown to others."""
        return self.message


# -- fix the input ----------------------------------------------------------------------------------------------------


class InvalidInputError(KvrelayError):
    """The input is wrong and stays wrong. ``param`` names the offending field, ``status`` is the HTTP status."""

    exit_code = 2
    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ConfigError(InvalidInputError):
    """A setting is unknown or cannot be honoured."""


class UnsupportedModelError(InvalidInputError):
    """The checkpoint asks for an architecture or an option that the runner does not implement."""


class CheckpointError(InvalidInputError):
    """The checkpoint directory is missing, incomplete or damaged."""


class ModelNotFoundError(InvalidInputError):
    """No worker serves a model of that name."""

    status = 404


class PayloadTooLargeError(InvalidInputError):
    """The request exceeds the frontend's size limit, or this client's."""

    status = 413


class PromptTooLongError(InvalidInputError):
    """Prompt and answer do not fit into the model's context or into the KV pool. ``lengths``: of the prompt, the answer
    and the context, if a shorter answer would fit."""

    def __init__(self, message: str, param: str = "prompt", lengths: tuple[int, int, int] | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.lengths = lengths


class ProtocolError(KvrelayError):
    """A message is malformed or of an unknown type or version. It is dropped, logged and counted."""


# -- retry elsewhere, or later ----------------------------------------------------------------------------------------


class RetryElsewhereError(KvrelayError):
    """Nothing is wrong with the request; this process cannot take it now. ``retry_after_s`` is in seconds."""

    status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverloadedError(RetryElsewhereError):
    """A bounded queue is full. ``spacing_s``: seconds in which room for one more such request arises; 0: unknown."""

    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0, spacing_s: float = 0.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.spacing_s = spacing_s


class KvDemandError(OverloadedError):
    """The KV blocks that requests hold or wait for are above the watermark."""


class ObjectiveMissedError(OverloadedError):
    """The request's objective for the first token cannot be met any more (``--early-reject``)."""


class WorkerUnavailableError(RetryElsewhereError):
    """No worker can take the request, or the worker that had it is gone."""


class ControlUnavailableError(RetryElsewhereError):
    """The control plane (NATS, etcd) cannot be reached. The exit code tells a supervisor that nothing is wrong with the
    process, so the exit does not count as a crash."""

    exit_code = 69


class AddressInUseError(KvrelayError):
    """Another process uses the requested port."""

    @classmethod
    def at(cls, address: str, reason: OSError) -> AddressInUseError:
        """The error for a refusal of the operating system to listen on ``address`` (HOST:PORT)."""
        remedy = "; choose another port" if reason.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        return cls(f"cannot listen on {address}: {reason.strerror or reason}{remedy}")


# -- recompute --------------------------------------------------------------------------------------------------------


class RecomputeError(KvrelayError):
    """The KV is lost, the tokens are not. The request is prefilled again, locally."""


class TransferError(RecomputeError):
    """A read or write of KV failed or ran past its deadline. ``peer`` is the other worker's id."""

    def __init__(self, message: str, *, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class IncompatiblePeerError(RecomputeError):
    """The peer's KV cache cannot be exchanged with ours: its compatibility hash differs."""


# -- register again ---------------------------------------------------------------------------------------------------


class ReRegisterError(KvrelayError):
    """This process's registration is gone."""


class LeaseLostError(ReRegisterError):
    """The lease ended before it was renewed."""


# -- restart ----------------------------------------------------------------------------------------------------------


class FatalError(KvrelayError):
    """The process cannot go on."""


class IntegrityError(FatalError):
    """An invariant of a pool or an index does not hold: a block is lost or owned twice."""


class EngineDeadError(FatalError):
    """The engine's thread or the executor has failed; its requests continue on other workers."""


class PeerLostError(EngineDeadError):
    """A collective failed, or does not come to an end: another rank has ended or hangs."""


class EngineHungError(FatalError):
    """The engine's thread has been at one step for too long; its requests continue on other workers."""

    exit_code = 70


class IllegalTransitionError(FatalError):
    """A caller asked a state machine for a move that its table does not contain."""
