"""GPU benchmarks: single operators, single steps, whole decodes, and target figures for them."""
