"""Sweeps, predictions, reports, timelines and exactness tests. No other package of the runtime imports this one."""
