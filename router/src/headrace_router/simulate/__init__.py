"""A discrete-event simulator of a fleet, around the very code that picks in production.

Requests come out of a trace; routers are the production desk, queue, policies, mirror and load book
on simulated time; workers are engines with paged LRU caches and a cost model. `python -m
headrace_router.simulate` runs it; docs/routing-simulation.md says what it found.
"""
