"""The public HTTP API of the fleet: one sequence per request, from key check to usage event."""
