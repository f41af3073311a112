"""Collectives of a tensor-parallel group, one implementation per interconnect."""
