"""Operator backends: classes that implement the operators of a model for one kind of hardware each. `Backend` in
reference/ is the base; unfused/, cpu/ and cuda/ override the operators that they have."""
