"""Multi-process execution: job launch, rank groups, channels between ranks, and gRPC workers."""
