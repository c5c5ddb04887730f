"""What a worker's two sides decide, without a thread, a task or a socket: ``decode.py`` and ``prefill.py`` on
``ports.py``."""
