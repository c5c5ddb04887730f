"""Whole engines: each schedules by itself and implements ``engine.contract``."""
