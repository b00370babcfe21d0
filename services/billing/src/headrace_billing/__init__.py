"""Tenants, keys, prices and the ledger: who may ask, at what cost, and each request booked once."""
