"""Caches of a model by kind of layer, the slots of its sequences, and the prefix cache."""
