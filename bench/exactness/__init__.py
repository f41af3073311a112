"""`python -m bench.exactness`: tests on the user's own models whether speculation changes the target's output."""
