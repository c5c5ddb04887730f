"""``python -m kvrelay`` is ``kvrelay``."""

from kvrelay.cli.main import main

if __name__ == "__main__":
    main()
