"""What crosses from one rank to another outside a model's forward."""
