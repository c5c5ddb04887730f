"""KV beyond the pool: blocks that the engine evicts live on in host memory and on disk, and are read back on a hit.

    engine ── evicts ──> KvTiers ── copy, bounded queue ──> thread ──> HostStore   memory of all workers of a host
           <─ verified ─ KvTiers <── reads go first ─────── thread <── DiskStore   a directory

``block.py`` is what is stored and how it proves itself, ``store.py`` the contract of a store, ``host.py`` and
``disk.py`` the two stores, ``broker.py`` the process that owns a host's memory, ``policy.py`` what is worth storing,
``tiers.py`` the engine's source, ``carrier.py`` the thread that copies for it; the simulator has another carrier, and
the rest is the same. No store can change an answer: whatever does not prove itself is a miss.
"""
