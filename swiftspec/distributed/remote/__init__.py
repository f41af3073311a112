"""Draft or target in another process: one client and one server, over shared memory, TCP or gRPC."""
