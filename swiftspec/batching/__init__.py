"""Continuous batching: a scheduler of sequence groups, which requests join and leave between two rounds.

The requests of an exact batch (chains.py) and of mode smc (the package smc) are sequence groups. The protocol
`GroupMethod` (group_method.py) holds what differs between the two.
"""
