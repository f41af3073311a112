"""What sweeps have stored, as the engine reads it."""
