"""Per-rank transfers: each process of an engine moves its own part of the KV. The door is ``build``.

transfer thread ── post, poll ──> RankedTransport ── split by (our rank, the peer's rank) ──┐
                                        ^ one PostEnd                                       v
                                        └──────────────── RankTransport, one per rank process ══ socket ══> RankMover
                                                                                        its own nixl, shm or p2p
"""
