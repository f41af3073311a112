"""The draft group as the target group sees it: client, server, failover, recovery."""
