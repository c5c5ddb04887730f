"""``kvrelay`` and ``python -m kvrelay``."""

import sys

try:
    from kvrelay.cli.main import main
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    # Else multiprocessing would not run this module in processes that it spawns. ``cli/main.py`` says what for.
    sys.modules["__main__"].__spec__ = None
    main()
