"""What all services share: errors, settings, RPC, telemetry, and what they must agree on."""
