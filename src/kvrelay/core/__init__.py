"""The vocabulary that rooms share: requests and states, hashes, KV layouts, events, hand-offs, messages. No I/O."""
