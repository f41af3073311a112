"""Engine link between the HTTP front end and rank 0: client, server and message frames."""
