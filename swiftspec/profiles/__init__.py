"""Profiles: stored measurements of sweeps, as the engine reads them."""
