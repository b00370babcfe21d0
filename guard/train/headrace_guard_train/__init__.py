"""Trains, judges and ships the guard's models: ``python -m headrace_guard_train``."""
