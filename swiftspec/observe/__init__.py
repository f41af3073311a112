"""What only looks or waits: traces, emulated step times, acceptance."""
