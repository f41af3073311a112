"""Sweeps, predictions, reports, timelines, tests of exactness: it imports everything, nothing imports it."""
