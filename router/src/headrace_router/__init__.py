"""The router: picks a replica for a request."""
