"""`python -m swiftspec.exactness`: whether speculation changes what the target says, tested on one's own models."""
