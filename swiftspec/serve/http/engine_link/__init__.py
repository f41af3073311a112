"""The link between the HTTP process and rank 0: client, server and message frames."""
