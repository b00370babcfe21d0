"""Admission: all limits of a request in one atomic decision."""
