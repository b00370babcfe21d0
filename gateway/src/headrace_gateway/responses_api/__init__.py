"""/v1/responses: answers that may be kept, continued, and made in the background."""
