"""Draft trees: expansion, proposals, tree masks, and acceptance of verified nodes."""
