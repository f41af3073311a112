"""Remote draft and remote target over gRPC: messages, services, and the drafters and verifiers that call them."""
