"""/v1/files, and batches of both APIs: requests answered in the gaps of other traffic."""
