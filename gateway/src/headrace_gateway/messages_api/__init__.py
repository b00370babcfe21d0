"""/v1/messages and /v1/messages/count_tokens, as the SDKs of Anthropic speak them."""
