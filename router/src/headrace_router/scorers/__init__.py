"""Scorers, one a file: each rates candidates from 0 to 1, 1 is best."""
