"""What outlives a request: stored responses, files, batches, idempotency records, stories."""
