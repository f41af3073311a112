"""The draft group as a service to the target group: client, server, failover, recovery."""
