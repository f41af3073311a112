"""Transport over a gRPC stream, between a worker and its client. The only folder that imports gRPC."""
