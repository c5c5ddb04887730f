"""Which cores vLLM's compute threads get on a machine without a GPU.

Two instances whose threads share cores wait for each other in every layer, so each worker has cores of its own, and its
threads stay there. None is bound to one core: the processes of kvrelay run on these, too, and all threads of a layer
would wait for the one whose core is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.cores import allowed_cores, usable_cores
from kvrelay.errors import ConfigError

CORES = "KVRELAY_CORES"
"""The environment variable with the cores on which the threads of vLLM's engine process stay."""
BLOCKTIME = "20us"
"""How long an idle OpenMP thread spins before it sleeps. With vLLM's 5 ms it spins from step to step, on cores that the
processes which deliver the step's tokens need."""


def compute_cores(given: str, allowed: Sequence[int], num_threads: int) -> list[int]:
    """The cores named by ``given``, e.g. "0-3,8"; empty: the first ``num_threads`` of the ``allowed`` ones.

    Raises ConfigError for a list that cannot be read or that names other cores.
    """
    if not given:
        return list(allowed[:num_threads])
    cores = parse_cores(given)
    if wrong := [core for core in cores if core not in allowed]:
        raise ConfigError(f"engine_cores names core {wrong[0]}, which this process may not use", param="engine_cores")
    return cores


def parse_cores(text: str) -> list[int]:
    """The cores of a list like "0-3,8", in order and each once. Raises ConfigError."""
    cores: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(f"{text!r} is no list of cores, e.g. 0-3,8", param="engine_cores")
        cores.update(dict.fromkeys(range(int(first), int(last or first) + 1)))
    return list(cores)


def format_cores(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))


def share_of(cores: Sequence[int], number: int, num_workers: int) -> list[int]:
    """The cores of worker ``number``: an equal part, or one shared core if there are more workers than cores."""
    size = max(1, len(cores) // num_workers)
    first = (number * size) % len(cores)
    return list(cores[first : first + size])


def shares(given: str, num_workers: int) -> list[str]:
    """The cores of each of ``num_workers`` on this machine, of those that are ``given``, or of all that it may use.
    Raises ConfigError."""
    cores = compute_cores(given, allowed_cores(), len(usable_cores()))
    return [format_cores(share_of(cores, number, num_workers)) for number in range(num_workers)]


def thread_environment(cores: Sequence[int], num_ranks: int) -> dict[str, str]:
    """Environment variables for vLLM's engine process. With several ranks each gets an equal part of the cores, and
    vLLM binds their threads."""
    if num_ranks > 1:
        parts = [format_cores(share_of(cores, rank, num_ranks)) for rank in range(num_ranks)]
        return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(parts)}
    openmp = {"OMP_NUM_THREADS": str(len(cores)), "KMP_BLOCKTIME": BLOCKTIME, "KMP_TPAUSE": "0"}
    return {CORES: format_cores(cores), **openmp}
