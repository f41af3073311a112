"""The draft group of an asynchronous job: its server, its client on the target's leader, failover and recovery."""
