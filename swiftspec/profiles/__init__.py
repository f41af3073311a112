"""Profiles: files with the measured step times and speeds of a model pair on one machine; and the parser of
`--emulate`."""
