"""``python -m kvrelay`` is ``kvrelay``."""

import sys

from kvrelay.cli.main import main

if __name__ == "__main__":
    # Else multiprocessing would not run this module in processes that it spawns. ``cli/main.py`` says what for.
    sys.modules["__main__"].__spec__ = None
    main()
