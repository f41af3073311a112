"""Commands `swiftspec profile`, `quantize` and `doctor`. No other package of the runtime imports this one."""
