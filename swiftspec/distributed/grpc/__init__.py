"""Draft and target on different machines, over gRPC: the messages, the services, and the roles that ask them."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own lines on stderr; what fails comes as an error, too
