"""The HTTP front end, in a process of its own: rank 0 decodes and never touches a socket of a client."""
