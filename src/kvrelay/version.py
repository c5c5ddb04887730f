"""The version, apart from the package's door: rooms that say it must not import what the door offers."""

__version__ = "0.1.0"
