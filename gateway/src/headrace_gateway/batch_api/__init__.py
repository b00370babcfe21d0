"""/v1/files and /v1/batches: requests in a file, answered in the gaps of other traffic."""
