"""The command line. A command parses its arguments, builds settings, and calls ``launch`` or ``bench``."""
