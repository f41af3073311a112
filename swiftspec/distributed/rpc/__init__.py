"""Draft and target on different machines, over gRPC: the messages, the services, and the roles that ask them."""
