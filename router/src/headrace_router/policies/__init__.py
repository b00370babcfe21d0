"""Picking policies, one a file: which of the replicas that may be picked gets the request."""
