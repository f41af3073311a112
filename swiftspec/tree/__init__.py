"""What is proposed, and what of it stands."""
