"""Filters, one a file: each names what forbids a replica, and explanations show that name.

`unavailable.py` puts those in a row that look at the replica alone; the others look at its load, at
its breaker, or at the request.
"""
